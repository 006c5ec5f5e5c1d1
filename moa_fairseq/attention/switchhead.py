"""SwitchHead (arXiv 2312.07987): few attention maps, whose projections are mixtures of experts."""

from dataclasses import dataclass, replace
from typing import Any, Dict, Optional, Tuple, Union

from torch import Tensor, nn

from moa_fairseq.attention.base import FamilySettings, MixtureAttention, flag
from moa_fairseq.attention.cache import Cache
from moa_fairseq.attention.collector import record
from moa_fairseq.attention.expert_linear import ExpertLinear
from moa_fairseq.attention.initialization import draw_by_fan_in
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.attention.sigmoid_router import SigmoidTopKRouter
from moa_fairseq.errors import UserError
from moa_fairseq.kernels import BACKENDS

PROJECTIONS = "vkqo"
Projection = Union[ExpertLinear, nn.Linear]


@dataclass
class SwitchHeadSettings(FamilySettings):
    """The flags of `SwitchHeadAttention`."""

    switchhead_heads: int = flag(2, "attention maps per layer (n_heads); fairseq's attention-heads is unused")
    switchhead_experts: str = flag(
        "vo",
        "which projections are mixtures of experts: letters of v, k, q, o (Table 6; vo is the paper's), or "
        "none: dense attention with --switchhead-heads heads of --expert-dim",
    )
    num_experts: int = flag(5, "experts of each projection and head (E)")
    experts_per_token: int = flag(2, "experts that a token chooses for each projection and head (k)")
    expert_dim: int = flag(76, "head dimension (d_head)")
    expert_dropout: float = flag(
        0.0, "probability with which each expert of a projection is unavailable to a token in training"
    )
    router_choice: str = flag(
        "learned",
        "what chooses experts: the learned routers; frozen: routers that stay random",
        ("learned", "frozen"),
    )
    switchhead_shared_selection: bool = flag(
        False, "self-attention chooses the same experts as query and as key (section 3.6)"
    )
    expert_backend: str = flag(
        "auto", "what computes the expert projections; auto picks by device and dtype", BACKENDS
    )

    def build(self, embed_dim: int, num_heads: int, causal: bool, **role: Any) -> "SwitchHeadAttention":
        """num_heads and causal are unused: --switchhead-heads gives the heads, and masks hide the future."""
        own = self.arguments(
            switchhead_heads="num_heads",
            expert_dim="head_dim",
            switchhead_experts="experts",
            switchhead_shared_selection="shared_selection",
            expert_backend="backend",
        )
        return SwitchHeadAttention(embed_dim, **own, **role)


class SwitchHeadAttention(MixtureAttention[Optional[RoutingDecision]]):
    """Attention with one map per head h and mixtures of experts around it (SwitchHead §2.2).

    The source side decides about keys and values, the destination side about queries and outputs:
    s_S^h = σ(x W_S^h), s_D^h = σ(x W_D^h), and the k largest of E each (Eq. 7-8). Then
    V^h = Σ_{e ∈ E_S^h} s_S^h[e] · x W_V^{h,e} (Eq. 9), keys and queries likewise, and
    y = Σ_h Σ_{e ∈ E_D^h} s_D^h[e] · A^h V^h W_O^{h,e} (Eq. 10).

    experts: which of v, k, q, o are mixtures; the others have one matrix per head, and "none" is
    dense multi-head attention. E = 1 is dense attention with gates. shared_selection: one router
    for both sides of a self-attention (§3.6). No auxiliary loss, no biases. expert_dropout: see
    `SigmoidTopKRouter`.
    Matrices into the heads start normal with deviation 1 / √C, those out of them with 1 / √(H·D).
    router_choice: "frozen" leaves the routers' weights as they were drawn.
    Raises UserError for impossible sizes or letters.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        *,
        num_experts: int = 1,
        experts_per_token: int = 1,
        experts: str = "vo",
        expert_dropout: float = 0.0,
        shared_selection: bool = False,
        kdim: Optional[int] = None,
        vdim: Optional[int] = None,
        router_choice: str = "learned",
        backend: str = "auto",
        **role: Any,
    ):
        for name, size in (("switchhead-heads", num_heads), ("expert-dim", head_dim)):
            if size is None or size < 1:
                raise UserError(f"--{name} must be a positive number, not {size}.")
        letters = "" if experts == "none" else experts
        if (not letters and experts != "none") or sorted(letters) != sorted(set(letters) & set(PROJECTIONS)):
            raise UserError(
                f"--switchhead-experts {experts!r} must be some of the letters v, k, q, o (values, keys, "
                "queries, output), each at most once, or none."
            )
        super().__init__(embed_dim, num_heads, head_dim, **role)
        self.experts, self.num_experts, self.experts_per_token = letters, num_experts, experts_per_token
        self.backend, self.expert_dropout = backend, expert_dropout
        kdim, vdim = kdim or embed_dim, vdim or embed_dim
        if kdim != vdim and set("vk") & set(letters):
            raise UserError(
                f"SwitchHead's source side decides about keys and values together, and keys of width {kdim} "
                f"with values of width {vdim} are two inputs: choose --switchhead-experts without v and k."
            )
        self.q_proj = self._projection("q", embed_dim)
        self.k_proj = self._projection("k", kdim)
        self.v_proj = self._projection("v", vdim)
        self.out_proj = self._projection("o", embed_dim)
        decides = {
            side: bool(set(sides) & set(letters)) for side, sides in (("keys", "vk"), ("queries", "qo"))
        }
        if shared_selection and not all(decides.values()):
            raise UserError(
                f"--switchhead-shared-selection shares one choice of experts between keys and values (v, k) "
                f"and queries and outputs (q, o), but --switchhead-experts {experts} has experts on one side "
                f"at most: leave the flag out, or name experts of both sides, such as vo."
            )
        self.shares_selection = shared_selection and self.self_attention
        self.router = self._router(embed_dim, "queries") if decides["queries"] else None
        has_own = decides["keys"] and not self.shares_selection
        self.source_router = self._router(kdim, "keys") if has_own else None
        if router_choice == "frozen":
            for router in (self.router, self.source_router):
                if router is not None:
                    router.requires_grad_(False)
        self.reset_parameters()

    def _projection(self, letter: str, model_dim: int) -> Projection:
        into, width = "model" if letter == "o" else "experts", self.num_heads * self.head_dim
        if letter in self.experts:
            sizes = (model_dim, self.head_dim) if into == "experts" else (self.head_dim, model_dim)
            fan_in = None if into == "experts" else width
            return ExpertLinear(
                self.num_heads * self.num_experts, *sizes, into, backend=self.backend, fan_in=fan_in
            )
        sizes = (model_dim, width) if into == "experts" else (width, model_dim)
        return nn.Linear(*sizes, bias=False)

    def _router(self, model_dim: int, side: str) -> SigmoidTopKRouter:
        sizes = (model_dim, self.num_experts, self.experts_per_token, self.num_heads)
        return SigmoidTopKRouter(*sizes, self.expert_dropout, side=side, auxiliary=False)

    def reset_parameters(self) -> None:
        """Draw the projections and routers anew."""
        draw_by_fan_in(self)

    def restore_initialization(self) -> None:
        super().restore_initialization()
        self.reset_parameters()

    def route(
        self, x: Tensor, padding: Optional[Tensor], cache: Optional[Cache]
    ) -> Optional[RoutingDecision]:
        if self.router is None:
            return None
        rows = x.reshape(-1, x.size(2))  # [B, T, C] → [N, C]
        decision: RoutingDecision = self.router(rows, None if padding is None else padding.reshape(-1))
        return decision

    def project_queries(self, x: Tensor, decision: Optional[RoutingDecision]) -> Tensor:
        return self._into_heads("q", self.q_proj, x, decision)

    def route_keys(
        self, key: Tensor, decision: Optional[RoutingDecision], padding: Optional[Tensor]
    ) -> Optional[RoutingDecision]:
        router = self.router if self.shares_selection else self.source_router
        tokens = key.size(0) * key.size(1)
        if self.shares_selection and decision is not None and decision.gate.size(0) == tokens:
            return decision  # without a carried context, keys are the queries' tokens
        if router is None:
            return None
        if padding is not None:
            padding = padding[:, -key.size(1) :].reshape(-1).bool()
        found: RoutingDecision = router(key.reshape(-1, key.size(2)), padding)  # [B, S, C] → [N, C]
        source = replace(found, side="keys")
        record(self.name, source)
        return source

    def project_keys_values(
        self, key: Tensor, value: Tensor, source: Optional[RoutingDecision]
    ) -> Tuple[Tensor, Tensor]:
        return (
            self._into_heads("k", self.k_proj, key, source),
            self._into_heads("v", self.v_proj, value, source),
        )

    def project_output(self, heads: Tensor, decision: Optional[RoutingDecision]) -> Tensor:
        batch, num_heads, tgt_len, head_dim = heads.shape
        heads = heads.transpose(1, 2)  # [B, H, T, D] → [B, T, H, D]
        out: Tensor
        if "o" in self.experts and decision is not None:
            rows = heads.reshape(-1, head_dim)  # [N·H, D]
            slots = num_heads * self.experts_per_token
            out = self.out_proj(rows, decision, self.experts_per_token, slots, gate=decision.gate)
        else:
            out = self.out_proj(heads.flatten(2))  # [B, T, H·D] · [H·D, C]
        return out.view(batch, tgt_len, self.embed_dim)

    def _into_heads(
        self, letter: str, projection: Projection, x: Tensor, decision: Optional[RoutingDecision]
    ) -> Tensor:
        """x [B, T, C] → [B, H, T, D]"""
        heads: Tensor
        if letter in self.experts and decision is not None:
            slots = self.num_heads * self.experts_per_token
            rows = x.reshape(-1, x.size(2))  # [B, T, C] → [N, C]
            heads = projection(rows, decision, slots, self.experts_per_token, gate=decision.gate)
        else:
            heads = projection(x)
        return heads.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def projection_macs(self, queries: int, keys: int) -> Dict[str, int]:
        projections = 0
        for letter, module, tokens in (
            ("q", self.q_proj, queries),
            ("k", self.k_proj, keys),
            ("v", self.v_proj, keys),
            ("o", self.out_proj, queries),
        ):
            model_dim = module.weight.size(
                0 if module is self.out_proj and letter not in self.experts else -1
            )
            used = self.experts_per_token if letter in self.experts else 1
            projections += tokens * model_dim * self.num_heads * self.head_dim * used
        routers = ((self.router, queries), (self.source_router, keys))
        macs = sum(
            tokens * router.projection.weight.numel() for router, tokens in routers if router is not None
        )
        return {"router": macs, "projections": projections}
