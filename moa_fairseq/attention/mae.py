"""MAE, a mixture of attentive experts (arXiv 2005.06537): experts are the heads but t, weighted by a gate."""

import itertools
import math
from typing import Optional, Tuple

import torch
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor, nn

from moa_fairseq.attention.collector import padding_of_queries, record
from moa_fairseq.attention.core import Cache, attend, extend_cache, extend_padding
from moa_fairseq.attention.expert_draw import current_draw
from moa_fairseq.attention.incremental import IncrementalAttention, IncrementalState
from moa_fairseq.attention.input_mean import running_mean, sequence_mean
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.attention.sequence_gate import NORMS, SequenceGate
from moa_fairseq.attention.single_expert import EVALUATIONS, MIXTURE, TOP_EXPERT, single_expert
from moa_fairseq.errors import UserError

GATES = ("learned", "uniform")


class MixtureOfAttentiveExperts(IncrementalAttention):
    """Σ_i g_i(X; φ) · f_i(X; θ) (MAE Eq. 6), a drop-in for fairseq's attention with the same parameters.

    Expert i leaves out a set D_i of t = dropped_heads of the h heads: f_i = h/(h−t) · Σ_{j ∉ D_i} H_j
    (Eq. 5 for t = 1: MAE-7 of 8 heads; t = 2: the 28 pairs of MAE-6). No expert is ever built: the sum
    over experts is a rescaling of head j by h/(h−t) · (1 − Σ_{i: j ∈ D_i} g_i) before the output
    projection, whose bias belongs to no expert. Inside of `drawing_experts` (an F step) g is the one-hot
    vector of an expert drawn from it, and t heads are zeroed: one expert per sequence where one gate sees
    the sequence, and one that can change along it where the gate is causal (see `ExpertDraw.choose`).

    gate: "learned" (a SequenceGate over the mean of the queries' inputs), or "uniform" (g = 1/E; mixing
    is then plain dense attention). causal: the gate at a position sees the inputs up to it only, the
    latest gate_window of them; it is for decoders, in self- and cross-attention, where queries are a
    translation's tokens. Otherwise one gate per sequence sees all of its tokens.
    gate_norm: "earlier" or "batch" (see GateNorm), by which statistics the gate's input is normalised
    while the gate learns; a causal gate takes "earlier" always.
    evaluate_with, evaluate_seed: outside of training, a single expert in the mixture's place (see
    `single_expert`). Raises UserError for an impossible number of heads or dropped heads.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropped_heads: int = 1,
        gate: str = "learned",
        kdim: Optional[int] = None,
        vdim: Optional[int] = None,
        dropout: float = 0.0,
        bias: bool = True,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        causal: bool = False,
        gate_window: Optional[int] = None,
        gate_hidden_dim: int = 256,
        gate_dropout: float = 0.1,
        gate_norm: str = "earlier",
        evaluate_with: str = MIXTURE,
        evaluate_seed: int = 1,
    ):
        super().__init__()
        _check_sizes(embed_dim, num_heads, dropped_heads, gate_window)
        _check_gate(gate, gate_norm)
        _check_evaluation(evaluate_with, gate)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention
        self.causal, self.gate_window = causal, gate_window
        self.evaluate_with, self.evaluate_seed = evaluate_with, evaluate_seed
        self.name = ""  # the path in the model, set when a model is built: "encoder.layers.0.self_attn"
        self.dropout_module = FairseqDropout(dropout, module_name=self.__class__.__name__)
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(vdim or embed_dim, embed_dim, bias=bias)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        subsets = list(itertools.combinations(range(num_heads), dropped_heads))
        dropped = torch.zeros(len(subsets), num_heads)
        for expert, heads in enumerate(subsets):
            dropped[expert, list(heads)] = 1.0
        self.num_experts, self.scale = len(subsets), num_heads / (num_heads - dropped_heads)
        self.register_buffer("dropped", dropped, persistent=False)  # [E, h], row i: D_i
        self.gate = None
        if gate == "learned":
            norm = "earlier" if causal else gate_norm  # a causal gate must not hear of later positions
            self.gate = SequenceGate(embed_dim, self.num_experts, gate_hidden_dim, gate_dropout, norm)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The projections as in fairseq's attention; the gate initialises itself."""
        same = self.k_proj.in_features == self.v_proj.in_features == self.embed_dim
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2) if same else 1.0)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

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
        or bool. query_padding_mask [B, T] keeps padding out of the gate's means and statistics; it
        defaults to what `query_padding` declared, or to key_padding_mask in self-attention.
        Returns (output [T, B, C], weights): weights is None, [B, T, S] averaged over the heads
        (need_weights), or [h, B, T, S] (need_head_weights); heads are not rescaled in them.
        """
        cache = None if incremental_state is None else self._get_input_buffer(incremental_state)
        own_keys = key_padding_mask if self.self_attention else None
        padding = padding_of_queries(query_padding_mask, own_keys, query.size(1), query.size(0))
        head_weight = self._head_weights(query, padding, cache)

        q = self._split(self.q_proj(query))
        k, v, key_padding_mask = self._keys_and_values(query, key, value, key_padding_mask, cache, static_kv)
        if cache is not None:
            self._set_input_buffer(incremental_state, cache)
        heads, weights = attend(
            q,
            k,
            v,
            attn_mask,
            key_padding_mask,
            self.attention_dropout,
            need_weights or need_head_weights,
        )
        heads = heads.permute(2, 0, 1, 3) * head_weight.to(heads.dtype).unsqueeze(-1)
        out = self.out_proj(heads.reshape(query.shape))
        if weights is not None:
            weights = weights.transpose(0, 1) if need_head_weights else weights.mean(dim=1)
        return out, weights

    def _head_weights(self, query: Tensor, padding: Optional[Tensor], cache: Optional[Cache]) -> Tensor:
        """What head j is multiplied by: [T or 1, B, h], float32 or wider."""
        draw = current_draw() if self.training else None
        if draw is None:
            probs, logits, real = self._responsibilities(query, padding, cache)
            chosen = None if self.training else self._single_expert(probs)
        else:
            with torch.no_grad():
                probs, logits, real = self._responsibilities(query, padding, cache)
                chosen = draw.choose(self.name, probs)
        if chosen is None:
            index = torch.arange(self.num_experts, device=probs.device).expand(probs[..., 0].numel(), -1)
            gate, dropped = probs.flatten(0, 1), probs @ self.dropped.to(probs.dtype)
        else:
            index = chosen.reshape(-1, 1)
            gate, dropped = torch.ones_like(index, dtype=probs.dtype), self.dropped[chosen].to(probs.dtype)
        no_row = None if real is None else ~real
        if no_row is not None:
            gate = gate.masked_fill(no_row.unsqueeze(-1), 0.0)
        probs, logits = probs.flatten(0, 1), logits.flatten(0, 1)
        record(self.name, RoutingDecision(index, gate, probs, logits, no_row, time_first=True))
        return self.scale * (1.0 - dropped)

    def _single_expert(self, probs: Tensor) -> Optional[Tensor]:
        """What takes the mixture's place in evaluation: expert indices for probs [..., E], or None."""
        if self.evaluate_with == MIXTURE:
            return None
        return single_expert(self.evaluate_with, probs, self.name, self.evaluate_seed)

    def _responsibilities(
        self, query: Tensor, padding: Optional[Tensor], cache: Optional[Cache]
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """g and its logits, [T, B, E] for a causal gate and [1, B, E] for others; which rows are real."""
        tgt_len, batch, width = query.shape
        if self.gate is None:
            logits = self.dropped.new_zeros(1, batch, self.num_experts)
            return torch.softmax(logits, -1), logits, None if padding is None else ~padding.all(1)
        if self.causal:
            mean, length = running_mean(query, padding, self.gate_window, cache), tgt_len
            real = None if padding is None else ~padding.t().reshape(-1)
        else:
            mean, length = sequence_mean(query, padding), 1
            real = None if padding is None else ~padding.all(1)
        probs, logits = self.gate(mean.reshape(-1, width), real)
        shape = (length, batch, self.num_experts)
        return probs.view(shape), logits.view(shape), real

    def _keys_and_values(
        self,
        query: Tensor,
        key: Optional[Tensor],
        value: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        cache: Optional[Cache],
        static_kv: bool,
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """All heads' keys and values [B, h, S, D] and their padding [B, S], through the cache."""
        k = v = None
        if not (static_kv and cache is not None and cache.get("prev_key") is not None):
            if self.self_attention:
                key = value = query
            elif self.encoder_decoder_attention:
                value = key
            k, v = self._split(self.k_proj(key)), self._split(self.v_proj(value))
        if cache is None:
            return k, v, key_padding_mask
        k, v = extend_cache(cache, k, v, static_kv)
        key_padding_mask = extend_padding(cache, key_padding_mask, k.size(0), k.size(2), static_kv)
        return k, v, key_padding_mask

    def _split(self, x: Tensor) -> Tensor:
        """[T, B, C] → [B, h, T, D]"""
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).permute(1, 2, 0, 3)


def _check_sizes(embed_dim: int, num_heads: int, dropped_heads: int, gate_window: Optional[int]) -> None:
    if num_heads < 2 or embed_dim % num_heads:
        raise UserError(
            f"{num_heads} attention heads cannot share a width of {embed_dim}: the width must be a multiple "
            f"of the heads, and a mixture of attentive experts needs two or more."
        )
    if not 1 <= dropped_heads < num_heads:
        raise UserError(
            f"--mae-dropped-heads {dropped_heads} must lie between 1 and {num_heads - 1}: "
            f"an expert leaves out some of the {num_heads} attention heads, but not all."
        )
    if gate_window is not None and gate_window < 1:
        raise UserError(f"--gate-window {gate_window}: the gate sees at least the current input.")


def _check_gate(gate: str, gate_norm: str) -> None:
    if gate not in GATES:
        raise UserError(f"--mae-gate {gate} is unknown: choose one of {', '.join(GATES)}.")
    if gate_norm not in NORMS:
        raise UserError(f"--gate-norm {gate_norm} is unknown: choose one of {', '.join(NORMS)}.")


def _check_evaluation(evaluate_with: str, gate: str) -> None:
    if evaluate_with not in EVALUATIONS:
        raise UserError(
            f"--mae-evaluate-with {evaluate_with} is unknown: choose one of {', '.join(EVALUATIONS)}."
        )
    if evaluate_with == TOP_EXPERT and gate == "uniform":
        raise UserError(
            f"--mae-evaluate-with {TOP_EXPERT} needs a gate that prefers experts, and a uniform one weights "
            "all alike: choose random-expert."
        )
