"""NAMOH (2026): tokens select heads before any projection; a head sees only the tokens that selected it."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.call import Call, Computed
from moa_fairseq.layers.expert_linear import ExpertLinear
from moa_fairseq.layers.experts import BACKENDS
from moa_fairseq.layers.head_blocks import HeadBlocks
from moa_fairseq.layers.moa import MixtureOfAttention, MoASettings
from moa_fairseq.layers.routers import RENORMALIZATIONS, RouterSettings, TopKRouter
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.sdpa import Masks
from moa_fairseq.layers.settings import FamilySettings, flag
from moa_fairseq.layers.torch_compat import is_readable

CHOICES = ("learned", "frozen")


@dataclass
class NAMOHSettings(FamilySettings, RouterSettings):
    """The flags of `NativeMixtureOfHeads`."""

    num_experts: int = flag(
        16, "number of heads (E), each with its own query, key, value and output projections"
    )
    experts_per_token: int = flag(8, "heads selected per token (K), for its query and for its key")
    expert_dim: int = flag(64, "head dimension (D)")
    expert_bias: bool = flag(False, "biases in queries, keys, values and outputs")
    router_renormalize: str = flag(
        "detached",
        "division of the selected gates by their sum: without a gradient through the sum (detached), with "
        "a gradient (full), or no division (none)",
        RENORMALIZATIONS,
    )
    router_choice: str = flag(
        "learned",
        "head selection. learned: by the learned router; frozen: by a router that stays random",
        CHOICES,
    )
    routing_bias_rate: float = flag(
        0.0,
        "step of each head's selection bias per update, towards an even load (loss-free balancing, arXiv "
        "2408.15664: 0.001; 0: off)",
    )
    expert_backend: str = flag(
        "auto", "backend of the projections; auto: selected by device and dtype", BACKENDS
    )


class NativeMixtureOfHeads(MixtureOfAttention):
    """Attention among the tokens that selected the same head.

    A token t selects the heads S(t), the K = experts_per_token of E = num_experts with the largest
    softmax(x_t·W_r). Head i has the tokens T_i that selected it, in their order, and the matrices W_Q^i,
    W_K^i, W_V^i and W_O^i:

        y_t = Σ_{i ∈ S(t)} g_{t,i} · Attention(x_t·W_Q^i; {x_s·W_K^i, x_s·W_V^i : s ∈ T_i}) · W_O^i

    Masks hide keys inside T_i. Cross-attention has a second router for the tokens of the memory; a head that
    none of them selected returns zeros. A cache holds the keys and values of each token for its K heads. If
    K = E, this is `MixtureOfAttention` with expert_keys_values="own".

    Args:
        embed_dim: the model's width, C.
        settings: the settings, or their fields as keywords.
        kdim, vdim: the widths of the inputs of keys and values, if not C.
        options: those of `MixtureOfAttention`.

    Raises:
        UserError: for impossible sizes, and for positions="xl", because a head has no keys at most distances.
    """

    family = "NAMOH"
    keys_by_expert = True

    def __init__(
        self,
        embed_dim: int,
        settings: NAMOHSettings | None = None,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        **options: Any,
    ):
        settings = NAMOHSettings.of(settings, options)
        check_choice("router_choice", settings.router_choice, CHOICES)
        if options.get("positions") == "xl":
            raise UserError(
                "positions='xl' needs every key in every head, but a NAMOH head sees only the tokens that "
                "selected it: choose positions='rope', or an embedding (--positions sinusoidal)."
            )
        num_experts = settings.num_experts
        dim = settings.expert_dim
        bias = settings.expert_bias
        backend = settings.expert_backend
        super().__init__(
            embed_dim,
            MoASettings(
                num_experts=num_experts,
                experts_per_token=settings.experts_per_token,
                expert_dim=dim,
                expert_bias=bias,
                router_renormalize=settings.router_renormalize,
                router_choice=settings.router_choice,
                routing_bias_rate=settings.routing_bias_rate,
                expert_backend=backend,
            ),
            groups=settings.experts_per_token,
            **options,
        )
        self.key_widths = {"k_proj": kdim or embed_dim, "v_proj": vdim or embed_dim}
        for name, width in self.key_widths.items():
            setattr(self, name, ExpertLinear(num_experts, width, dim, True, bias, backend))
        self.source_router: TopKRouter | None = None
        if not self.self_attention:
            self.source_router = TopKRouter(self.key_widths["k_proj"], settings, family=self.family)

    def reset_parameters(self) -> None:
        """Do nothing: routers and experts initialise themselves."""

    def compute(self, call: Call) -> Computed:
        rows = call.x.reshape(-1, self.embed_dim)  # [B, T, C] → [N, C]
        routing: Routing = self.router(rows, call.query_padding)
        order = routing.order()
        q = self._heads(self.q_experts(rows, order), call.x)
        routings: tuple[Routing, ...] = (routing,)
        k = v = key_experts = None
        if call.memory is not None and call.values is not None:
            source = self._route_keys(call, routing)
            if source.side == "keys":
                routings = (routing, source)
            source_order = order
            if source is not routing:
                source_order = source.order()
            k = self._heads(
                self.k_proj(call.memory.reshape(-1, call.memory.size(2)), source_order), call.memory
            )
            v = self._heads(
                self.v_proj(call.values.reshape(-1, call.values.size(2)), source_order), call.values
            )
            # [B·S, K] → [B, S, K]
            key_experts = source.expert_ids.unflatten(0, call.memory.shape[:2])
        q, k, v, masks, _ = self.place(call, q, k, v, key_experts)
        if call.cache is not None:
            key_experts = call.cache.key_experts
        assert key_experts is not None
        heads, weights = self._attend_by_head(call, q, k, v, masks, routing, key_experts)
        if self.head_gate is not None:
            heads = self.head_gate(heads, call.x, self.head_index(routing))
        slots = heads.transpose(1, 2).reshape(-1, self.expert_dim)  # [B, K, T, D] → [N·K, D]
        return self.out_experts(slots, order, routing.gates).view_as(call.x), weights, routings

    def _heads(self, slots: Tensor, x: Tensor) -> Tensor:
        """[B·T·K, D] → [B, K, T, D]"""
        return slots.view(*x.shape[:2], self.experts_per_token, self.head_dim).transpose(1, 2)

    def _route_keys(self, call: Call, routing: Routing) -> Routing:
        """The routing of the keys; in self-attention that of the queries, unless a context is carried."""
        source_router = self.source_router
        memory = call.memory
        assert memory is not None
        if source_router is None and call.keys_from_x:
            return routing
        padding = call.masks.padding
        if padding is not None:
            padding = padding[:, padding.size(1) - memory.size(1) :]
        rows = memory.reshape(-1, memory.size(2))  # [B, S, C] → [N, C]
        # Without its own router this is self-attention: the queries' routing has counted these tokens already
        source: Routing = (source_router or self.router)(
            rows, padding, observed=source_router is not None
        )
        if source_router is None:
            return source
        return replace(source, side="keys")

    def _attend_by_head(
        self,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: Masks,
        routing: Routing,
        key_experts: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from each slot to the keys of its own head.

        Args:
            q: the queries of the slots, [B, K, T, D]; the routing has their heads.
            k, v: keys and values of slots, [B, K, S, D], or of B / n rows if the n hypotheses of a beam share
                keys, as in `sdpa.attend`: the hypotheses are then more queries of one row.
            key_experts: the heads of the keys' slots, [B, S, K].
        """
        rows = k.size(0)
        compact = is_readable(k)
        beam = q.size(0) // rows if rows else 1
        index = routing.expert_ids.view(rows, beam * q.size(2), self.experts_per_token)
        of_queries = HeadBlocks(index, routing.padding, self.num_experts, compact)
        of_keys = HeadBlocks(key_experts, masks.padding, self.num_experts, compact)
        mask = masks.mask
        if mask is not None:  # [T, S] or [B, T, S] → [B·E, M, M']
            queries = of_queries.position
            keys = of_keys.position
            if mask.dim() == 2:
                mask = mask.repeat(beam, 1)[queries[:, :, None], keys[:, None, :]]
            else:
                mask = mask.reshape(rows, beam * q.size(2), -1).repeat_interleave(
                    self.num_experts, 0
                )
                mask = mask.gather(1, queries[:, :, None].expand(-1, -1, mask.size(2)))
                mask = mask.gather(2, keys[:, None, :].expand(-1, queries.size(1), -1))
        # [n·B, K, T, D] → [B, K, n·T, D]
        folded = q.unflatten(0, (rows, beam)).transpose(1, 2).flatten(2, 3)
        blocks = (of_queries.gather(folded), of_keys.gather(k), of_keys.gather(v))
        blocks_out, weights = self.attend(call, *blocks, Masks(mask, of_keys.empty))

        def unfolded(x: Tensor) -> Tensor:
            slots: Tensor = of_queries.scatter(x).unflatten(2, (beam, q.size(2)))
            return slots.transpose(1, 2).flatten(0, 1)

        return unfolded(blocks_out), None if weights is None else unfolded(of_keys.spread(weights))

    def projection_macs(self, queries: int, keys: int) -> dict[str, int]:
        inputs = sum(self.key_widths.values())
        of_keys = 0
        if self.source_router is not None:
            of_keys = keys * self.source_router.projection.weight.numel()
        return {
            "router": queries * self.embed_dim * self.num_experts + of_keys,
            "projections": (2 * queries * self.embed_dim + keys * inputs)
            * self.num_heads
            * self.head_dim,
        }

    def macs(self, queries: int, keys: int) -> dict[str, int]:
        """As the base class, but with scores for K / E of the queries and K / E of the keys in each head."""
        scores = 2 * queries * keys * self.num_heads**2 * self.head_dim // self.num_experts
        return super().macs(queries, keys) | {"scores": scores}


NAMOHSettings.attention = NativeMixtureOfHeads
