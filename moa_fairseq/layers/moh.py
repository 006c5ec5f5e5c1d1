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

    def _check(self) -> None:
        """Refuse unknown names, and settings that exclude each other."""
        check_choice("moh_skip", self.moh_skip, SKIPPING)
        check_choice("moh_router", self.moh_router, ROUTERS)
        if self.moh_router == "learned":
            if self.moh_straight_through != STRAIGHT_THROUGH[0]:
                raise UserError(
                    f"moh_straight_through {self.moh_straight_through} needs gates of 1 or 0, which "
                    "moh_router learned does not have: leave it out, or choose moh_router query-norm."
                )
            return
        if self.router_choice != "learned":
            raise UserError(
                f"router_choice {self.router_choice} needs a router with weights, but moh_router "
                "query-norm has none: leave one of the two out."
            )
        if self.query_key_norm != "none":
            raise UserError(
                f"query_key_norm={self.query_key_norm!r} makes the norms of all queries alike, by which "
                "moh_router='query-norm' chooses heads: leave one of the two out."
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
        settings._check()
        shared_heads = settings.moh_shared_heads
        per_token = settings.experts_per_token
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
        # Of all heads, [N, H·D]
        queries: Any = self.q_proj(rows) if self.router.reads_queries else None
        routed_by = rows if queries is None else queries
        routing: Routing = self.router(routed_by, call.query_padding, call.token_ids)
        k, v = self.keys_values(call)
        skips = self._skips(call, routing)
        if queries is None and not skips.in_projections:
            queries = self.q_proj(rows)
        if not skips.in_attention:
            out, weights = self._all_heads(call, queries, k, v, routing)
            return out, weights, (routing,)
        shared = self.shared_heads
        # The selected heads, counted from the first routed head
        selected = routing.expert_ids[:, shared:] - shared
        order = ExpertPermutation(selected, self.num_heads - shared, routing.chooses_all)
        if queries is None:
            slots = self._active_queries(rows, order)
        else:
            index = routing.expert_ids.unsqueeze(-1).expand(-1, -1, self.head_dim)
            # [N, H, D] → [N, h_s + K, D]
            slots = queries.view(-1, self.num_heads, self.head_dim).gather(1, index)
        heads = self._attend_active(call, slots, k, v, routing, order)
        if skips.in_projections:
            out = self._project_active(heads, routing, order)
        else:
            out = self._project_all(heads, routing)
        return out, None, (routing,)

    def _all_heads(
        self, call: Call, queries: Tensor, k: Tensor | None, v: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor | None]:
        """Compute all heads for all tokens, and weight unselected heads by zero."""
        batch, tgt_len, _ = call.x.shape
        q = self.split(queries.view(batch, tgt_len, self.num_heads * self.head_dim))
        heads, weights = self.attend(call, q, k, v)
        if self.head_gate is not None:
            heads = self.head_gate(heads, call.x)
        gates = routing.gates_by_expert.to(heads.dtype).view(batch, tgt_len, self.num_heads, 1)
        out = self.out_proj((heads.transpose(1, 2) * gates).flatten(2))
        if weights is not None:
            index = routing.expert_ids.view(batch, tgt_len, self.active_heads, 1).transpose(1, 2)
            weights = weights.gather(1, index.expand(-1, -1, -1, weights.size(-1)))
        return out, weights

    def _active_queries(self, rows: Tensor, order: ExpertPermutation) -> Tensor:
        """Project inputs [N, C] to the queries of the active heads, [N, (h_s + K)·D]."""
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

    def _attend_active(
        self,
        call: Call,
        slots: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        routing: Routing,
        order: ExpertPermutation,
    ) -> Tensor:
        """The results of the active heads, [B, T, h_s + K, D], from their queries [N, h_s + K, D]."""
        batch, tgt_len, _ = call.x.shape
        shared = self.shared_heads
        q = slots.view(batch, tgt_len, self.active_heads, self.head_dim).transpose(1, 2)
        q, k, v, masks, _ = self.place(call, q, k, v)  # no bias: `_may_skip`
        heads = attend_selected(q, order, k[:, shared:], v[:, shared:], masks, self.dropout_now)
        heads = heads.view(batch, tgt_len, -1, self.head_dim).transpose(1, 2)  # [B, K, T, D]
        if shared:
            of_shared, _ = self.attend(call, q[:, :shared], k[:, :shared], v[:, :shared], masks)
            heads = torch.cat([of_shared, heads], 1)
        if self.head_gate is not None:
            heads = self.head_gate(heads, call.x, routing.expert_ids)
        return heads.transpose(1, 2)

    def _project_all(self, heads: Tensor, routing: Routing) -> Tensor:
        """Σ_i g_i · H^i · W_O^i by one product with W_O: [B, T, h_s + K, D] → [B, T, C]."""
        gates = routing.gates.view(*heads.shape[:3], 1).to(heads.dtype)
        slots = (heads * gates).reshape(-1, self.active_heads, self.head_dim)
        index = routing.expert_ids.unsqueeze(-1).expand_as(slots)
        every = slots.new_zeros(slots.size(0), self.num_heads, self.head_dim)
        every = every.scatter(1, index, slots)
        out: Tensor = self.out_proj(every.view(*heads.shape[:2], -1))
        return out

    def _project_active(self, heads: Tensor, routing: Routing, order: ExpertPermutation) -> Tensor:
        """Σ_i g_i · H^i · W_O^i without the W_O^i of other heads: [B, T, h_s + K, D] → [B, T, C]."""
        shared = self.shared_heads
        width = shared * self.head_dim
        gates = routing.gates.view(*heads.shape[:3], 1).to(heads.dtype)
        of_shared = (heads[:, :, :shared] * gates[:, :, :shared]).flatten(2)  # [B, T, h_s·D]
        out = F.linear(of_shared, self.out_proj.weight[:, :width], self.out_proj.bias)
        routed = project(
            heads[:, :, shared:].reshape(-1, self.head_dim),  # [B, T, K, D] → [N·K, D]
            self._by_head(self.out_proj.weight.t()),
            order,
            is_up=False,
            gates=routing.gates[:, shared:],
            backend=self.backend,
        )
        return out + routed.view_as(out)

    @property
    def _may_skip(self) -> bool:
        # Other positions add a bias to the scores of all heads
        return self.skip != "never" and isinstance(self.positions, RotaryPositions | None)

    def _skips(self, call: Call, routing: Routing) -> Skips:
        """Where unselected heads are left out.

        Nowhere if the call returns weights, if a beam shares keys (it has few tokens), if the gates of
        unselected heads have gradients, or if the number of rows of each head cannot be read.
        """
        unselected = self.num_heads - self.active_heads
        needs_all = (
            not unselected
            or not self._may_skip
            or not call.x.numel()
            or call.need_weights
            or (call.cache is not None and call.cache.beam_size > 1)
            or (routing.straight_through and routing.probs.requires_grad)
            or not is_readable(call.x)
        )
        if needs_all:
            return NO_SKIPS
        skips = Skips(True, True)
        if self.skip == "auto":
            ratio = unselected / self.experts_per_token
            skips = skipping_pays(call.x.size(1), ratio, self.causal, call.x.device.type)
        # A product with some rows of the weight would bypass a module that replaces the projection, and hooks
        if skips.in_projections and not (
            is_plain(self.q_proj, nn.Linear) and is_plain(self.out_proj, nn.Linear)
        ):
            return skips._replace(in_projections=False)
        return skips

    def projection_macs(self, queries: int, keys: int) -> dict[str, int]:
        macs = super().projection_macs(queries, keys)
        unselected = self.num_heads - self.active_heads if self._may_skip else 0
        products = 1  # with W_O
        if not self.router.reads_queries:
            macs["router"] = queries * self.router.projection.weight.numel()
            products = 2  # also with W_Q
        macs["projections"] -= products * queries * self.embed_dim * self.head_dim * unselected
        return macs

    def macs(self, queries: int, keys: int) -> dict[str, int]:
        """As the base class counts, but scores only of the active heads if the others may be left out."""
        macs = super().macs(queries, keys)
        if self._may_skip:
            macs["scores"] = 2 * queries * keys * self.active_heads * self.head_dim
        return macs

    def _by_head(self, weight: Tensor) -> Tensor:
        """[H·D] or [H·D, C] → the routed heads', [h − h_s, D] or [h − h_s, D, C]."""
        heads = weight.view(self.num_heads, self.head_dim, *weight.shape[1:])
        return heads[self.shared_heads :]


MoHSettings.attention = MixtureOfHeads
