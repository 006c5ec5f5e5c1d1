"""SwitchHead (arXiv 2312.07987): few attention maps, whose projections are mixtures of experts."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.call import Call, Computed
from moa_fairseq.layers.expert_linear import ExpertLinear
from moa_fairseq.layers.experts import BACKENDS, ExpertPermutation
from moa_fairseq.layers.initialization import init_fan_in_normal_
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.settings import FamilySettings, flag
from moa_fairseq.layers.sigmoid_router import SigmoidTopKRouter

PROJECTIONS = "vkqo"
CHOICES = ("learned", "frozen")
Projection = ExpertLinear | nn.Linear


@dataclass
class SwitchHeadSettings(FamilySettings):
    """The flags of `SwitchHeadAttention`."""

    switchhead_heads: int = flag(
        2, "attention heads per layer (n_heads); fairseq's attention-heads flags are ignored"
    )
    switchhead_experts: str = flag(
        "vo",
        "projections that are mixtures of experts: letters of v, k, q, o (Table 6; the paper uses vo), or "
        "none: dense attention with --switchhead-heads heads of dimension --expert-dim",
    )
    num_experts: int = flag(5, "experts per projection and head (E)")
    experts_per_token: int = flag(2, "experts selected per token, projection and head (k)")
    expert_dim: int = flag(76, "head dimension (d_head)")
    expert_dropout: float = flag(
        0.0,
        "probability that an expert of a projection is unavailable to a token in training (expert dropout)",
    )
    router_choice: str = flag(
        "learned",
        "expert selection. learned: by the learned routers; frozen: by routers that stay random",
        CHOICES,
    )
    switchhead_shared_selection: bool = flag(
        False, "the same expert selection for queries and for keys in self-attention (section 3.6)"
    )
    expert_backend: str = flag(
        "auto", "backend of the expert projections; auto: selected by device and dtype", BACKENDS
    )


class SwitchHeadAttention(Attention):
    """Attention with one map per head h and mixtures of experts around it (SwitchHead §2.2).

    The source router selects experts for keys and values, the destination router for queries and outputs:
    s_S^h = σ(x W_S^h), s_D^h = σ(x W_D^h), with the k largest of E each (Eq. 7-8). Then
    V^h = Σ_{e ∈ E_S^h} s_S^h[e] · x W_V^{h,e} (Eq. 9), keys and queries likewise, and
    y = Σ_h Σ_{e ∈ E_D^h} s_D^h[e] · A^h V^h W_O^{h,e} (Eq. 10).

    E = 1 is dense attention with gates. There is no auxiliary loss, and there are no biases. Projections to
    heads start normal with deviation 1 / √C, output projections with 1 / √(H·D).

    Args:
        embed_dim: the model's width, C.
        settings: the settings, or their fields as keywords. switchhead_experts names the projections (of v,
            k, q, o) that are mixtures; the others have one matrix for each head, and "none" is dense
            multi-head attention. With switchhead_shared_selection, a self-attention has one router for both
            sides (§3.6). With router_choice "frozen", routers keep their random weights.
        kdim, vdim: the widths of the inputs of keys and values, if not C.
        options: those of `Attention`.

    Raises:
        UserError: for impossible sizes or letters.
    """

    family = "SwitchHead"

    def __init__(
        self,
        embed_dim: int,
        settings: SwitchHeadSettings | None = None,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        **options: Any,
    ):
        settings = SwitchHeadSettings.of(settings, options)
        for name in ("switchhead_heads", "expert_dim"):
            size = getattr(settings, name)
            if size is None or size < 1:
                raise UserError(f"{name} is {size}: give a positive number.")
        check_choice("router_choice", settings.router_choice, CHOICES)
        experts = settings.switchhead_experts
        letters = "" if experts == "none" else experts
        if (not letters and experts != "none") or sorted(letters) != sorted(
            set(letters) & set(PROJECTIONS)
        ):
            raise UserError(
                f"switchhead_experts is {experts!r}: give some of the letters v, k, q, o (values, keys, "
                "queries, output), each at most once, or none."
            )
        super().__init__(embed_dim, settings.switchhead_heads, settings.expert_dim, **options)
        self.experts = letters
        self.num_experts = settings.num_experts
        self.experts_per_token = settings.experts_per_token
        self.expert_dropout = settings.expert_dropout
        self._backend = settings.expert_backend
        kdim = kdim or embed_dim
        vdim = vdim or embed_dim
        if kdim != vdim and set("vk") & set(letters):
            raise UserError(
                f"SwitchHead selects the experts of keys and values from one input, but kdim is {kdim} and "
                f"vdim is {vdim}: choose switchhead_experts without v and k."
            )
        self.q_proj = self._projection("q", embed_dim)
        self.k_proj = self._projection("k", kdim)
        self.v_proj = self._projection("v", vdim)
        self.out_proj = self._projection("o", embed_dim)
        routes_keys = bool(set("vk") & set(letters))
        routes_queries = bool(set("qo") & set(letters))
        shares = settings.switchhead_shared_selection
        if shares and not (routes_keys and routes_queries):
            raise UserError(
                f"switchhead_shared_selection shares one selection of experts between keys and values (v, "
                f"k) and queries and outputs (q, o), but switchhead_experts {experts} has at most one of "
                f"the two pairs: leave the flag out, or name experts of both pairs, such as vo."
            )
        self.shares_selection = shares and self.self_attention
        self.router = self._router(embed_dim, "queries") if routes_queries else None
        has_own = routes_keys and not self.shares_selection
        self.source_router = self._router(kdim, "keys") if has_own else None
        if settings.router_choice == "frozen":
            for router in (self.router, self.source_router):
                if router is not None:
                    router.requires_grad_(False)
        self.reset_parameters()

    def _projection(self, letter: str, model_dim: int) -> Projection:
        is_up = letter != "o"
        width = self.num_heads * self.head_dim
        if letter in self.experts:
            if is_up:
                sizes = (model_dim, self.head_dim)
            else:
                sizes = (self.head_dim, model_dim)
            fan_in = None if is_up else width
            return ExpertLinear(
                self.num_heads * self.num_experts,
                *sizes,
                is_up,
                expert_backend=self._backend,
                fan_in=fan_in,
            )
        sizes = (width, model_dim)
        if is_up:
            sizes = (model_dim, width)
        return nn.Linear(*sizes, bias=False)

    def _router(self, model_dim: int, side: str) -> SigmoidTopKRouter:
        sizes = (model_dim, self.num_experts, self.experts_per_token, self.num_heads)
        return SigmoidTopKRouter(
            *sizes, self.expert_dropout, side=side, auxiliary=False, family=self.family
        )

    def reset_parameters(self) -> None:
        """Draw the projections and routers again."""
        init_fan_in_normal_(self)

    def restore_initialization(self) -> None:
        super().restore_initialization()
        self.reset_parameters()

    def compute(self, call: Call) -> Computed:
        routing = order = None
        routings = []
        if self.router is not None:
            routing = self.router(call.x, call.query_padding)
            order = routing.order()
            routings.append(routing)
        q = self._into_heads("q", self.q_proj, call.x, routing, order)
        k = v = None
        if call.memory is not None and call.values is not None:
            source = routing
            of_keys = order
            if not (self.shares_selection and call.keys_from_x):
                source, of_keys = self._route_keys(call.memory, call.masks.padding)
                if source is not None:
                    routings.append(source)
            k = self._into_heads("k", self.k_proj, call.memory, source, of_keys)
            v = self._into_heads("v", self.v_proj, call.values, source, of_keys)
        heads, weights = self.attend(call, q, k, v)
        if self.head_gate is not None:
            heads = self.head_gate(heads, call.x)
        heads = heads.transpose(1, 2)  # [B, H, T, D] → [B, T, H, D]
        if routing is not None and "o" in self.experts:
            rows = heads.reshape(-1, self.head_dim)  # [N·H, D]
            out = self.out_proj(rows, order, routing.gates, self.experts_per_token).view_as(call.x)
        else:
            out = self.out_proj(heads.flatten(2))  # [B, T, H·D] · [H·D, C]
        return out, weights, tuple(routings)

    def _route_keys(
        self, memory: Tensor, padding: Tensor | None
    ) -> tuple[Routing | None, ExpertPermutation | None]:
        """The routing of a memory [B, S, kdim], padding [B, S or more], and its order; None: no routing."""
        router = self.source_router
        if self.shares_selection:
            router = self.router
        if router is None:
            return None, None
        if padding is not None:
            padding = padding[:, padding.size(1) - memory.size(1) :]
        decision: Routing = router(memory, padding)
        source = replace(decision, side="keys")
        return source, source.order()

    def _into_heads(
        self,
        letter: str,
        projection: Projection,
        x: Tensor,
        routing: Routing | None,
        order: ExpertPermutation | None,
    ) -> Tensor:
        """Project x [B, T, C] to heads, [B, H, T, D], by experts if `letter` has them."""
        if letter in self.experts and routing is not None:
            rows = x.reshape(-1, x.size(2))  # [B, T, C] → [N, C]
            heads: Tensor = projection(rows, order, routing.gates, self.experts_per_token)
        else:
            heads = projection(x)
        heads = heads.view(*x.shape[:2], self.num_heads, self.head_dim)
        return heads.transpose(1, 2)

    def projection_macs(self, queries: int, keys: int) -> dict[str, int]:
        projections = 0
        for letter, module, tokens in (
            ("q", self.q_proj, queries),
            ("k", self.k_proj, keys),
            ("v", self.v_proj, keys),
            ("o", self.out_proj, queries),
        ):
            model_dim = module.weight.size(-1)
            if module is self.out_proj and letter not in self.experts:
                model_dim = module.weight.size(0)
            used = 1
            if letter in self.experts:
                used = self.experts_per_token
            projections += tokens * model_dim * self.num_heads * self.head_dim * used
        macs = 0
        for router, tokens in ((self.router, queries), (self.source_router, keys)):
            if router is not None:
                macs += tokens * router.projection.weight.numel()
        return {"router": macs, "projections": projections}


SwitchHeadSettings.attention = SwitchHeadAttention
