"""MoH, mixture-of-head attention (arXiv 2410.11842): shared heads, and K of the others for each token."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.call import Call, Computed
from moa_fairseq.layers.dense import DenseHeadsAttention
from moa_fairseq.layers.experts import BACKENDS, ExpertPermutation, project, resolve_backend
from moa_fairseq.layers.moa import token_ids_of
from moa_fairseq.layers.moh_routers import (
    CHOICES,
    SCALINGS,
    STRAIGHT_THROUGH,
    QueryNormRouter,
    SharedAndRoutedRouter,
)
from moa_fairseq.layers.positions import RotaryPositions
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.selected import NO_SKIPS, Skips, attend_selected, skipping_pays
from moa_fairseq.layers.settings import FamilySettings, flag
from moa_fairseq.layers.torch_compat import is_plain, is_readable

ROUTERS = ("learned", "query-norm")
SKIPPING = ("auto", "always", "never")


@dataclass
class MoHSettings(FamilySettings):
    """The flags of `MixtureOfHeads`."""

    moh_shared_heads: int = flag(2, "always-active (shared) heads (h_s)")
    experts_per_token: int = flag(4, "routed heads selected per token (K)")
    moh_scaling: str = flag(
        "paper",
        "paper: gates as in MoH Eq. 5-6, which sum to at most 1; released: as in the authors' code, so that "
        "equal gates are 1 each (use it with --balance-loss moh-released and --aux-loss-reduce mean)",
        SCALINGS,
    )
    moh_router: str = flag(
        "learned",
        "head selection. learned: by learned maps of the input (Eq. 5-6); query-norm: by the norms of the "
        "heads' queries, without parameters and with gates of 1, to continue trained models (MoH 4.4)",
        ROUTERS,
    )
    moh_straight_through: str = flag(
        STRAIGHT_THROUGH[0],
        "gates of --moh-router query-norm (1 or 0) that get the probability's gradient (MoH Eq. 10). routed: "
        "every routed head, which training then computes whatever --moh-skip is; chosen: only the "
        "selected heads",
        STRAIGHT_THROUGH,
    )
    router_choice: str = flag(
        "learned",
        "head selection of --moh-router learned. learned: by learned weights; frozen: by weights that stay "
        "random; hash: by a hash of the token id, with learned gates",
        CHOICES,
    )
    moh_skip: str = flag(
        "auto",
        "treatment of inactive heads. always: skip their computation; never: compute them and weight "
        "them by zero; auto: the faster of the two for the batch size",
        SKIPPING,
    )
    expert_backend: str = flag(
        "auto",
        "backend of the projections if inactive heads are skipped; auto: selected by device and dtype",
        BACKENDS,
    )


class MixtureOfHeads(DenseHeadsAttention):
    """Σ_i g_i · H^i · W_O^i (MoH Eq. 4), with the parameters of dense attention and a router.

    Of the h heads, h_s = moh_shared_heads are active for every token. A router selects K = experts_per_token
    of the others (Eq. 5-6). The bias of the output belongs to no head. Keys and values are computed for all
    heads, because a later token may select any head. Attention weights are slot by slot: the shared heads,
    then the selected heads, the most probable first.

    Args:
        embed_dim: the model's width, C.
        num_heads: h.
        settings: the settings, or their fields as keywords.
            moh_skip: what is computed for the heads that a token does not select. "always" skips their
                queries, attention and products with W_O; "never" computes all of this, and weights it by
                zero; "auto" takes the faster way, which may skip only their attention. The results are equal.
        router: a router to use instead of the one that the settings name.
        causal: whether the masks of this self-attention hide the future; only moh_skip "auto" uses it.
        options: those of `DenseHeadsAttention`.

    Raises:
        UserError: for impossible numbers of heads.
    """

    family = "MoH"
    needs_causal = True
    routes_heads = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        settings: MoHSettings | None = None,
        *,
        router: nn.Module | None = None,
        causal: bool = False,
        **options: Any,
    ):
        settings = MoHSettings.of(settings, options)
        check_choice("moh_skip", settings.moh_skip, SKIPPING)
        check_choice("moh_router", settings.moh_router, ROUTERS)
        shared_heads = settings.moh_shared_heads
        per_token = settings.experts_per_token
        if settings.moh_router == "query-norm" and settings.router_choice != "learned":
            raise UserError(
                f"router_choice {settings.router_choice} needs a router with weights, but moh_router "
                "query-norm has none: leave one of the two out."
            )
        if (
            settings.moh_router == "learned"
            and settings.moh_straight_through != STRAIGHT_THROUGH[0]
        ):
            raise UserError(
                f"moh_straight_through {settings.moh_straight_through} needs gates of 1 or 0, which "
                "moh_router learned does not have: leave it out, or choose moh_router query-norm."
            )
        if settings.moh_router == "query-norm" and settings.query_key_norm != "none":
            raise UserError(
                f"query_key_norm={settings.query_key_norm!r} makes the norms of all queries alike, by which "
                "moh_router='query-norm' chooses heads: leave one of the two out."
            )
        super().__init__(embed_dim, num_heads, **options)
        self.router: Any
        if router is not None:
            self.router = router
        elif settings.moh_router == "learned":
            self.router = SharedAndRoutedRouter(embed_dim, num_heads, settings)
        else:
            self.router = QueryNormRouter(
                num_heads, shared_heads, per_token, settings.moh_straight_through
            )
        self.reads = token_ids_of(self.router)
        self.skip = settings.moh_skip
        self.causal = causal and self.self_attention
        self.shared_heads = shared_heads
        self.experts_per_token = per_token
        self.active_heads = shared_heads + per_token
        self.backend = resolve_backend(settings.expert_backend)
        self.reset_parameters()

    def compute(self, call: Call) -> Computed:
        rows = call.x.reshape(-1, self.embed_dim)  # [B, T, C] → [N, C]
        # of every head, [N, H·D]
        queries = None
        if self.router.reads_queries:
            queries = self.q_proj(rows)
        routed_by = rows if queries is None else queries
        routing: Routing = self.router(routed_by, call.query_padding, call.token_ids)
        k, v = self.keys_values(call)
        skips = self._skips(call, routing)
        if skips.in_attention:
            out = self._only_chosen(call, rows, queries, k, v, routing, skips.in_projections)
            return out, None, (routing,)
        out, weights = self._all_heads(call, rows, queries, k, v, routing)
        return out, weights, (routing,)

    def _all_heads(
        self,
        call: Call,
        rows: Tensor,
        queries: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        routing: Routing,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute all heads for all tokens, and weight unselected heads by zero."""
        batch, tgt_len, _ = call.x.shape
        if queries is None:
            queries = self.q_proj(rows)
        heads, weights = self.attend(
            call, self.split(queries.view(batch, tgt_len, self.num_heads * self.head_dim)), k, v
        )
        if self.head_gate is not None:
            heads = self.head_gate(heads, call.x)
        gates = routing.gates_by_expert.to(heads.dtype).view(batch, tgt_len, self.num_heads, 1)
        out = self.out_proj((heads.transpose(1, 2) * gates).flatten(2))
        if weights is not None:
            index = routing.expert_ids.view(batch, tgt_len, self.active_heads, 1).transpose(1, 2)
            weights = weights.gather(1, index.expand(-1, -1, -1, weights.size(-1)))
        return out, weights

    def _only_chosen(
        self,
        call: Call,
        rows: Tensor,
        queries: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        routing: Routing,
        skips_projections: bool,
    ) -> Tensor:
        """Compute only the shared and the selected heads; skips_projections: also in queries and outputs."""
        batch, tgt_len, _ = call.x.shape
        shared = self.shared_heads
        dim = self.head_dim
        active = self.active_heads
        order = ExpertPermutation(
            routing.expert_ids[:, shared:] - shared,  # counted from the first routed head
            self.num_heads - shared,
            routing.chooses_all,
        )
        if skips_projections and queries is None:
            slots = self._chosen_queries(rows, order)
        else:
            if queries is None:
                queries = self.q_proj(rows)
            index = routing.expert_ids.unsqueeze(-1).expand(-1, -1, dim)
            # [N, H, D] → [N, h_s + K, D]
            slots = queries.view(-1, self.num_heads, dim).gather(1, index)
        q = slots.view(batch, tgt_len, active, dim).transpose(1, 2)  # [B, h_s + K, T, D]
        q, k, v, masks, _ = self.place(call, q, k, v)  # no bias: `_may_skip`
        routed = attend_selected(q, order, k[:, shared:], v[:, shared:], masks, self.dropout_now)
        heads = routed.view(batch, tgt_len, -1, dim).transpose(1, 2)
        if shared:
            always, _ = self.attend(call, q[:, :shared], k[:, :shared], v[:, :shared], masks)
            heads = torch.cat([always, heads], 1)
        if self.head_gate is not None:
            heads = self.head_gate(heads, call.x, routing.expert_ids)
        heads = heads.transpose(1, 2)  # [B, T, h_s + K, D]
        gates = routing.gates.view(batch, tgt_len, active, 1).to(heads.dtype)
        if not skips_projections:
            slots = (heads * gates).reshape(-1, active, dim)
            index = routing.expert_ids.unsqueeze(-1).expand_as(slots)
            every = slots.new_zeros(slots.size(0), self.num_heads, dim).scatter(1, index, slots)
            result: Tensor = self.out_proj(every.view(batch, tgt_len, self.num_heads * dim))
            return result
        width = shared * dim
        always = (heads[:, :, :shared] * gates[:, :, :shared]).reshape(batch, tgt_len, width)
        out = F.linear(always, self.out_proj.weight[:, :width], self.out_proj.bias)
        chosen = project(
            heads[:, :, shared:].reshape(-1, dim),  # [B, T, K, D] → [N·K, D]
            self._by_head(self.out_proj.weight.t()),
            order,
            is_up=False,
            gates=routing.gates[:, shared:],
            backend=self.backend,
        )
        return out + chosen.view_as(out)

    def _chosen_queries(self, rows: Tensor, order: ExpertPermutation) -> Tensor:
        """The queries of the shared heads and of the selected heads, [N, (h_s + K)·D]."""
        width = self.shared_heads * self.head_dim
        bias = self.q_proj.bias
        routed = project(
            rows,
            self._by_head(self.q_proj.weight),
            order,
            is_up=True,
            bias=None if bias is None else self._by_head(bias),
            backend=self.backend,
        )
        shared = F.linear(rows, self.q_proj.weight[:width], None if bias is None else bias[:width])
        return torch.cat([shared, routed.view(rows.size(0), -1)], 1)  # [N·K, D] → [N, K·D]

    @property
    def _may_skip(self) -> bool:
        bias_by_head = self.positions is not None and not isinstance(
            self.positions, RotaryPositions
        )
        return self.skip != "never" and not bias_by_head

    def _skips(self, call: Call, routing: Routing) -> Skips:
        """Where unchosen heads are left out.

        Nowhere if the call returns weights, if a beam shares keys (it has few tokens), or if the gates of
        unchosen heads have gradients: these need all heads.
        """
        unchosen = self.num_heads - self.active_heads
        if not unchosen or not self._may_skip or not call.x.numel() or call.need_weights:
            return NO_SKIPS
        if call.cache is not None and call.cache.beam_size > 1:
            return NO_SKIPS
        if routing.straight_through and routing.probs.requires_grad:
            return NO_SKIPS
        if not is_readable(call.x):  # the number of rows of each head's block must be read
            return NO_SKIPS
        skips = Skips(True, True)
        if self.skip == "auto":
            ratio = unchosen / self.experts_per_token
            skips = skipping_pays(call.x.size(1), ratio, self.causal, call.x.device.type)
        # A product with some rows of the weight would bypass a module that replaces the projection, and hooks
        if skips.in_projections and not (
            is_plain(self.q_proj, nn.Linear) and is_plain(self.out_proj, nn.Linear)
        ):
            return skips._replace(in_projections=False)
        return skips

    def projection_macs(self, queries: int, keys: int) -> dict[str, int]:
        learned = not self.router.reads_queries
        inputs = self.k_proj.in_features + self.v_proj.in_features
        working = self.num_heads
        if self._may_skip:
            working = self.active_heads
        query_heads = working if learned else self.num_heads
        return {
            "router": queries * self.router.projection.weight.numel() if learned else 0,
            "projections": queries * self.embed_dim * self.head_dim * (query_heads + working)
            + keys * inputs * self.num_heads * self.head_dim,
        }

    def macs(self, queries: int, keys: int) -> dict[str, int]:
        """As the base class counts, but scores only of the heads that work if the others may be left out."""
        if not self._may_skip:
            return super().macs(queries, keys)
        scores = 2 * queries * keys * self.active_heads * self.head_dim
        return super().macs(queries, keys) | {"scores": scores}

    def _by_head(self, weight: Tensor) -> Tensor:
        """[H·D] or [H·D, C] → the routed heads', [h − h_s, D] or [h − h_s, D, C]."""
        heads = weight.view(self.num_heads, self.head_dim, *weight.shape[1:])
        return heads[self.shared_heads :]


MoHSettings.attention = MixtureOfHeads
