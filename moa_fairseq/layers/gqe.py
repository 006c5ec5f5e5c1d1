"""Grouped Query Experts (GQE, arXiv 2606.20945): a router for each group of query heads."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.call import Call, Computed
from moa_fairseq.layers.experts import BACKENDS
from moa_fairseq.layers.moa import MixtureOfAttention, MoASettings
from moa_fairseq.layers.positions import RelativePositions
from moa_fairseq.layers.routers import RENORMALIZATIONS, RouterSettings, TopKRouter
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.settings import FamilySettings, flag

OUTPUTS = ("paper", "hard", "weighted", "experts")


@dataclass
class GQESettings(FamilySettings, RouterSettings):
    """The flags of `GroupedQueryExperts`."""

    gqe_groups: int = flag(4, "number of key/value heads (G), one per group of query heads")
    num_experts: int = flag(4, "query heads per group (M)")
    experts_per_token: int = flag(2, "query heads selected per token and group (k)")
    expert_dim: int = flag(64, "head dimension (D)")
    gqe_shared_heads: int = flag(
        1,
        "always-active query heads (0 or 1); such a head reads the mean of all keys and values",
    )
    gqe_output: str = flag(
        "paper",
        "form of the output. paper: one matrix times the concatenation of the selected heads, their "
        "gate-weighted sum and the shared head; hard: the same without the weighted sum; weighted: "
        "each selected head times its gate, without the sum; experts: the gate-weighted sum of the selected "
        "heads, each with its own output matrix (MoA)",
        OUTPUTS,
    )
    expert_bias: bool = flag(False, "biases in keys, values, queries and outputs")
    router_renormalize: str = flag(
        "full",
        "division of a token's gates by their sum: with a gradient through the sum (full), without "
        "(detached), or no division (none)",
        RENORMALIZATIONS,
    )
    expert_backend: str = flag(
        "auto", "backend of the query projections; auto: selected by device and dtype", BACKENDS
    )


class GroupedQueryExperts(MixtureOfAttention):
    """Grouped-query attention whose query heads are experts.

    All tokens use the same G = gqe_groups heads of keys and values. Each has a group of M = num_experts query
    heads, of which a token selects the k = experts_per_token with the largest probabilities, p_g =
    softmax(x·W_g). Let o be the result of a selected head, w = p / Σ p over all G·k selected heads, and s the
    result of the shared head. Then

        y = [all o, side by side; Σ w·o; s] · W_O    (gqe_output "paper")
        y = Σ w·o·W_o + s·W_s                        ("experts"; G = 1 without s is MoA)

    "hard" leaves Σ w·o out, so the task does not train the router; "weighted" leaves it out, too, and
    replaces o by w·o. The keys and values of the shared head are the means over the groups. Attention weights
    have this order: the shared head, the most probable head of each group, the second of each group, and so
    on.

    Args:
        embed_dim: the model's width, C.
        settings: the settings, or their fields as keywords.
        options: those of `MixtureOfAttention`.

    Raises:
        UserError: for impossible sizes.
    """

    family = "GQE"
    inner_keywords = MixtureOfAttention.inner_keywords | {"router"}

    def __init__(self, embed_dim: int, settings: GQESettings | None = None, **options: Any):
        settings = GQESettings.of(settings, options)
        groups = settings.gqe_groups
        shared_heads = settings.gqe_shared_heads
        check_choice("gqe_output", settings.gqe_output, OUTPUTS)
        if groups < 1 or shared_heads not in (0, 1):
            raise UserError(
                f"gqe_groups is {groups} and gqe_shared_heads {shared_heads}: give a positive number of "
                "groups, and 0 or 1 shared heads."
            )
        router = TopKRouter(embed_dim, settings, groups, self.family)
        router.is_constant &= settings.gqe_output != "hard"  # "hard" has no gates
        every = MoASettings(
            num_experts=shared_heads + groups * settings.num_experts,
            experts_per_token=shared_heads + groups * settings.experts_per_token,
            expert_dim=settings.expert_dim,
            expert_bias=settings.expert_bias,
            expert_backend=settings.expert_backend,
        )
        super().__init__(embed_dim, every, groups=groups, router=router, **options)
        if shared_heads and groups > 1 and isinstance(self.positions, RelativePositions):
            raise UserError(
                "positions='xl' gives each key head its own positions, but the shared head attends to the "
                "mean of the keys: choose positions='rope', gqe_shared_heads 0 or gqe_groups 1."
            )
        self.groups = groups
        self.shared_heads = shared_heads
        self.output = settings.gqe_output
        if self.output != "experts":
            del self.out_experts
            slots = self.num_heads + (self.output == "paper")
            self.out_proj = nn.Linear(slots * self.expert_dim, embed_dim, bias=settings.expert_bias)
            nn.init.xavier_uniform_(self.out_proj.weight)
            if settings.expert_bias:
                nn.init.zeros_(self.out_proj.bias)

    def compute(self, call: Call) -> Computed:
        batch, tgt_len, _ = call.x.shape
        rows = call.x.reshape(-1, self.embed_dim)  # [B, T, C] → [N, C]
        routing = self._with_shared_head(self.router(rows, call.query_padding))
        order = routing.order()
        q = (
            self.q_experts(rows, order)
            .view(batch, tgt_len, self.num_heads, self.expert_dim)
            .transpose(1, 2)
        )
        # To the order of attention weights: the shared head, then one head of each group, …
        q = self._transposed(q, self.groups, -1)
        k, v = self.keys_values(call)
        if self.shared_heads and self.groups > 1:
            heads, weights = self._attend_with_shared_head(call, q, k, v)
        else:
            heads, weights = self.attend(call, q, k, v)
        if self.head_gate is not None:
            index = self._transposed(self.head_index(routing), self.groups, -1)
            heads = self.head_gate(heads, call.x, index)
        heads = self._transposed(heads, -1, self.groups)  # back to the order of the slots
        if self.output == "experts":
            slots = heads.transpose(1, 2).reshape(-1, self.expert_dim)  # [B, H, T, D] → [N·H, D]
            return (
                self.out_experts(slots, order, routing.gates).view_as(call.x),
                weights,
                (routing,),
            )
        slots = heads.transpose(1, 2)  # [B, T, H, D]
        weighted = slots * routing.gates.view(*slots.shape[:3], 1).to(slots.dtype)
        if self.output == "weighted":
            slots = weighted
        elif self.output == "paper":
            total = weighted[:, :, self.shared_heads :].sum(2, keepdim=True)
            slots = torch.cat([slots, total], 2)
        out = self.out_proj(slots.flatten(2))  # [B, T, H·D or (H + 1)·D] → [B, T, C]
        return out, weights, (routing,)

    def _with_shared_head(self, routing: Routing) -> Routing:
        """Add the shared head to a routing as expert 0, in slot 0, with the gate 1."""
        if not self.shared_heads:
            return routing
        gates = F.pad(routing.gates, (1, 0), value=1.0)
        padding = routing.padding
        return replace(
            routing,
            expert_ids=F.pad(routing.expert_ids + 1, (1, 0)),
            gates=gates if padding is None else gates.masked_fill(padding.unsqueeze(1), 0.0),
            probs=F.pad(routing.probs, (1, 0), value=1.0),
            logits=F.pad(routing.logits, (1, 0)),
            num_experts=self.num_experts,
            shared=1,
        )

    def _attend_with_shared_head(
        self, call: Call, q: Tensor, k: Tensor | None, v: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """`attend`, where the shared head reads the means over the groups, which need not be cached."""
        # The bias is None: __init__ has refused positions="xl"
        q, k, v, masks, _ = self.place(call, q, k, v)
        means = k.mean(1, keepdim=True), v.mean(1, keepdim=True)
        shared, shared_weights = self.attend(call, q[:, :1], *means, masks)
        routed, routed_weights = self.attend(call, q[:, 1:], k, v, masks)
        heads = torch.cat([shared, routed], 1)
        if shared_weights is None or routed_weights is None:
            return heads, None
        return heads, torch.cat([shared_weights, routed_weights], 1)

    def projection_macs(self, queries: int, keys: int) -> dict[str, int]:
        macs = super().projection_macs(queries, keys)
        macs["router"] = queries * self.embed_dim * (self.num_experts - self.shared_heads)
        if self.output == "paper":  # one slot more than there are heads, for Σ w·o
            macs["projections"] += queries * self.embed_dim * self.head_dim
        return macs

    def _transposed(self, heads: Tensor, rows: int, columns: int) -> Tensor:
        """Reorder the routed heads of [B, H, T, D] from rows × columns to columns × rows."""
        if self.groups == 1 or self.num_heads == self.shared_heads + self.groups:
            return heads
        shared, routed = heads.split([self.shared_heads, heads.size(1) - self.shared_heads], 1)
        return torch.cat(
            [shared, routed.unflatten(1, (rows, columns)).transpose(1, 2).flatten(1, 2)], 1
        )


GQESettings.attention = GroupedQueryExperts
