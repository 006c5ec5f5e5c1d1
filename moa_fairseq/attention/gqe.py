"""Grouped Query Experts (GQE, arXiv 2606.20945): each group of query heads has a router of its own."""

from dataclasses import dataclass, replace
from typing import Any, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.attention.base import FamilySettings, flag
from moa_fairseq.attention.cache import Cache
from moa_fairseq.attention.core import attend
from moa_fairseq.attention.moa import MixtureOfAttention
from moa_fairseq.attention.positions import RelativePositions
from moa_fairseq.attention.routers import RENORMALIZATIONS, TopKRouter
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.kernels import BACKENDS

OUTPUTS = ("paper", "hard", "weighted", "experts")


@dataclass
class GQESettings(FamilySettings):
    """The flags of `GroupedQueryExperts`."""

    gqe_groups: int = flag(4, "heads of keys and values (G); each belongs to one group of query heads")
    num_experts: int = flag(4, "query heads of each group (M)")
    experts_per_token: int = flag(2, "query heads that each token chooses in each group (k)")
    expert_dim: int = flag(64, "head dimension (D)")
    gqe_shared_heads: int = flag(
        1,
        "query heads that work for every token (0 or 1); such a head reads the mean of all keys and values",
    )
    gqe_output: str = flag(
        "paper",
        "what the output is made of. paper: the chosen heads, their sum weighted by the gates, and the "
        "shared head, side by side, times one matrix; hard: the same without the weighted sum; weighted: "
        "each chosen head times its gate, without the sum; experts: the sum of the chosen heads, each with "
        "an output matrix of its own, weighted by the gates (MoA)",
        OUTPUTS,
    )
    expert_bias: bool = flag(False, "biases in keys, values, queries and outputs")
    router_renormalize: str = flag(
        "full",
        "divide the gates of all heads that a token chose by their sum: with a gradient through it (full), "
        "without one (detached), or not at all (none)",
        RENORMALIZATIONS,
    )
    expert_backend: str = flag(
        "auto", "what computes the query projections; auto picks by device and dtype", BACKENDS
    )

    def build(self, embed_dim: int, num_heads: int, causal: bool, **role: Any) -> "GroupedQueryExperts":
        """num_heads and causal are unused: the heads are those that are chosen, and masks hide the future."""
        own = {"gqe_groups": "groups", "gqe_shared_heads": "shared_heads", "gqe_output": "output"}
        own |= {"expert_bias": "bias", "router_renormalize": "renormalize", "expert_backend": "backend"}
        return GroupedQueryExperts(embed_dim, **self.arguments(**own), **role)


class GroupedQueryExperts(MixtureOfAttention):
    """Grouped-query attention whose query heads are experts, a drop-in for fairseq's attention.

    G = groups heads of keys and values are dense. A group has M = num_experts query heads; a token chooses
    the k = experts_per_token of them with the largest probabilities, p_g = softmax(x·W_g). With o the result
    of a chosen head, w = p / Σ p over all G·k chosen heads, and s the result of the shared head,

        y = [all o, side by side; Σ w·o; s] · W_O    (output "paper")
        y = Σ w·o·W_o + s·W_s                        (output "experts"; G = 1 without s is MoA)

    "hard" leaves Σ w·o out, and the task then does not train the router; "weighted" has w·o for o there.
    shared_heads: 0, or 1 head whose keys and values are the means of those of the groups. renormalize: how w
    comes from p, as in `TopKRouter`. kdim, vdim, backend and role as in `MixtureOfAttention`. Head weights
    stand in the order: the shared head, each group's most probable head, each group's second, and so on.
    Raises UserError for impossible sizes.
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        groups: int,
        num_experts: int,
        experts_per_token: int,
        expert_dim: int,
        shared_heads: int = 1,
        output: str = "paper",
        bias: bool = False,
        renormalize: str = "full",
        backend: str = "auto",
        **role: Any,
    ):
        check_choice("--gqe-output", output, OUTPUTS)
        if groups < 1 or shared_heads not in (0, 1):
            raise UserError(
                f"--gqe-groups {groups} must be positive, --gqe-shared-heads {shared_heads} 0 or 1."
            )
        sizes = (embed_dim, num_experts, experts_per_token, renormalize)
        router = TopKRouter(*sizes, backend=backend, groups=groups)
        router.is_constant &= output != "hard"  # which has no gates
        super().__init__(
            embed_dim,
            num_experts=shared_heads + groups * num_experts,
            experts_per_token=shared_heads + groups * experts_per_token,
            expert_dim=expert_dim,
            groups=groups,
            bias=bias,
            backend=backend,
            router=router,
            **role,
        )
        if shared_heads and groups > 1 and isinstance(self.positions, RelativePositions):
            raise UserError(
                "--positions xl gives each head of keys positions of its own, but the shared head attends to "
                "their mean: choose --positions rope, --gqe-shared-heads 0 or --gqe-groups 1."
            )
        self.groups, self.shared_heads, self.output = groups, shared_heads, output
        if output != "experts":
            del self.out_experts
            slots = self.num_heads + (output == "paper")
            self.out_proj = nn.Linear(slots * expert_dim, embed_dim, bias=bias)
            nn.init.xavier_uniform_(self.out_proj.weight)
            if bias:
                nn.init.zeros_(self.out_proj.bias)

    def route(self, x: Tensor, padding: Optional[Tensor], cache: Optional[Cache]) -> RoutingDecision:
        """The router's choice; the shared head is expert 0, in slot 0, with a gate of 1."""
        decision = super().route(x, padding, cache)
        if not self.shared_heads:
            return decision
        gate = F.pad(decision.gate, (1, 0), value=1.0)
        return replace(
            decision,
            expert_index=F.pad(decision.expert_index + 1, (1, 0)),
            gate=gate if padding is None else gate.masked_fill(padding.reshape(-1, 1), 0.0),
            probs=F.pad(decision.probs, (1, 0), value=1.0),
            logits=F.pad(decision.logits, (1, 0)),
            num_experts=self.num_experts,
            shared=1,
        )

    def project_queries(self, x: Tensor, decision: RoutingDecision) -> Tensor:
        """x [B, T, C] → [B, H, T, D]: the shared head, then one head of each group after the other."""
        return self._transposed(super().project_queries(x, decision), self.groups, -1)

    def head_index(self, decision: RoutingDecision) -> Tensor:
        """As the base class, in the order of `project_queries`."""
        return self._transposed(super().head_index(decision), self.groups, -1)

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decision: RoutingDecision,
        attn_mask: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        need_weights: bool,
        bias: Optional[Tensor],
        key_index: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """As the base class; the shared head reads the groups' means, which no cache has to hold."""
        if not self.shared_heads or self.groups == 1:
            return super().attend_heads(q, k, v, decision, attn_mask, key_padding_mask, need_weights, bias)
        # no bias: __init__ has refused --positions xl
        options = (attn_mask, key_padding_mask, self._dropout_now, need_weights)
        shared, shared_weights = attend(q[:, :1], k.mean(1, keepdim=True), v.mean(1, keepdim=True), *options)
        routed, routed_weights = attend(q[:, 1:], k, v, *options)
        if shared_weights is None or routed_weights is None:
            return torch.cat([shared, routed], 1), None
        return torch.cat([shared, routed], 1), torch.cat([shared_weights, routed_weights], 1)

    def project_output(self, heads: Tensor, decision: RoutingDecision) -> Tensor:
        heads = self._transposed(heads, -1, self.groups)
        if self.output == "experts":
            return super().project_output(heads, decision)
        slots = heads.transpose(1, 2)  # [B, H, T, D] → [B, T, H, D]
        weighted = slots * decision.gate.view(*slots.shape[:3], 1).to(slots.dtype)
        if self.output == "weighted":
            slots = weighted
        elif self.output == "paper":
            total = weighted[:, :, self.shared_heads :].sum(2, keepdim=True)
            slots = torch.cat([slots, total], 2)
        out: Tensor = self.out_proj(slots.flatten(2))  # [B, T, H·D or (H + 1)·D] → [B, T, C]
        return out

    def projection_macs(self, queries: int, keys: int) -> Dict[str, int]:
        macs = super().projection_macs(queries, keys)
        macs["router"] = queries * self.embed_dim * (self.num_experts - self.shared_heads)
        if self.output == "paper":  # one slot more than heads
            macs["projections"] += queries * self.embed_dim * self.head_dim
        return macs

    def _transposed(self, heads: Tensor, rows: int, columns: int) -> Tensor:
        """The routed heads of [B, H, T, D], which are rows × columns, as columns × rows."""
        if self.groups == 1 or self.num_heads == self.shared_heads + self.groups:
            return heads
        shared, routed = heads.split([self.shared_heads, heads.size(1) - self.shared_heads], 1)
        return torch.cat([shared, routed.unflatten(1, (rows, columns)).transpose(1, 2).flatten(1, 2)], 1)
