"""Mixture of Attention Heads (MoA, arXiv 2210.05144): top-k attention experts per token."""

import math
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.attention.base import FamilySettings, MixtureAttention, flag
from moa_fairseq.attention.cache import Cache
from moa_fairseq.attention.expert_linear import ExpertLinear
from moa_fairseq.attention.routers import ACTIVATIONS, CHOICES, GATES, RENORMALIZATIONS, TopKRouter
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.kernels import BACKENDS

KEYS_VALUES = ("shared", "own")
_ROWS_OF_ONE_PRODUCT = 1024


@dataclass
class MoASettings(FamilySettings):
    """The flags of `MixtureOfAttention`."""

    num_experts: int = flag(8, "attention experts per module (E)")
    experts_per_token: int = flag(8, "experts each token chooses (K)")
    expert_dim: int = flag(128, "head dimension of an expert (D)")
    heads_per_expert: int = flag(
        1,
        "attention heads inside an expert; all experts share as many heads of keys and values (1: MoA; more: "
        "the mixture of multi-head attention of SUT and JetMoE)",
    )
    expert_keys_values: str = flag(
        "shared",
        "shared: all experts share keys and values (MoA Eq. 12); own: each expert has a head of its own, "
        "which with K = E is dense multi-head attention with gates, the control for what routing adds",
        KEYS_VALUES,
    )
    expert_bias: bool = flag(
        False, "biases in keys, values, query and output experts (off for translation, as in the release)"
    )
    routing_noise: bool = flag(False, "learned Gaussian noise on the router's logits in training (MoA Eq. 3)")
    router_activation: str = flag(
        "softmax",
        "what turns the router's logits into gates: softmax (MoA Eq. 7), or a sigmoid of each",
        ACTIVATIONS,
    )
    router_renormalize: str = flag(
        "detached",
        "divide the chosen gates by their sum: without a gradient through it (detached: MoA Eq. 9), with one "
        "(full), or not at all (none: MoA's released code)",
        RENORMALIZATIONS,
    )
    router_choice: str = flag(
        "learned",
        "what chooses experts: the learned router; frozen: a router that stays random; hash: a hash of the "
        "token's id, with learned gates",
        CHOICES,
    )
    router_gates: str = flag(
        "learned",
        "the weights of the chosen experts: learned; uniform: those of equal logits (1/K where they are "
        "renormalised), so that only auxiliary losses train the router; straight-through: uniform, with the "
        "learned gates' gradient to train the choice",
        GATES,
    )
    routing_bias_rate: float = flag(
        0.0,
        "balance loads without a gradient: after each update an expert's selection bias moves by this much "
        "towards an even load (arXiv 2408.15664: 0.001; 0: off)",
    )
    expert_backend: str = flag(
        "auto", "what computes the expert projections; auto picks by device and dtype", BACKENDS
    )

    def build(self, embed_dim: int, num_heads: int, causal: bool, **role: Any) -> "MixtureOfAttention":
        """num_heads and causal are unused: the heads are the K chosen experts, and masks hide the future."""
        own = self.arguments(
            expert_keys_values="keys_values",
            expert_bias="bias",
            router_activation="activation",
            router_renormalize="renormalize",
            expert_backend="backend",
        )
        return MixtureOfAttention(embed_dim, **own, **role)


class MixtureOfAttention(MixtureAttention[RoutingDecision]):
    """y_t = Σ_{i ∈ G(q_t)} w_{i,t} · E_i(q_t, K, V) (MoA Eq. 6), a drop-in for fairseq's attention.

    A router (Eq. 7-9) picks K of E experts per query token. An expert has its own query projection
    W_i^q and output projection W_i^o; keys and values are projected once by W^k, W^v, shared by all
    experts (Eq. 10-12), so the attention is multi-query attention with K query heads of size D.

    heads_per_expert: P heads of size D in each expert, and P shared heads of keys and values (SUT, arXiv
    2310.07096; JetMoE, arXiv 2404.07413). keys_values: "own" gives each expert its own, which takes
    K = E: dense attention whose heads are gated. bias: biases of keys, values, query experts and
    output experts (the router has none in either case). router: one to use instead of `TopKRouter`. groups:
    of experts that share keys and values, for a subclass that orders its heads as `core.attend` wants.
    joint_keys_values: whether `k_proj` and `v_proj` may be computed as one product of their weights; False
    for projections that are replaced or hooked into later (by an adapter, for example). Head weights stand
    slot by slot: slot k is the k-th most probable expert (expert k when K = E). Raises UserError for
    impossible sizes.
    """

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
        heads_per_expert: int = 1,
        keys_values: str = "shared",
        activation: str = "softmax",
        renormalize: str = "detached",
        routing_noise: bool = False,
        routing_bias_rate: float = 0.0,
        router_choice: str = "learned",
        router_gates: str = "learned",
        backend: str = "auto",
        router: Optional[nn.Module] = None,
        groups: int = 1,
        joint_keys_values: bool = True,
        **role: Any,
    ):
        for name, size in (("expert-dim", expert_dim), ("heads-per-expert", heads_per_expert)):
            if size is None or size < 1:
                raise UserError(f"--{name} must be a positive number, not {size}.")
        check_choice("--expert-keys-values", keys_values, KEYS_VALUES)
        if keys_values == "own" and experts_per_token != num_experts:
            raise UserError(
                "--expert-keys-values own needs every expert for every token, but --experts-per-token "
                f"{experts_per_token} chooses among --num-experts {num_experts}: give both the same number."
            )
        key_heads = heads_per_expert * (num_experts if keys_values == "own" else groups)
        super().__init__(
            embed_dim,
            experts_per_token * heads_per_expert,
            expert_dim,
            key_heads=key_heads,
            own_heads=num_experts * heads_per_expert,
            **role,
        )
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.expert_dim, self.heads_per_expert = expert_dim, heads_per_expert
        self.router = router or TopKRouter(
            embed_dim,
            num_experts,
            experts_per_token,
            renormalize,
            routing_noise,
            activation=activation,
            bias_rate=routing_bias_rate,
            backend=backend,
            choice=router_choice,
            gates=router_gates,
        )
        width = heads_per_expert * expert_dim
        self.q_experts = ExpertLinear(num_experts, embed_dim, width, "experts", bias, backend)
        self.out_experts = ExpertLinear(
            num_experts, width, embed_dim, "model", bias, backend, fan_in=experts_per_token * width
        )
        self.joint_keys_values = joint_keys_values
        self.k_proj = nn.Linear(kdim or embed_dim, self.key_heads * expert_dim, bias=bias)
        self.v_proj = nn.Linear(vdim or embed_dim, self.key_heads * expert_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise keys and values as in fairseq's attention; router and experts initialise themselves."""
        for projection in (self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def route(self, x: Tensor, padding: Optional[Tensor], cache: Optional[Cache]) -> RoutingDecision:
        rows = x.view(-1, self.embed_dim)
        decision: RoutingDecision = self.router(rows, None if padding is None else padding.reshape(-1))
        return decision

    def project_queries(self, x: Tensor, decision: RoutingDecision) -> Tensor:
        rows = x.view(-1, self.embed_dim)  # [B, T, C] → [N, C]
        q: Tensor = self.q_experts(rows, decision, self.experts_per_token, slots_per_sum=1)
        # [N·K, P·D] → [B, K·P, T, D]
        return q.view(*x.shape[:2], self.num_heads, self.expert_dim).transpose(1, 2)

    def project_keys_values(
        self, key: Tensor, value: Tensor, source: Optional[RoutingDecision]
    ) -> Tuple[Tensor, Tensor]:
        shape = (*key.shape[:2], self.key_heads, self.expert_dim)  # [B, S, G, D]
        # One product needs a copy of both weights side by side at each call. That pays for many rows, but not
        # for a step of generation, which reads hardly anything but the weights.
        pays = key.size(0) * key.size(1) >= _ROWS_OF_ONE_PRODUCT
        if key is value and pays and self.joint_keys_values:
            weight = torch.cat([self.k_proj.weight, self.v_proj.weight])
            bias = None if self.k_proj.bias is None else torch.cat([self.k_proj.bias, self.v_proj.bias])
            both = F.linear(key, weight, bias).view(
                *shape[:2], 2, *shape[2:]
            )  # [B, S, 2·G·D] → [B, S, 2, G, D]
            k, v = both.unbind(2)
        else:
            k, v = self.k_proj(key).view(shape), self.v_proj(value).view(shape)
        return k.transpose(1, 2), v.transpose(1, 2)

    def head_index(self, decision: RoutingDecision) -> Tensor:
        """[N, K·P]: the P heads of each chosen expert."""
        within = torch.arange(self.heads_per_expert, device=decision.expert_index.device)
        return (decision.expert_index.unsqueeze(-1) * self.heads_per_expert + within).flatten(1)

    def project_output(self, heads: Tensor, decision: RoutingDecision) -> Tensor:
        batch, _, tgt_len, _ = heads.shape
        width = self.heads_per_expert * self.expert_dim
        slots = heads.transpose(1, 2).reshape(-1, width)  # [B, K·P, T, D] → [N·K, P·D]
        out: Tensor = self.out_experts(
            slots, decision, slots_per_row=1, slots_per_sum=self.experts_per_token, gate=decision.gate
        )
        return out.view(batch, tgt_len, self.embed_dim)

    def projection_macs(self, queries: int, keys: int) -> Dict[str, int]:
        inputs = self.k_proj.in_features + self.v_proj.in_features
        return {
            "router": queries * self.embed_dim * self.num_experts,
            "projections": 2 * queries * self.embed_dim * self.num_heads * self.head_dim
            + keys * inputs * self.key_heads * self.expert_dim,
        }
