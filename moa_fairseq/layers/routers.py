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

# How the probabilities of the chosen experts [N, K] become gates
RENORMALIZATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "detached": lambda chosen: chosen / chosen.sum(-1, keepdim=True).detach(),  # MoA Eq. 9
    "full": lambda chosen: chosen / chosen.sum(-1, keepdim=True),
    "none": lambda chosen: chosen,  # MoA's released code
}
# How the logits [N, E] become probabilities, in the same order
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": functools.partial(torch.softmax, dim=-1),  # MoA Eq. 7
    "sigmoid": torch.sigmoid,
}
MOST_PROBABLE = ("learned", "frozen")  # choices of the K most probable experts
# Other choices: a router and the tokens' ids → the chosen experts [N, K]
OTHER_CHOICES: dict[str, Callable[[Any, Tensor | None], Tensor]] = {
    "hash": lambda router, token_ids: router.token_hash(token_ids),
}
CHOICES = (*MOST_PROBABLE, *OTHER_CHOICES)
GATES = ("learned", "uniform", "straight-through")
_CONSTANT = (
    "With router_renormalize full and one expert per token, every gate is p/p = 1, so the task would not "
    "train the router. Choose router_renormalize detached (the same values, with a gradient) or none, or "
    "raise experts_per_token."
)
_HALF = (torch.float16, torch.bfloat16)
_INIT_STD = 0.02


class WideLinear(nn.Linear):
    """The linear map of a router, in float32 or wider, whatever the dtypes and autocast: [N, C] → [N, E].

    Args:
        model_dim: C.
        outputs: E.
        copies: multiply float32 copies of an input in half precision, and keep them for the backward pass;
            else gradients of the logits are rounded to half precision.
    """

    def __init__(self, model_dim: int, outputs: int, copies: bool = False):
        super().__init__(model_dim, outputs, bias=False)
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.forward(x)
        if x.dtype not in _HALF:
            return F.linear(x, self.weight.to(x.dtype))
        if self.copies:
            return F.linear(x.float(), self.weight.float())
        return wide_product(x, self.weight)


class RouterSettings:
    """What `TopKRouter` reads of a family's settings: constants here, where a family has no flag for it."""

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
    """MoA's router: softmax over E logits, the K largest, renormalised (MoA Eq. 7-9).

    All of it runs in float32, whatever the model's dtype or autocast. With router_renormalize "full" and one
    expert for each token the gate is p/p = 1, and no gradient of the task reaches the router: training raises
    a UserError (`is_constant`), unless gates are even or nothing is learned.

    Args:
        model_dim: C.
        settings: those of a family.
            num_experts, experts_per_token: E and K, of each group.
            router_renormalize: "detached" divides by the sum of the chosen probabilities without a gradient
                through it (Eq. 9, the paper); "full" divides with the gradient; "none" leaves the
                probabilities (the authors' released code).
            routing_noise: adds ε·softplus(x·W_noise), ε ~ N(0, 1), to the logits in training (Eq. 3).
            router_activation: "sigmoid" computes each expert's probability by itself, so they do not add up
                to 1; where K < E, Eq. 9 still applies to them.
            routing_bias_rate: u, to balance without a gradient (arXiv 2408.15664): experts are chosen by
                probability plus a bias b_i, weighted by probability alone, and b_i moves by
                u · sign(mean load − load_i) after each update (`update`).
            router_choice: "frozen" leaves all weights as they were drawn; hidden states can still learn to
                reach an expert. "hash" chooses by the token's id (`TokenHash`), the gates are the router's.
            router_gates: "uniform" gives the gates of equal logits, 1/K each where they add up to 1: only
                auxiliary losses still move the router. "straight-through" has the same gates and the learned
                ones' gradient, so that the task teaches the choice alone.
            expert_backend: with triton, plain routing is one kernel.
        groups: G parts of E experts each, of each of which a token chooses K; a softmax spans a part, Eq. 9
            the sum over all G·K. Expert e of part g has the number g·E + e; slots stand part by part.
        family: of the `Routing`.

    Raises:
        UserError: unless 1 ≤ K ≤ E, and what is chosen is known and goes together.
    """

    selection_bias: Tensor  # a buffer [G·E], where there is a bias_rate

    def __init__(
        self, model_dim: int, settings: RouterSettings, groups: int = 1, family: str | None = None
    ):
        super().__init__()
        self.family = family
        num_experts = settings.num_experts
        experts_per_token = settings.experts_per_token
        choice = settings.router_choice
        bias_rate = settings.routing_bias_rate
        if not 1 <= experts_per_token <= num_experts:
            raise UserError(
                f"experts_per_token {experts_per_token} must be between 1 and num_experts "
                f"{num_experts}: give at most the number of experts."
            )
        check_choice("router_renormalize", settings.router_renormalize, RENORMALIZATIONS)
        check_choice("router_activation", settings.router_activation, ACTIVATIONS)
        check_choice("router_choice", choice, CHOICES)
        check_choice("router_gates", settings.router_gates, GATES)
        if choice == "frozen" and settings.routing_noise:
            raise UserError(
                "routing_noise is learned, but router_choice frozen trains no router: leave one of the "
                "two out."
            )
        if choice in OTHER_CHOICES and bias_rate:
            raise UserError(
                f"routing_bias_rate {bias_rate} changes which experts are selected, but router_choice "
                f"{choice} fixes the selection: leave one of the two out."
            )
        if choice in OTHER_CHOICES and groups > 1:
            raise ValueError(
                f"router_choice {choice!r} selects among all experts at once: give groups=1, not {groups}"
            )
        if bias_rate < 0 or (bias_rate and experts_per_token == num_experts):
            raise UserError(
                f"routing_bias_rate {bias_rate} must be 0 or positive, and needs experts_per_token below "
                f"num_experts ({num_experts}), because it changes which experts are selected."
            )
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.groups = groups
        self.choice = choice
        self.renormalize = settings.router_renormalize
        self.activation = settings.router_activation
        self.activate = ACTIVATIONS[self.activation]
        if groups > 1 and self.activation == "softmax":
            self.activate = functools.partial(_softmax_in_groups, groups=groups)
        self.gate_values = settings.router_gates
        self.bias_rate = bias_rate
        self.backend = resolve_backend(settings.expert_backend)
        every = groups * num_experts
        self.is_constant = self.renormalize == "full" and groups * experts_per_token == 1 < every
        self.is_constant &= choice == "learned" and self.gate_values != "uniform"
        self.projection = WideLinear(model_dim, every)
        self.noise_projection = WideLinear(model_dim, every) if settings.routing_noise else None
        self.token_hash = TokenHash(num_experts, experts_per_token) if choice == "hash" else None
        if choice == "frozen":
            self.projection.requires_grad_(False)
        if bias_rate:
            self.register_buffer("selection_bias", torch.zeros(every))
            self.register_buffer("pending", torch.zeros(every), persistent=False)
        # Whether the kernel that routes at once does all that is asked for; noise is asked for in training.
        self.may_fuse = (
            groups == 1
            and not bias_rate
            and choice in MOST_PROBABLE
            and self.activation == "softmax"
            and self.gate_values == "learned"
            and self.backend in ("auto", "triton")
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small random logits: with all-zero ones every token would tie, and choose the same K experts."""
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
            padding: [N] or [B, T] bool, True = padding: tokens whose gates are set to zero.
            token_ids: [N] or [B, T] int64, for router_choice "hash".
            observed: whether loads count for routing_bias_rate in training.

        Raises:
            UserError: in training, where the task cannot train the router (`is_constant`).
        """
        if self.training and self.is_constant:
            raise UserError(_CONSTANT)
        x = x.reshape(-1, x.size(-1))
        if padding is not None:
            padding = padding.reshape(-1)
        noise = self.noise_projection if self.training else None
        per_token = self.experts_per_token
        chooses = per_token < self.num_experts or self.groups > 1
        routed = None
        if self.may_fuse and noise is None and is_plain(self.projection, WideLinear):
            weight = self.projection.weight
            routed = top_k_routing(x, weight, per_token, self.renormalize, padding, self.backend)
        if routed is not None:
            logits, probs, gates, chosen = routed
            expert_ids = self._every_expert(x) if chosen is None else chosen
        else:
            logits = self.projection(x)
            if noise is not None:
                logits = logits + torch.randn_like(logits) * F.softplus(noise(x))
            # An adapter's may be half
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            probs = self.activate(logits)
            if per_token == self.num_experts:
                expert_ids = self._every_expert(x)
            elif self.choice in OTHER_CHOICES:
                expert_ids = OTHER_CHOICES[self.choice](self, token_ids)
            else:
                if self.bias_rate:
                    scores = probs.detach() + self.selection_bias
                else:
                    # Ordered as the probabilities, which may underflow to ties
                    scores = logits.detach()
                expert_ids = self._largest(scores) if self.groups > 1 else scores.topk(per_token)[1]
            gates = probs  # all of them stay as they are where nothing is chosen
            renormalized = RENORMALIZATIONS[self.renormalize]
            if chooses:
                gates = renormalized(probs.gather(-1, expert_ids))
                if gates.shape != expert_ids.shape:
                    raise ValueError(
                        f"router_renormalize {self.renormalize!r} makes gates {list(gates.shape)} of "
                        f"{list(expert_ids.shape)} chosen probabilities"
                    )
            if self.gate_values != "learned":
                even = self.activate(torch.zeros_like(logits))
                if chooses:
                    even = renormalized(even.gather(-1, expert_ids))
                gates = even if self.gate_values == "uniform" else even + (gates - gates.detach())
            if padding is not None:
                gates = gates.masked_fill(padding.unsqueeze(1), 0.0)
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

    def _largest(self, scores: Tensor) -> Tensor:
        """The K largest of each group: [N, G·E] → [N, G·K], with the groups' numbers."""
        in_group = (
            scores.unflatten(-1, (self.groups, -1)).topk(self.experts_per_token, dim=-1).indices
        )
        # [G, 1]
        first = every_index(self.groups, device=scores.device).unsqueeze(1) * self.num_experts
        numbers: Tensor = (in_group + first).flatten(1)
        return numbers

    def _every_expert(self, x: Tensor) -> Tensor:
        """The experts where all are chosen, [N, G·E]."""
        return every_index(self.groups * self.num_experts, device=x.device).expand(x.size(0), -1)

    @torch.no_grad()
    def update(self, loads: Tensor) -> None:
        """Move the selection biases: b_i by u · sign(mean load − load_i) (arXiv 2408.15664).

        Args:
            loads: how many real tokens chose each expert during the update, over all workers, [G·E].
        """
        self.selection_bias += self.bias_rate * torch.sign(loads.mean() - loads)


def _softmax_in_groups(logits: Tensor, groups: int) -> Tensor:
    return torch.softmax(logits.unflatten(-1, (groups, -1)), dim=-1).flatten(1)
