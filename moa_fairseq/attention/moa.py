"""Mixture of Attention Heads (MoA, arXiv 2210.05144): top-k attention experts per token."""

import math
from typing import Optional, Tuple

from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor, nn

from moa_fairseq.attention.collector import padding_of_queries, record
from moa_fairseq.attention.core import attend, extend_cache, extend_padding
from moa_fairseq.attention.expert_linear import ExpertLinear
from moa_fairseq.attention.incremental import IncrementalAttention, IncrementalState
from moa_fairseq.attention.routers import TopKRouter
from moa_fairseq.errors import UserError


class MixtureOfAttention(IncrementalAttention):
    """y_t = Σ_{i ∈ G(q_t)} w_{i,t} · E_i(q_t, K, V) (MoA Eq. 6), a drop-in for fairseq's attention.

    A router (Eq. 7-9) picks K of E experts per query token. An expert has its own query projection
    W_i^q and output projection W_i^o; keys and values are projected once by W^k, W^v, shared by all
    experts (Eq. 10-12), so the attention is multi-query attention with K query heads of size D.
    bias: biases of keys, values, query experts and output experts (the router has none in either case).
    Raises UserError for impossible K, E, D.
    """

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        experts_per_token: int,
        expert_dim: int,
        kdim: Optional[int] = None,
        vdim: Optional[int] = None,
        dropout: float = 0.0,
        bias: bool = False,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        renormalize: str = "detached",
        routing_noise: bool = False,
        backend: str = "auto",
    ):
        super().__init__()
        if expert_dim is None or expert_dim < 1:
            raise UserError(f"--expert-dim must be a positive number (the papers' D), not {expert_dim}.")
        self.embed_dim = embed_dim
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.expert_dim = expert_dim
        # fairseq's layers read these two names
        self.num_heads, self.head_dim = experts_per_token, expert_dim
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention
        self.name = ""  # the path in the model, set when a model is built: "encoder.layers.0.self_attn"
        self.dropout_module = FairseqDropout(dropout, module_name=self.__class__.__name__)
        self.router = TopKRouter(embed_dim, num_experts, experts_per_token, renormalize, routing_noise)
        self.q_experts = ExpertLinear(num_experts, embed_dim, expert_dim, "experts", bias, backend)
        self.out_experts = ExpertLinear(num_experts, expert_dim, embed_dim, "model", bias, backend)
        self.k_proj = nn.Linear(kdim or embed_dim, expert_dim, bias=bias)
        self.v_proj = nn.Linear(vdim or embed_dim, expert_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Keys and values as fairseq's attention does; router and experts initialise themselves."""
        for projection in (self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Optional[Tensor],
        value: Optional[Tensor],
        key_padding_mask: Optional[Tensor] = None,
        incremental_state: Optional[IncrementalState] = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Optional[Tensor] = None,
        need_head_weights: bool = False,
        query_padding_mask: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """fairseq's `MultiheadAttention.forward`, time first.

        query [T, B, C], key and value [S, B, kdim / vdim] (ignored in self-attention; may be None once
        static_kv keys are cached). key_padding_mask [B, S], True = padding; attn_mask [T, S] additive
        or bool. query_padding_mask [B, T] keeps padding out of the routing statistics and zeroes its
        output; it defaults to what `query_padding` declared, or to key_padding_mask in self-attention.
        Returns (output [T, B, C], weights): weights is None, [B, T, S] averaged over the K chosen
        experts (need_weights), or [K, B, T, S] (need_head_weights), slot k being the k-th most
        probable expert (expert k when K = E).
        """
        tgt_len, batch, _ = query.shape
        own_keys = key_padding_mask if self.self_attention else None
        padding = padding_of_queries(query_padding_mask, own_keys, batch, tgt_len)
        # Batch first from here on: queries and attention outputs then change shape without a copy.
        tokens = query.transpose(0, 1).reshape(batch * tgt_len, self.embed_dim)
        decision = self.router(tokens, None if padding is None else padding.reshape(-1))
        record(self.name, decision)

        q = self.q_experts(tokens, decision, slots_per_row=self.experts_per_token, slots_per_sum=1)
        k, v, key_padding_mask = self._keys_and_values(
            tokens.view(batch, tgt_len, self.embed_dim),
            key,
            value,
            key_padding_mask,
            incremental_state,
            static_kv,
        )
        heads, weights = attend(
            q.view(batch, tgt_len, self.experts_per_token, self.expert_dim).transpose(1, 2),
            k,
            v,
            attn_mask,
            key_padding_mask,
            self.attention_dropout,
            need_weights or need_head_weights,
        )
        slots = heads.transpose(1, 2).reshape(-1, self.expert_dim)
        out = self.out_experts(
            slots, decision, slots_per_row=1, slots_per_sum=self.experts_per_token, gate=decision.gate
        )
        out = out.view(batch, tgt_len, self.embed_dim).transpose(0, 1).contiguous()
        if weights is not None:
            weights = weights.transpose(0, 1) if need_head_weights else weights.mean(dim=1)
        return out, weights

    def _keys_and_values(
        self,
        query: Tensor,
        key: Optional[Tensor],
        value: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        incremental_state: Optional[IncrementalState],
        static_kv: bool,
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """The shared head's keys and values [B, 1, S, D] and their padding [B, S], through the cache.

        query [B, T, C], key and value [S, B, C]. B of the results counts sentences where the
        hypotheses of a beam share them.
        """
        cache = self._get_input_buffer(incremental_state)
        k = v = None
        if not (static_kv and cache.get("prev_key") is not None):
            if self.self_attention:
                key = value = query
            elif self.encoder_decoder_attention:
                if incremental_state is not None and static_kv:
                    key, key_padding_mask = self.share_among_beam(cache, key, key_padding_mask)
                key = value = key.transpose(0, 1)
            else:
                key, value = key.transpose(0, 1), value.transpose(0, 1)
            k, v = self.k_proj(key).unsqueeze(1), self.v_proj(value).unsqueeze(1)
        if incremental_state is None:
            return k, v, key_padding_mask
        k, v = extend_cache(cache, k, v, static_kv)
        key_padding_mask = extend_padding(cache, key_padding_mask, k.size(0), k.size(2), static_kv)
        self._set_input_buffer(incremental_state, cache)
        return k, v, key_padding_mask
