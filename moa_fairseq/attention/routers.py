"""Routers: modules that turn token vectors into a RoutingDecision."""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.attention.observers import Observer
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.attention.token_hash import TokenHash
from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.kernels import resolve_backend, top_k_routing, wide_linear
from moa_fairseq.torch_compat import full_precision

RENORMALIZATIONS = ("detached", "full", "none")
ACTIVATIONS = ("softmax", "sigmoid")
CHOICES = ("learned", "frozen", "hash")
GATES = ("learned", "uniform", "straight-through")
_INIT_STD = 0.02

Routed = Tuple[Tensor, Tensor, Tensor, Tensor]  # logits, probs, gate, index


class TopKRouter(Observer):
    """MoA's router: softmax over E logits, the K largest, renormalised (MoA Eq. 7-9).

    renormalize: "detached" divides by the sum of the chosen probabilities without a gradient through
    it (Eq. 9, the paper); "full" divides with the gradient; "none" leaves the probabilities (the
    authors' released code). noise: adds ε·softplus(x·W_noise), ε ~ N(0, 1), to the logits in
    training (Eq. 3). activation: "sigmoid" computes each expert's probability by itself, so they do not add
    up to 1; where K < E, Eq. 9 still applies to them. bias_rate: u, to balance without a gradient (arXiv
    2408.15664): experts are chosen by probability plus a bias b_i, weighted by probability alone, and b_i
    moves by u · sign(mean load − load_i) after each update (`update`; the counts of an update wait in
    `pending`). groups: G parts of E experts each, of each of which a token chooses K; a softmax spans a
    part, Eq. 9 the sum over all G·K. Expert e of part g has the number g·E + e; slots stand part by part.

    Controls. choice: "frozen" leaves all weights as they were drawn; hidden states can still learn to reach
    an expert. "hash" chooses by the token's id (`TokenHash`), the gates are the router's for these experts.
    gates: "uniform" gives the gates of equal logits, 1/K each where they add up to 1: they have no gradient,
    only auxiliary losses still move the router, and none of them knows the task. "straight-through" has the
    same gates and the learned ones' gradient, so that the task teaches the choice alone.

    With "full" and one expert for each token the gate is p/p = 1, and no gradient of the task reaches the
    router: training raises a UserError (`is_constant`), unless gates are even or nothing is learned.

    backend: a choice of `--expert-backend`; with triton, plain routing is one kernel. All of it runs in
    float32, whatever the model's dtype or autocast. Raises UserError unless 1 ≤ K ≤ E and renormalize,
    activation, choice and gates are known and go together.
    """

    every_expert: Tensor  # a buffer: 0, 1, …, G·E − 1
    selection_bias: Tensor  # a buffer [G·E], where there is a bias_rate

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        experts_per_token: int,
        renormalize: str = "detached",
        noise: bool = False,
        activation: str = "softmax",
        bias_rate: float = 0.0,
        backend: str = "auto",
        choice: str = "learned",
        gates: str = "learned",
        groups: int = 1,
    ):
        super().__init__()
        if not 1 <= experts_per_token <= num_experts:
            raise UserError(
                f"--experts-per-token {experts_per_token} must lie between 1 and --num-experts "
                f"{num_experts}: a token cannot choose more experts than there are."
            )
        for flag, value, known in (
            ("renormalize", renormalize, RENORMALIZATIONS),
            ("activation", activation, ACTIVATIONS),
            ("choice", choice, CHOICES),
            ("gates", gates, GATES),
        ):
            check_choice(f"--router-{flag}", value, known)
        if choice == "frozen" and noise:
            raise UserError(
                "--routing-noise is learned, and --router-choice frozen learns nothing: leave one out."
            )
        if choice == "hash" and bias_rate:
            raise UserError(
                f"--routing-bias-rate {bias_rate} moves the choice of experts, which --router-choice hash "
                "fixes: leave one of the two out."
            )
        if choice == "hash" and groups > 1:
            raise ValueError("a hash chooses among all experts at once: groups must be 1")
        if bias_rate < 0 or (bias_rate and experts_per_token == num_experts):
            raise UserError(
                f"--routing-bias-rate {bias_rate} must be positive, and balances which experts are chosen: "
                f"there is nothing to choose when --experts-per-token is --num-experts ({num_experts})."
            )
        self.activation, self.bias_rate, self.backend = activation, bias_rate, resolve_backend(backend)
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.renormalize, self.gates, self.groups = renormalize, gates, groups
        every = groups * num_experts
        self.is_constant = renormalize == "full" and groups * experts_per_token == 1 < every
        self.is_constant &= choice == "learned" and gates != "uniform"
        self.projection = nn.Linear(model_dim, every, bias=False)
        self.noise_projection = nn.Linear(model_dim, every, bias=False) if noise else None
        self.token_hash = TokenHash(num_experts, experts_per_token) if choice == "hash" else None
        if choice == "frozen":
            self.projection.requires_grad_(False)
        self.register_buffer("every_expert", torch.arange(every), persistent=False)
        if bias_rate:
            self.register_buffer("selection_bias", torch.zeros(every))
            self.register_buffer("pending", torch.zeros(every), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small random logits: with all-zero ones every token would tie, and choose the same K experts."""
        nn.init.normal_(self.projection.weight, std=_INIT_STD)
        if self.noise_projection is not None:
            nn.init.zeros_(self.noise_projection.weight)
        if self.token_hash is not None:
            self.token_hash.reset_parameters()

    def forward(
        self, x: Tensor, padding_mask: Optional[Tensor] = None, observed: bool = True
    ) -> RoutingDecision:
        """Route x [N, C]; padding_mask [N] bool marks tokens whose gates are set to zero.

        observed: whether the decision counts among the loads that move the biases. Raises UserError in a
        training whose gates are all 1.
        """
        if self.training and self.is_constant:
            raise UserError(
                "--router-renormalize full and one expert for each token: the gate is p/p = 1, and the task "
                "would not train the router. Choose --router-renormalize detached, which has the same "
                "values and a gradient, or none; or raise --experts-per-token."
            )
        with full_precision(x.device.type):
            routed = self._in_one_kernel(x, padding_mask)
            if routed is not None:
                logits, probs, gate, expert_index = routed
            else:
                logits = wide_linear(x, self.projection.weight)
                if self.noise_projection is not None and self.training:
                    spread = F.softplus(wide_linear(x, self.noise_projection.weight))
                    logits = logits + torch.randn_like(logits) * spread
                probs = self._probabilities(logits)
                if self.experts_per_token == self.num_experts:
                    expert_index = self.every_expert.expand(x.size(0), -1)
                elif self.token_hash is not None:
                    expert_index = self.token_hash(x.size(0))
                else:
                    scores = probs.detach() + self.selection_bias if self.bias_rate else probs.detach()
                    expert_index = self._largest(scores)
                gate = self._gates(probs, expert_index)
                if self.gates != "learned":
                    even = self._gates(self._probabilities(torch.zeros_like(logits)), expert_index)
                    gate = even if self.gates == "uniform" else even + (gate - gate.detach())
                if padding_mask is not None:
                    gate = gate.masked_fill(padding_mask.unsqueeze(1), 0.0)
        decision = RoutingDecision(
            expert_index,
            gate,
            probs,
            logits,
            self.groups * self.num_experts,
            groups=self.groups,
            padding_mask=padding_mask,
        )
        if self.bias_rate and self.training and observed:
            self.observe(decision.expert_counts.to(self.pending.dtype))
        return decision

    @torch.no_grad()
    def update(self, loads: Tensor) -> None:
        """Move the biases by the loads [G·E] of an update, over all workers."""
        self.selection_bias += self.bias_rate * torch.sign(loads.mean() - loads)

    def _in_one_kernel(self, x: Tensor, padding_mask: Optional[Tensor]) -> Optional[Routed]:
        """(logits, probs, gate, index), or None where the kernel does not do all that is asked for."""
        is_noisy = self.noise_projection is not None and self.training
        is_controlled = self.token_hash is not None or self.gates != "learned"
        if self.activation != "softmax" or self.groups > 1 or self.bias_rate or is_noisy or is_controlled:
            return None
        weight, per_token = self.projection.weight, self.experts_per_token
        routed = top_k_routing(x, weight, per_token, self.renormalize, padding_mask, self.backend)
        if routed is None:
            return None
        logits, probs, gate, index = routed
        return logits, probs, gate, self.every_expert.expand(x.size(0), -1) if index is None else index

    def _probabilities(self, logits: Tensor) -> Tensor:
        if self.activation == "sigmoid":
            return torch.sigmoid(logits)
        if self.groups == 1:
            return torch.softmax(logits, dim=-1)
        return torch.softmax(logits.unflatten(-1, (self.groups, -1)), dim=-1).flatten(1)

    def _largest(self, scores: Tensor) -> Tensor:
        """The numbers of the experts with the K largest scores of each group: [N, G·E] → [N, G·K]."""
        if self.groups == 1:
            return scores.topk(self.experts_per_token, dim=-1).indices
        index = scores.unflatten(-1, (self.groups, -1)).topk(self.experts_per_token, dim=-1).indices
        first = self.every_expert[:: self.num_experts].unsqueeze(1)  # of each group, [G, 1]
        numbers: Tensor = (index + first).flatten(1)
        return numbers

    def _gates(self, probs: Tensor, expert_index: Tensor) -> Tensor:
        """The chosen probabilities, divided by their sum as `renormalize` has it: [N, K]."""
        if self.experts_per_token == self.num_experts and self.groups == 1:
            return probs  # nothing is chosen, all gates stay as they are
        chosen = probs.gather(-1, expert_index)
        if self.renormalize == "none":
            return chosen
        total = chosen.sum(-1, keepdim=True)
        return chosen / (total.detach() if self.renormalize == "detached" else total)
