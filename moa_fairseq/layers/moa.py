"""Mixture of Attention Heads (MoA, arXiv 2210.05144): top-k attention experts per token."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.call import Call, Computed
from moa_fairseq.layers.expert_linear import ExpertLinear
from moa_fairseq.layers.experts import BACKENDS
from moa_fairseq.layers.routers import (
    ACTIVATIONS,
    CHOICES,
    GATES,
    RENORMALIZATIONS,
    RouterSettings,
    TopKRouter,
)
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.settings import FamilySettings, flag
from moa_fairseq.layers.torch_compat import is_plain

KEYS_VALUES = ("shared", "own")
_ROWS_OF_ONE_PRODUCT = 1024


@dataclass
class MoASettings(FamilySettings, RouterSettings):
    """The flags of `MixtureOfAttention`."""

    num_experts: int = flag(8, "attention experts per module (E)")
    experts_per_token: int = flag(8, "experts selected per token (K)")
    expert_dim: int = flag(128, "head dimension of an expert (D)")
    heads_per_expert: int = flag(
        1,
        "attention heads per expert, and number of key/value heads that all experts share (1: MoA; more: "
        "the mixture of multi-head attention of SUT and JetMoE)",
    )
    expert_keys_values: str = flag(
        "shared",
        "shared: all experts share keys and values (MoA Eq. 12); own: per-expert keys and values; with "
        "K = E this is dense multi-head attention with gates, the ablation without routing",
        KEYS_VALUES,
    )
    expert_bias: bool = flag(
        False,
        "biases in keys, values, query and output experts (off for translation, as in the release)",
    )
    routing_noise: bool = flag(
        False, "learned Gaussian noise on the router's logits in training (MoA Eq. 3)"
    )
    router_activation: str = flag(
        "softmax",
        "activation that turns router logits into gates: softmax (MoA Eq. 7), or a sigmoid per expert",
        ACTIVATIONS,
    )
    router_renormalize: str = flag(
        "detached",
        "division of the selected gates by their sum: without a gradient through the sum (detached: MoA "
        "Eq. 9), with a gradient (full), or no division (none: MoA's released code)",
        RENORMALIZATIONS,
    )
    router_choice: str = flag(
        "learned",
        "expert selection. learned: by the learned router; frozen: by a router that stays random; hash: by "
        "a hash of the token id, with learned gates",
        CHOICES,
    )
    router_gates: str = flag(
        "learned",
        "weights of the selected experts. learned: by the router; uniform: as for equal logits (1/K if "
        "renormalised), so that only auxiliary losses train the router; straight-through: uniform, with the "
        "gradient of the learned gates to train the router",
        GATES,
    )
    routing_bias_rate: float = flag(
        0.0,
        "step of each expert's selection bias per update, towards an even load (loss-free balancing, arXiv "
        "2408.15664: 0.001; 0: off)",
    )
    expert_backend: str = flag(
        "auto", "backend of the expert projections; auto: selected by device and dtype", BACKENDS
    )


class MixtureOfAttention(Attention):
    """y_t = Σ_{i ∈ G(q_t)} w_{i,t} · E_i(q_t, K, V) (MoA Eq. 6).

    A router (Eq. 7-9) selects K of E experts for each query token. Each expert has its own query projection
    W_i^q and output projection W_i^o. All experts share keys and values, which W^k and W^v project once
    (Eq. 10-12), so this is multi-query attention with K query heads of size D. If heads_per_expert is P, an
    expert has P heads, and there are P shared heads of keys and values (SUT, arXiv 2310.07096; JetMoE, arXiv
    2404.07413). Attention weights are slot by slot: slot k is the k-th most probable expert (expert k if
    K = E).

    Args:
        embed_dim: the model's width, C.
        settings: the settings, or their fields as keywords.
        kdim, vdim: the widths of the inputs of keys and values, if not C.
        router: a router to use instead of `TopKRouter`.
        groups: the number of groups of experts that share keys and values, for a subclass that orders its
            heads as `sdpa.attend` requires.
        options: those of `Attention`.

    Raises:
        UserError: for impossible sizes.
    """

    family = "MoA"
    routes_heads = True

    def __init__(
        self,
        embed_dim: int,
        settings: MoASettings | None = None,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        router: nn.Module | None = None,
        groups: int = 1,
        **options: Any,
    ):
        settings = MoASettings.of(settings, options)
        num_experts = settings.num_experts
        per_token = settings.experts_per_token
        for name in ("expert_dim", "heads_per_expert"):
            size = getattr(settings, name)
            if size is None or size < 1:
                raise UserError(f"{name} is {size}: give a positive number.")
        check_choice("expert_keys_values", settings.expert_keys_values, KEYS_VALUES)
        has_own = settings.expert_keys_values == "own"
        if has_own and per_token != num_experts:
            raise UserError(
                "expert_keys_values own needs every expert for every token, but experts_per_token is "
                f"{per_token} and num_experts is {num_experts}: give both the same number."
            )
        heads = settings.heads_per_expert
        super().__init__(
            embed_dim,
            per_token * heads,
            settings.expert_dim,
            key_heads=heads * (num_experts if has_own else groups),
            own_heads=num_experts * heads,
            **options,
        )
        self.num_experts = num_experts
        self.experts_per_token = per_token
        self.expert_dim = settings.expert_dim
        self.heads_per_expert = heads
        self.router = router or TopKRouter(embed_dim, settings, family=self.family)
        self.reads = token_ids_of(self.router)
        width = heads * settings.expert_dim
        bias = settings.expert_bias
        backend = settings.expert_backend
        self.q_experts = ExpertLinear(num_experts, embed_dim, width, True, bias, backend)
        fan_in = per_token * width
        self.out_experts = ExpertLinear(num_experts, width, embed_dim, False, bias, backend, fan_in)
        key_width = self.key_heads * settings.expert_dim
        self.k_proj = nn.Linear(kdim or embed_dim, key_width, bias=bias)
        self.v_proj = nn.Linear(vdim or embed_dim, key_width, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise keys and values as fairseq does; the router and experts initialise themselves."""
        for projection in (self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def compute(self, call: Call) -> Computed:
        routing: Routing = self.router(call.x, call.query_padding, call.token_ids)
        order = routing.order()
        q = self.q_experts(call.x.reshape(-1, self.embed_dim), order)  # [N, C] → [N·K, P·D]
        # → [B, K·P, T, D]
        q = q.view(*call.x.shape[:2], self.num_heads, self.expert_dim).transpose(1, 2)
        k, v = self.keys_values(call)
        heads, weights = self.attend(call, q, k, v)
        if self.head_gate is not None:
            heads = self.head_gate(heads, call.x, self.head_index(routing))
        # → [N·K, P·D]
        slots = heads.transpose(1, 2).reshape(-1, self.heads_per_expert * self.expert_dim)
        out = self.out_experts(slots, order, routing.gates)
        return out.view_as(call.x), weights, (routing,)

    def keys_values(self, call: Call) -> tuple[Tensor | None, Tensor | None]:
        """Keys and values [B, G, S, D] of the call's memory; None: the cache has them."""
        memory = call.memory
        values = call.values
        if memory is None or values is None:
            return None, None
        shape = (*memory.shape[:2], self.key_heads, self.expert_dim)  # [B, S, G, D]
        # A single product for keys and values needs a copy of both weights at each call. This saves time for
        # many rows, but not in a step of generation, which reads little else than the weights.
        pays = is_compiling() or shape[0] * shape[1] >= _ROWS_OF_ONE_PRODUCT
        pays = pays and memory is values and is_plain(self.k_proj, nn.Linear)
        if pays and is_plain(self.v_proj, nn.Linear):
            weight = torch.cat([self.k_proj.weight, self.v_proj.weight])
            bias = None
            if self.k_proj.bias is not None:
                bias = torch.cat([self.k_proj.bias, self.v_proj.bias])
            both = F.linear(memory, weight, bias)  # [B, S, 2·G·D]
            k, v = both.view(*shape[:2], 2, *shape[2:]).unbind(2)
        else:
            k = self.k_proj(memory).view(shape)
            v = self.v_proj(values).view(shape)
        return k.transpose(1, 2), v.transpose(1, 2)

    def head_index(self, routing: Routing) -> Tensor:
        """The numbers of the active heads of each token: the P heads of each selected expert, side by side.

        Args:
            routing: the routing of N tokens, with K experts each.

        Returns:
            [N, K·P] int64; head p of expert e has the number e·P + p.
        """
        within = torch.arange(self.heads_per_expert, device=routing.expert_ids.device)
        return (routing.expert_ids.unsqueeze(-1) * self.heads_per_expert + within).flatten(1)

    def projection_macs(self, queries: int, keys: int) -> dict[str, int]:
        inputs = self.k_proj.in_features + self.v_proj.in_features
        return {
            "router": queries * self.embed_dim * self.num_experts,
            "projections": 2 * queries * self.embed_dim * self.num_heads * self.head_dim
            + keys * inputs * self.key_heads * self.expert_dim,
        }


def token_ids_of(router: Any) -> frozenset[str]:
    """The value of `Attention.reads` for an attention with this router."""
    return frozenset({"token_ids"} if getattr(router, "token_hash", None) is not None else ())


MoASettings.attention = MixtureOfAttention
