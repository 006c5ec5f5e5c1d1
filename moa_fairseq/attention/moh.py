"""MoH, mixture-of-head attention (arXiv 2410.11842): shared heads, and K of the others for each token."""

from dataclasses import dataclass, replace
from typing import Any, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.attention.base import FamilySettings, flag
from moa_fairseq.attention.cache import Cache
from moa_fairseq.attention.core import attend
from moa_fairseq.attention.dense import DenseHeadsAttention
from moa_fairseq.attention.moh_routers import (
    SCALINGS,
    HeadDecision,
    HeadPlan,
    QueryNormRouter,
    SharedAndRoutedRouter,
)
from moa_fairseq.attention.positions import RotaryPositions
from moa_fairseq.attention.routers import CHOICES
from moa_fairseq.attention.selected import attend_selected, skipping_pays
from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.kernels import BACKENDS, SlotOrder, project, resolve_backend

ROUTERS = ("learned", "query-norm")
SKIPPING = ("auto", "always", "never")


@dataclass
class MoHSettings(FamilySettings):
    """The flags of `MixtureOfHeads`."""

    moh_shared_heads: int = flag(2, "heads that work for every token (h_s)")
    experts_per_token: int = flag(4, "how many of the other heads each token chooses (K)")
    moh_scaling: str = flag(
        "paper",
        "paper: gates as in MoH Eq. 5-6, which add up to at most 1; released: as in the authors' code, where "
        "even gates are 1 each (use it with --balance-loss moh-released and --aux-loss-reduce mean)",
        SCALINGS,
    )
    moh_router: str = flag(
        "learned",
        "what chooses heads: learned maps of the input (Eq. 5-6), or the norms of the heads' queries, "
        "without parameters and with gates of 1, to continue trained models (MoH 4.4)",
        ROUTERS,
    )
    router_choice: str = flag(
        "learned",
        "what --moh-router learned chooses routed heads by: its learned weights; frozen: weights that stay "
        "random; hash: a hash of the token's id, with learned gates",
        CHOICES,
    )
    moh_skip: str = flag(
        "auto",
        "leave heads that a token did not choose out of all computation (always), compute them and weight "
        "them by zero (never), or whichever is faster at the batch's size (auto)",
        SKIPPING,
    )
    expert_backend: str = flag(
        "auto",
        "what computes the projections where heads are left out; auto picks by device and dtype",
        BACKENDS,
    )

    def build(self, embed_dim: int, num_heads: int, causal: bool, **role: Any) -> "MixtureOfHeads":
        """causal is only used to estimate costs (--moh-skip auto): masks hide the future."""
        own = self.arguments(
            moh_shared_heads="shared_heads",
            experts_per_token="routed_per_token",
            moh_scaling="scaling",
            moh_router="router",
            moh_skip="skip",
            expert_backend="backend",
        )
        return MixtureOfHeads(embed_dim, num_heads, causal=causal, **own, **role)


class MixtureOfHeads(DenseHeadsAttention[HeadDecision]):
    """Σ_i g_i · H^i · W_O^i (MoH Eq. 4), a drop-in for fairseq's attention with the same parameters.

    Of the h heads, h_s = shared_heads work for every token. A router chooses K = routed_per_token of the
    others (Eq. 5-6). The output's bias belongs to no head. Keys and values are computed for all heads: a
    later token may choose any of them. A head that a token did not choose has no query, no row of attention
    and no product with W_O there (skip "always"), or all of that with a weight of zero ("never"); "auto"
    takes what is faster, which may be to leave them out of the attention only. The results are the same.
    causal: whether the masks of this self-attention hide the future; only "auto" uses it. scaling: of the
    learned router's gates, see `SharedAndRoutedRouter`. router: "learned", "query-norm", or a module. Head
    weights stand slot by slot: the shared heads, then those chosen, the most probable first. Raises UserError
    for impossible numbers of heads.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        shared_heads: int = 2,
        routed_per_token: int = 4,
        scaling: str = "paper",
        router: Any = "learned",
        router_choice: str = "learned",
        skip: str = "auto",
        causal: bool = False,
        backend: str = "auto",
        **role: Any,
    ):
        check_choice("--moh-skip", skip, SKIPPING)
        if not isinstance(router, nn.Module):
            check_choice("--moh-router", router, ROUTERS)
        if router == "query-norm" and router_choice != "learned":
            raise UserError(
                f"--router-choice {router_choice} is for routers with weights, which --moh-router query-norm "
                "lacks: leave one of the two out."
            )
        super().__init__(embed_dim, num_heads, **role)
        if router == "learned":
            sizes = (embed_dim, num_heads, shared_heads, routed_per_token)
            router = SharedAndRoutedRouter(*sizes, scaling, router_choice)
        elif router == "query-norm":
            router = QueryNormRouter(num_heads, shared_heads, routed_per_token)
        self.router, self.skip, self.causal = router, skip, causal and self.self_attention
        self.shared_heads, self.routed_per_token = shared_heads, routed_per_token
        self.active_heads = shared_heads + routed_per_token
        self.backend = resolve_backend(backend)
        self.reset_parameters()

    def route(self, x: Tensor, padding: Optional[Tensor], cache: Optional[Cache]) -> HeadDecision:
        rows = x.view(-1, self.embed_dim)  # [B, T, C] → [N, C]
        queries = self.q_proj(rows) if self.router.reads_queries else None
        decision: HeadDecision = self.router(
            rows if queries is None else queries, None if padding is None else padding.reshape(-1)
        )
        skips, skips_output = self._skips(x)
        if skips and not skips_output and queries is None:
            queries = self.q_proj(rows)
        shared, routed = self.shared_heads, None
        if skips:
            index = decision.expert_index[:, shared:] - shared
            routed = SlotOrder(index, self.num_heads - shared, decision.chooses_all)
        return replace(decision, plan=HeadPlan(queries, routed, skips_output))

    @property
    def _may_skip(self) -> bool:
        bias_by_head = self.positions is not None and not isinstance(self.positions, RotaryPositions)
        return self.skip != "never" and not bias_by_head

    def _skips(self, x: Tensor) -> Tuple[bool, bool]:
        """Whether unchosen heads are left out of the attention, and of the projections."""
        unchosen = self.num_heads - self.active_heads
        if not unchosen or not self._may_skip or not x.numel():
            return False, False
        if self.skip == "always":
            return True, True
        return skipping_pays(x.size(1), unchosen / self.routed_per_token, self.causal, x.device.type)

    def project_queries(self, x: Tensor, decision: HeadDecision) -> Tensor:
        """Queries [B, H, T, D], or where heads are skipped those of the slots, [B, h_s + K, T, D]."""
        rows, queries, order = x.view(-1, self.embed_dim), decision.plan.queries, decision.plan.routed
        if order is None:
            return self._split((self.q_proj(rows) if queries is None else queries).view_as(x))
        if queries is not None:  # [N, H·D] → [N, H, D] → [N, h_s + K, D]
            index = decision.expert_index.unsqueeze(-1).expand(-1, -1, self.head_dim)
            slots = queries.view(-1, self.num_heads, self.head_dim).gather(1, index)
        else:
            width, bias = self.shared_heads * self.head_dim, self.q_proj.bias
            routed = project(
                rows,
                order,
                self._by_head(self.q_proj.weight),
                into="experts",
                slots_per_row=self.routed_per_token,
                slots_per_sum=1,
                bias=None if bias is None else self._by_head(bias),
                backend=self.backend,
            )
            shared = F.linear(rows, self.q_proj.weight[:width], None if bias is None else bias[:width])
            slots = torch.cat([shared, routed.view(rows.size(0), -1)], 1)  # [N·K, D] → [N, K·D]
        # [N, (h_s + K)·D] → [B, h_s + K, T, D]
        return slots.view(*x.shape[:2], self.active_heads, self.head_dim).transpose(1, 2)

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decision: HeadDecision,
        attn_mask: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        need_weights: bool,
        bias: Optional[Tensor],
        key_index: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """[B, H, T, D], or slots like q, [B, h_s + K, T, D], where heads are skipped; weights of slots."""
        dropout, shared, order = self._dropout_now, self.shared_heads, decision.plan.routed
        batch, _, tgt_len, dim = q.shape
        index = decision.expert_index.view(batch, tgt_len, self.active_heads, 1).transpose(1, 2)
        if order is not None and (need_weights or k.size(0) != batch):
            # Returned weights, and keys that a beam shares, need all heads. Then there are few tokens.
            every = q.new_zeros(batch, self.num_heads, tgt_len, dim)
            every = every.scatter(1, index.expand(-1, -1, -1, dim), q)
            out, weights = attend(every, k, v, attn_mask, key_padding_mask, dropout, need_weights, bias)
            out = out.gather(1, index.expand(-1, -1, -1, dim))
        elif order is not None:
            masks, weights = (attn_mask, key_padding_mask, dropout), None
            routed = attend_selected(q, order, k[:, shared:], v[:, shared:], *masks)
            out = routed.view(batch, tgt_len, -1, dim).transpose(1, 2)
            if shared:
                always, _ = attend(q[:, :shared], k[:, :shared], v[:, :shared], *masks)
                out = torch.cat([always, out], 1)
        else:
            out, weights = attend(q, k, v, attn_mask, key_padding_mask, dropout, need_weights, bias)
        if weights is not None:
            weights = weights.gather(1, index.expand(-1, -1, -1, weights.size(-1)))
        return out, weights

    def head_index(self, decision: HeadDecision) -> Optional[Tensor]:
        """Those of the slots, [N, h_s + K], where heads are skipped."""
        return None if decision.plan.routed is None else decision.expert_index

    def project_output(self, heads: Tensor, decision: HeadDecision) -> Tensor:
        """Σ_i g_i · H^i · W_O^i, and the bias: [B, H or h_s + K, T, D] → [B, T, C]."""
        batch, _, tgt_len, _ = heads.shape
        order = decision.plan.routed
        rows = heads.transpose(1, 2)  # [B, T, H or h_s + K, D]
        if order is None:
            weight = decision.head_weight.to(rows.dtype).view(batch, tgt_len, self.num_heads, 1)
            out: Tensor = self.out_proj((rows * weight).reshape(batch, tgt_len, self.embed_dim))
            return out
        gate = decision.gate.view(batch, tgt_len, -1, 1)
        if not decision.plan.skips_output:
            slots = (rows * gate.to(rows.dtype)).reshape(-1, self.active_heads, self.head_dim)
            index = decision.expert_index.unsqueeze(-1).expand_as(slots)
            every = slots.new_zeros(slots.size(0), self.num_heads, self.head_dim).scatter(1, index, slots)
            out = self.out_proj(every.view(batch, tgt_len, self.embed_dim))
            return out
        shared, width = self.shared_heads, self.shared_heads * self.head_dim
        always = (rows[:, :, :shared] * gate[:, :, :shared].to(rows.dtype)).reshape(batch, tgt_len, width)
        routed = project(
            rows[:, :, shared:].reshape(-1, self.head_dim),  # [B, T, K, D] → [N·K, D]
            order,
            self._by_head(self.out_proj.weight.t()),
            into="model",
            slots_per_row=1,
            slots_per_sum=self.routed_per_token,
            gate=decision.gate[:, shared:],
            backend=self.backend,
        )
        out = F.linear(always, self.out_proj.weight[:, :width], self.out_proj.bias)
        return out + routed.view(batch, tgt_len, self.embed_dim)

    def projection_macs(self, queries: int, keys: int) -> Dict[str, int]:
        learned = not self.router.reads_queries
        inputs = self.k_proj.in_features + self.v_proj.in_features
        working = self.active_heads if self._may_skip else self.num_heads
        asked = working if learned else self.num_heads
        return {
            "router": queries * self.router.projection.weight.numel() if learned else 0,
            "projections": queries * self.embed_dim * self.head_dim * (asked + working)
            + keys * inputs * self.embed_dim,
        }

    def macs(self, queries: int, keys: int) -> Dict[str, int]:
        """As the base class counts, but scores only of the heads that work if the others may be left out."""
        if not self._may_skip:
            return super().macs(queries, keys)
        scores = 2 * queries * keys * self.active_heads * self.head_dim
        return {**super().macs(queries, keys), "scores": scores}

    def _by_head(self, weight: Tensor) -> Tensor:
        """[H·D] or [H·D, C] → the routed heads', [h − h_s, D] or [h − h_s, D, C]."""
        heads = weight.view(self.num_heads, self.head_dim, *weight.shape[1:])
        return heads[self.shared_heads :]
