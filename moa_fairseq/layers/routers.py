"""Routers: modules that turn token vectors into a Routing."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.constants import every_index
from moa_fairseq.layers.experts import resolve_backend, top_k_routing, wide_product
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.running_statistics import RunningStatistics
from moa_fairseq.layers.token_hash import TokenHash
from moa_fairseq.layers.torch_compat import is_plain

# CONTRIBUTING.md says how to add a function to one of these tables.
# Functions that turn the probabilities of the selected experts [N, K] into gates
RENORMALIZATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "detached": lambda chosen: chosen / chosen.sum(-1, keepdim=True).detach(),  # MoA Eq. 9
    "full": lambda chosen: chosen / chosen.sum(-1, keepdim=True),
    "none": lambda chosen: chosen,  # MoA's released code
}
# Functions that turn logits [N, E] into probabilities, without changing their order
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": functools.partial(torch.softmax, dim=-1),  # MoA Eq. 7
    "sigmoid": torch.sigmoid,
}
MOST_PROBABLE = ("learned", "frozen")  # the choices that select the K most probable experts
# Functions of other choices: a router and the tokens' ids → the selected experts [N, K]
OTHER_CHOICES: dict[str, Callable[[Any, Tensor | None], Tensor]] = {
    "hash": lambda router, token_ids: router.token_hash(token_ids),
}
CHOICES = (*MOST_PROBABLE, *OTHER_CHOICES)
GATES = ("learned", "uniform", "straight-through")
_CONSTANT_GATES = (
    "With router_renormalize full and one expert per token, every gate is p/p = 1, so the task would not "
    "train the router. Choose router_renormalize detached (the same values, with a gradient) or none, or "
    "raise experts_per_token."
)
_HALF = (torch.float16, torch.bfloat16)
_INIT_STD = 0.02


class WideLinear(nn.Linear):
    """The linear map of a router, [N, C] → [N, E], in float32 or wider, whatever the dtype or autocast.

    Args:
        model_dim: C.
        outputs: E.
        copies: whether to copy inputs in half precision to float32, and keep the copies for the backward
            pass. Otherwise no copy is made, and the gradients of the logits are rounded to half precision.
    """

    def __init__(self, model_dim: int, outputs: int, copies: bool = False):
        super().__init__(model_dim, outputs, bias=False)
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.forward(x)  # the same, now without autocast
        if x.dtype not in _HALF:
            return F.linear(x, self.weight.to(x.dtype))
        if self.copies:
            return F.linear(x.float(), self.weight.float())
        return wide_product(x, self.weight)


class RouterSettings:
    """The settings that `TopKRouter` reads; a family that has no flag for one of them uses the value here."""

    num_experts: int
    experts_per_token: int
    router_renormalize: str
    expert_backend: str
    routing_noise: bool = False
    router_activation: str = "softmax"
    router_choice: str = "learned"
    router_gates: str = "learned"
    routing_bias_rate: float = 0.0


class TopKRouter(RunningStatistics):
    """MoA's router: a softmax over E logits, of which the K largest are selected and renormalised (Eq. 7-9).

    The router computes in float32, whatever the model's dtype or autocast. If router_renormalize is "full"
    and each token selects one expert, its gate is p/p = 1, and no gradient of the task reaches the router.
    Training then raises a UserError (`is_constant`), unless the gates are uniform or the router is not
    learned.

    Args:
        model_dim: C.
        settings: the settings of a family.
            num_experts, experts_per_token: E and K, for each group.
            router_renormalize: "detached" divides the selected probabilities by their sum, without a gradient
                through the sum (the paper's Eq. 9); "full" divides with this gradient; "none" does not divide
                (the authors' released code).
            routing_noise: whether training adds ε·softplus(x·W_noise), ε ~ N(0, 1), to the logits (Eq. 3).
            router_activation: "softmax", or "sigmoid": each expert has its own probability, so they do not
                sum to 1; if K < E, Eq. 9 still applies to them.
            routing_bias_rate: u, the rate of balancing without a gradient (arXiv 2408.15664). Experts are
                selected by probability plus a bias b_i, and weighted by probability alone; after each update,
                b_i changes by u · sign(mean load − load_i) (see `update`).
            router_choice: "learned"; "frozen": the router's weights keep their random values, but hidden
                states can still learn to reach an expert; "hash": the token's id selects (`TokenHash`), and
                the gates are the router's.
            router_gates: "learned"; "uniform": the gates of equal logits (1/K each if they sum to 1), so that
                only auxiliary losses train the router; "straight-through": the uniform gates with the
                gradient of the learned gates, so that the task trains only the selection.
            expert_backend: a choice of `--expert-backend`; with triton, routing is one kernel if the settings
                allow it.
        groups: G groups of E experts, in each of which a token selects K. Each group has its own softmax; the
            sum in Eq. 9 is over all G·K. Expert e of group g has the number g·E + e; slots are group by
            group.
        family: the family of the `Routing`.

    Raises:
        UserError: unless 1 ≤ K ≤ E, and for unknown names and settings that exclude each other.
    """

    selection_bias: Tensor  # a buffer [G·E], if bias_rate is not 0

    def __init__(
        self, model_dim: int, settings: RouterSettings, groups: int = 1, family: str | None = None
    ):
        super().__init__()
        _check(settings, groups)
        self.family = family
        self.num_experts = settings.num_experts
        self.experts_per_token = settings.experts_per_token
        self.groups = groups
        self.choice = settings.router_choice
        self.renormalize = settings.router_renormalize
        self.activation = settings.router_activation
        self.activate = ACTIVATIONS[self.activation]
        if groups > 1 and self.activation == "softmax":
            self.activate = functools.partial(_softmax_in_groups, groups=groups)
        self.gate_values = settings.router_gates
        self.bias_rate = settings.routing_bias_rate
        self.backend = resolve_backend(settings.expert_backend)
        every = groups * self.num_experts
        selected = groups * self.experts_per_token
        self.renormalizes = selected < every or groups > 1
        # Logits have the order of the probabilities, which may underflow and tie
        self.selects_logits = (
            selected < every and groups == 1 and self.choice in MOST_PROBABLE and not self.bias_rate
        )
        self.is_constant = (
            self.renormalize == "full"
            and selected == 1 < every
            and self.choice == "learned"
            and self.gate_values != "uniform"
        )
        # Whether the kernel of routing supports these settings; in training it does not support noise
        self.may_fuse = (
            groups == 1
            and not self.bias_rate
            and self.choice in MOST_PROBABLE
            and self.activation == "softmax"
            and self.gate_values == "learned"
            and self.backend in ("auto", "triton")
        )
        self.projection = WideLinear(model_dim, every)
        self.noise_projection = WideLinear(model_dim, every) if settings.routing_noise else None
        self.token_hash = None
        if self.choice == "hash":
            self.token_hash = TokenHash(self.num_experts, self.experts_per_token)
        if self.choice == "frozen":
            self.projection.requires_grad_(False)
        if self.bias_rate:
            self.register_buffer("selection_bias", torch.zeros(every))
            self.register_buffer("pending", torch.zeros(every), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small random weights: with zeros, every token would select the same experts."""
        nn.init.normal_(self.projection.weight, std=_INIT_STD)
        if self.noise_projection is not None:
            nn.init.zeros_(self.noise_projection.weight)
        if self.token_hash is not None:
            self.token_hash.reset_parameters()

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        token_ids: Tensor | None = None,
        observed: bool = True,
    ) -> Routing:
        """Route tokens.

        Args:
            x: [N, C], or [B, T, C] with N = B·T.
            padding: [N] or [B, T] bool, True = padding, whose gates become zero.
            token_ids: [N] or [B, T] int64, for router_choice "hash".
            observed: whether the loads of this pass count for routing_bias_rate in training.

        Raises:
            UserError: in training, if the task cannot train the router (`is_constant`).
        """
        if self.training and self.is_constant:
            raise UserError(_CONSTANT_GATES)
        x = x.reshape(-1, x.size(-1))
        if padding is not None:
            padding = padding.reshape(-1)
        noise = self.noise_projection if self.training else None
        routed = None
        if self.may_fuse and noise is None and is_plain(self.projection, WideLinear):
            weight = self.projection.weight
            k = self.experts_per_token
            routed = top_k_routing(x, weight, k, self.renormalize, padding, self.backend)
        if routed is None:
            logits = self.projection(x)
            if noise is not None:
                logits = logits + torch.randn_like(logits) * F.softplus(noise(x))
            # An adapter on the projection may return half precision
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            probs = self.activate(logits)
            if self.selects_logits:
                expert_ids = logits.detach().topk(self.experts_per_token).indices
            else:
                expert_ids = self._select(logits, probs, token_ids)
            gates = probs
            if self.renormalizes:
                gates = RENORMALIZATIONS[self.renormalize](probs.gather(-1, expert_ids))
            if gates.shape != expert_ids.shape:
                raise ValueError(
                    f"router_renormalize {self.renormalize!r} makes gates {list(gates.shape)} of "
                    f"{list(expert_ids.shape)} chosen probabilities"
                )
            if self.gate_values != "learned":
                gates = self._uniform_gates(gates, logits)
            if padding is not None:
                gates = gates.masked_fill(padding.unsqueeze(1), 0.0)
        else:
            logits, probs, gates, selected = routed
            expert_ids = self._every_expert(x) if selected is None else selected
        routing = Routing(
            expert_ids,
            gates,
            probs,
            logits,
            self.groups * self.num_experts,
            groups=self.groups,
            padding=padding,
            family=self.family,
        )
        if self.bias_rate and self.training and observed:
            self.observe(routing.expert_counts.to(self.pending.dtype))
        return routing

    def _select(self, logits: Tensor, probs: Tensor, token_ids: Tensor | None) -> Tensor:
        """The selected experts, [N, G·K], where they are not those of the K largest logits."""
        if self.experts_per_token == self.num_experts:
            return self._every_expert(logits)
        if self.choice in OTHER_CHOICES:
            return OTHER_CHOICES[self.choice](self, token_ids)
        scores = probs.detach() + self.selection_bias if self.bias_rate else logits.detach()
        if self.groups == 1:
            return scores.topk(self.experts_per_token).indices
        in_group = scores.unflatten(-1, (self.groups, -1)).topk(self.experts_per_token).indices
        first = every_index(self.groups, device=scores.device).unsqueeze(1) * self.num_experts
        numbers: Tensor = (in_group + first).flatten(1)
        return numbers

    def _uniform_gates(self, gates: Tensor, logits: Tensor) -> Tensor:
        """The gates of equal logits, [N, G·K]; "straight-through": with the gradient of the learned gates."""
        uniform = self.activate(torch.zeros_like(logits))[:, : gates.size(1)]
        if self.renormalizes:
            uniform = RENORMALIZATIONS[self.renormalize](uniform)
        return uniform if self.gate_values == "uniform" else uniform + (gates - gates.detach())

    def _every_expert(self, x: Tensor) -> Tensor:
        """All experts for each token, [N, G·E]."""
        return every_index(self.groups * self.num_experts, device=x.device).expand(x.size(0), -1)

    @torch.no_grad()
    def update(self, loads: Tensor) -> None:
        """Add u · sign(mean load − load_i) to each selection bias b_i (arXiv 2408.15664).

        Args:
            loads: the number of real tokens that selected each expert in the update, over all workers, [G·E].
        """
        self.selection_bias += self.bias_rate * torch.sign(loads.mean() - loads)


def _check(settings: RouterSettings, groups: int) -> None:
    """Refuse impossible settings, and those that exclude each other."""
    num_experts = settings.num_experts
    per_token = settings.experts_per_token
    choice = settings.router_choice
    bias_rate = settings.routing_bias_rate
    if not 1 <= per_token <= num_experts:
        raise UserError(
            f"experts_per_token {per_token} must be between 1 and num_experts {num_experts}: give at most "
            "the number of experts."
        )
    check_choice("router_renormalize", settings.router_renormalize, RENORMALIZATIONS)
    check_choice("router_activation", settings.router_activation, ACTIVATIONS)
    check_choice("router_choice", choice, CHOICES)
    check_choice("router_gates", settings.router_gates, GATES)
    if choice == "frozen" and settings.routing_noise:
        raise UserError(
            "routing_noise is learned, but router_choice frozen trains no router: leave one of the two out."
        )
    if choice in OTHER_CHOICES and bias_rate:
        raise UserError(
            f"routing_bias_rate {bias_rate} changes which experts are selected, but router_choice {choice} "
            "fixes the selection: leave one of the two out."
        )
    if choice in OTHER_CHOICES and groups > 1:
        raise ValueError(
            f"router_choice {choice!r} selects among all experts at once: give groups=1, not {groups}"
        )
    if bias_rate < 0 or (bias_rate and per_token == num_experts):
        raise UserError(
            f"routing_bias_rate {bias_rate} must be 0 or positive, and needs experts_per_token below "
            f"num_experts ({num_experts}), because it changes which experts are selected."
        )


def _softmax_in_groups(logits: Tensor, groups: int) -> Tensor:
    return torch.softmax(logits.unflatten(-1, (groups, -1)), dim=-1).flatten(1)
