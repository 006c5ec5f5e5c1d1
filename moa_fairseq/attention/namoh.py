"""NAMOH (2026): tokens choose heads before any projection; a head sees only the tokens that chose it."""

from dataclasses import dataclass, replace
from typing import Any, Dict, Optional, Tuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from moa_fairseq.attention.base import FamilySettings, flag
from moa_fairseq.attention.collector import record
from moa_fairseq.attention.core import attend
from moa_fairseq.attention.expert_linear import ExpertLinear
from moa_fairseq.attention.moa import MixtureOfAttention
from moa_fairseq.attention.routers import RENORMALIZATIONS, TopKRouter
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.attention.selected import HeadBlocks
from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.kernels import BACKENDS

CHOICES = ("learned", "frozen")


@dataclass
class NAMOHSettings(FamilySettings):
    """The flags of `NativeMixtureOfHeads`."""

    num_experts: int = flag(16, "heads (E), each with queries, keys, values and an output of its own")
    experts_per_token: int = flag(8, "heads each token chooses (K), as a query and as a key")
    expert_dim: int = flag(64, "head dimension (D)")
    expert_bias: bool = flag(False, "biases in queries, keys, values and outputs")
    router_renormalize: str = flag(
        "detached",
        "divide the chosen gates by their sum: without a gradient through it (detached), with one (full), or "
        "not at all (none)",
        RENORMALIZATIONS,
    )
    router_choice: str = flag(
        "learned", "what chooses heads: the learned router; frozen: a router that stays random", CHOICES
    )
    routing_bias_rate: float = flag(
        0.0,
        "balance loads without a gradient: after each update a head's selection bias moves by this much "
        "towards an even load (arXiv 2408.15664: 0.001; 0: off)",
    )
    expert_backend: str = flag(
        "auto", "what computes the projections; auto picks by device and dtype", BACKENDS
    )

    def build(self, embed_dim: int, num_heads: int, causal: bool, **role: Any) -> "NativeMixtureOfHeads":
        """num_heads and causal are unused: the heads are the chosen ones, and masks hide the future."""
        own = self.arguments(expert_bias="bias", router_renormalize="renormalize", expert_backend="backend")
        return NativeMixtureOfHeads(embed_dim, **own, **role)


class NativeMixtureOfHeads(MixtureOfAttention):
    """Attention inside the set of tokens that chose a head, a drop-in for fairseq's attention.

    A token t chooses the heads S(t): the K = experts_per_token largest of softmax(x_t·W_r), E = num_experts.
    Head i has the ordered set T_i of tokens that chose it, and matrices W_Q^i, W_K^i, W_V^i, W_O^i:

        y_t = Σ_{i ∈ S(t)} g_{t,i} · Attention(x_t·W_Q^i; {x_s·W_K^i, x_s·W_V^i : s ∈ T_i}) · W_O^i

    Masks hide keys inside T_i. Cross-attention has a second router, for the memory's tokens; a head that none
    of them chose gives zeros. A cache holds a token's keys and values for its K heads. With K = E this is
    `MixtureOfAttention` with keys_values="own". renormalize, router_choice, routing_bias_rate: as in
    `TopKRouter`; kdim, vdim, bias, backend and role as in `MixtureOfAttention`. Raises UserError for
    impossible sizes and for --positions xl: a head lacks keys for most distances.
    """

    keys_by_expert = True

    def __init__(
        self,
        embed_dim: int,
        *,
        num_experts: int,
        experts_per_token: int,
        expert_dim: int,
        kdim: Optional[int] = None,
        vdim: Optional[int] = None,
        bias: bool = False,
        renormalize: str = "detached",
        router_choice: str = "learned",
        routing_bias_rate: float = 0.0,
        backend: str = "auto",
        **role: Any,
    ):
        check_choice("--router-choice", router_choice, CHOICES)
        if role.get("positions") == "xl":
            raise UserError(
                "--positions xl needs every key in every head, and NAMOH's heads see only the tokens that "
                "chose them: choose --positions rope or sinusoidal."
            )
        super().__init__(
            embed_dim,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            expert_dim=expert_dim,
            bias=bias,
            renormalize=renormalize,
            routing_bias_rate=routing_bias_rate,
            router_choice=router_choice,
            backend=backend,
            groups=experts_per_token,
            **role,
        )
        self.key_widths = {"k_proj": kdim or embed_dim, "v_proj": vdim or embed_dim}
        for name, width in self.key_widths.items():
            setattr(self, name, ExpertLinear(num_experts, width, expert_dim, "experts", bias, backend))
        self.source_router: Optional[TopKRouter] = None
        if not self.self_attention:
            self.source_router = TopKRouter(
                self.key_widths["k_proj"],
                num_experts,
                experts_per_token,
                renormalize,
                bias_rate=routing_bias_rate,
                backend=backend,
                choice=router_choice,
            )

    def reset_parameters(self) -> None:
        """Nothing: routers and experts initialise themselves."""

    def route_keys(
        self, key: Tensor, decision: RoutingDecision, padding: Optional[Tensor]
    ) -> RoutingDecision:
        """The decision about keys; in self-attention, unless a context is carried, the queries' own."""
        tokens = key.size(0) * key.size(1)
        if self.source_router is None and decision.expert_index.size(0) == tokens:
            return decision
        if padding is not None:
            padding = padding[:, -key.size(1) :].reshape(-1).bool()
        own, rows = self.source_router, key.reshape(-1, key.size(2))  # [B, S, C] → [N, C]
        found: RoutingDecision = (own or self.router)(rows, padding, observed=own is not None)
        if own is not None:  # else it is the text again, behind its context: its tokens are counted already
            found = replace(found, side="keys")
            record(self.name, found)
        return found

    def project_keys_values(
        self, key: Tensor, value: Tensor, source: Optional[RoutingDecision]
    ) -> Tuple[Tensor, Tensor]:
        def heads(projection: nn.Module, x: Tensor) -> Tensor:
            slots: Tensor = projection(
                x.reshape(-1, x.size(2)), source, self.experts_per_token, slots_per_sum=1
            )
            # [B·S·K, D] → [B, K, S, D]
            return slots.view(*x.shape[:2], self.experts_per_token, self.head_dim).transpose(1, 2)

        return heads(self.k_proj, key), heads(self.v_proj, value)

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
        """q [B, K, T, D], k and v [B, K, S, D]: slots, whose heads are decision's and key_index [B, S, K].

        A beam's n hypotheses may share keys, as in `core.attend`: they are then more queries of one row.
        """
        assert key_index is not None
        rows, compact = k.size(0), not is_compiling()
        beam = q.size(0) // rows if rows else 1
        index = decision.expert_index.view(rows, beam * q.size(2), self.experts_per_token)
        of_queries = HeadBlocks(index, decision.padding_mask, self.num_experts, compact)
        of_keys = HeadBlocks(key_index, key_padding_mask, self.num_experts, compact)
        if attn_mask is not None:  # [T, S] → [B·E, M, M']
            attn_mask = attn_mask.repeat(beam, 1)
            attn_mask = attn_mask[of_queries.position[:, :, None], of_keys.position[:, None, :]]
        # [n·B, K, T, D] → [B, K, n·T, D]
        folded = q.unflatten(0, (rows, beam)).transpose(1, 2).flatten(2, 3)
        blocks = (of_queries.gather(folded), of_keys.gather(k), of_keys.gather(v))
        found, weights = attend(*blocks, attn_mask, of_keys.empty, self._dropout_now, need_weights)

        def unfolded(x: Tensor) -> Tensor:
            slots: Tensor = of_queries.scatter(x).unflatten(2, (beam, q.size(2)))
            return slots.transpose(1, 2).flatten(0, 1)

        return unfolded(found), None if weights is None else unfolded(of_keys.spread(weights))

    def projection_macs(self, queries: int, keys: int) -> Dict[str, int]:
        inputs = sum(self.key_widths.values())
        of_keys = 0 if self.source_router is None else keys * self.source_router.projection.weight.numel()
        return {
            "router": queries * self.embed_dim * self.num_experts + of_keys,
            "projections": (2 * queries * self.embed_dim + keys * inputs) * self.num_heads * self.head_dim,
        }

    def macs(self, queries: int, keys: int) -> Dict[str, int]:
        """As the base class counts; scores if each head has K / E of the queries and of the keys."""
        scores = 2 * queries * keys * self.num_heads**2 * self.head_dim // self.num_experts
        return {**super().macs(queries, keys), "scores": scores}
