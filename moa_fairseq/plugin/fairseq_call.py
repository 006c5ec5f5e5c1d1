"""fairseq's time-first calls of this package's attentions and of its mixture of feed-forwards."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.call import Call, without_padding
from moa_fairseq.layers.kv_cache import KVCache
from moa_fairseq.layers.sdpa import Masks
from moa_fairseq.layers.sigma_moe import SigmaMoE
from moa_fairseq.plugin.forward_context import current_context

IncrementalState = dict[str, Any]


class FairseqCall(Attention):
    """fairseq's `MultiheadAttention.forward` and incremental state, for the attention that is the next base.

    The module keeps the attention's parameters and their names. `with_fairseq_call` makes such classes.

    Args:
        args, options: the arguments of the attention itself.
        encoder_decoder_attention: keys and values are projections of an encoder's output, which the
            hypotheses of a beam share.
    """

    def __init__(self, *args: Any, encoder_decoder_attention: bool = False, **options: Any):
        super().__init__(*args, **options)
        self.encoder_decoder_attention = encoder_decoder_attention

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        need_head_weights: bool = False,
        query_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """fairseq's `forward`. Self-attention also attends to the `carried` inputs of the context.

        Args:
            query: [T, B, C].
            key, value: [S, B, kdim] and [S, B, vdim]; ignored in self-attention; may be None once the keys
                of static_kv are cached.
            key_padding_mask: [B, S], True = padding.
            incremental_state: the state of a generation, which holds the cache; None outside generation.
            need_weights: return the mean of the weights over the heads.
            static_kv: keys and values stay those of the first step.
            attn_mask: [T, S]; floats are added to the scores; bool or integers: True = blocked.
            need_head_weights: return the weights of each head.
            query_padding_mask: [B, T], True = padding, which is kept out of routings and statistics. The
                default is the padding of the context, or key_padding_mask in self-attention.

        Returns:
            The output [T, B, C], unspecified at padding; weights [B, T, S], or [H, B, T, S], or None.

        Raises:
            ValueError: if query_padding_mask has another shape.
        """
        context = current_context()
        size = (query.size(1), query.size(0))
        if query_padding_mask is not None and query_padding_mask.shape != size:
            shape = list(query_padding_mask.shape)
            raise ValueError(f"query_padding_mask is {shape}, not [B, T] = {list(size)}")
        is_causal = attn_mask is not None and attn_mask is context.causal_mask
        if attn_mask is not None and not attn_mask.is_floating_point():
            attn_mask = attn_mask.bool()
        padding = None if key_padding_mask is None else key_padding_mask.bool()
        default = padding if self.self_attention else None
        query_padding = _first_mask((query_padding_mask, context.padding, default), size)
        # Batch first from here on: queries and attention results then change shape without a copy.
        queries = query.transpose(0, 1).contiguous()
        x = without_padding(queries, query_padding)
        cache = self.cache_in(incremental_state)
        if cache is not None and static_kv and cache.length:
            memory = values = padding = None  # the cache has them
        elif self.self_attention:
            memory = x if query_padding is padding else without_padding(queries, padding)
            carried = context.carried
            if carried is not None:
                memory, attn_mask, padding = _after_context(carried, memory, attn_mask, padding)
            values = memory
        else:
            assert key is not None, "no keys are given, and none are cached"
            beam_size = context.beam_size if cache is not None and static_kv else 1
            memory, values, padding = self._source(key, value, padding, cache, beam_size)
        out, weights, routings = self.scaled(
            Call(
                x,
                memory,
                values,
                Masks(attn_mask, padding, is_causal=is_causal, right_padded=context.right_padded),
                query_padding=query_padding,
                keys_from_x=self.self_attention and context.carried is None,
                cache=cache,
                need_weights=need_weights or need_head_weights,
                token_ids=_latest_token_ids(context.token_ids, size),
                draw=context.draw,
            )
        )
        for routing in routings:
            context.record(self, routing)
        if weights is not None:  # [B, H, T, S] → [H, B, T, S] or [B, T, S]
            weights = weights.transpose(0, 1) if need_head_weights else weights.mean(dim=1)
        return out.transpose(0, 1), weights  # no copy: the residual sum reads any layout

    def _source(
        self,
        key: Tensor,
        value: Tensor | None,
        padding: Tensor | None,
        cache: KVCache | None,
        beam_size: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The inputs of cross-attention, batch first: keys, values, padding; one row for a whole beam."""
        memory = key.transpose(0, 1)
        if self.encoder_decoder_attention and cache is not None and beam_size > 1:
            cache.beam_size = beam_size
            memory = memory[::beam_size]
            padding = None if padding is None else padding[::beam_size]
        memory = without_padding(memory, padding)
        if self.encoder_decoder_attention:
            return memory, memory, padding
        assert value is not None, "keys are given without values"
        return memory, without_padding(value.transpose(0, 1), padding), padding

    def cache_in(self, incremental_state: IncrementalState | None) -> KVCache | None:
        """This module's cache, which is empty before the first step; None outside generation."""
        if incremental_state is None:
            return None
        key = f"mixture_attention.{self._instance}"
        if key not in incremental_state:
            incremental_state[key] = self.new_cache()
        cache: KVCache = incremental_state[key]
        return cache

    def _get_input_buffer(self, incremental_state: IncrementalState | None) -> dict[str, Tensor]:
        """fairseq's decoder layer calls this to see whether keys are cached."""
        cache = self.cache_in(incremental_state)
        if cache is None or cache.keys is None:
            return {}
        return {"prev_key": cache.keys}

    def reorder_incremental_state(
        self, incremental_state: IncrementalState | None, new_order: Tensor
    ) -> IncrementalState | None:
        """Follow the beams: row i of everything cached becomes row new_order[i] ([B] of int64)."""
        cache = self.cache_in(incremental_state)
        if cache is not None:
            cache.reorder(new_order)
        return incremental_state


def _first_mask(masks: tuple[Tensor | None, ...], size: tuple[int, int]) -> Tensor | None:
    """The first mask that is not None, as bool; None if it has another size: it belongs to another pass."""
    for mask in masks:
        if mask is not None:
            return mask.bool() if mask.shape == size else None
    return None


def _after_context(
    carried: Tensor, memory: Tensor, mask: Tensor | None, padding: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Put the carried context [M, B, C] before memory, mask and padding: it is visible, and no padding."""
    memory = torch.cat([carried.transpose(0, 1).to(memory.dtype), memory], dim=1)
    width = (carried.size(0), 0)
    mask = None if mask is None else F.pad(mask, width)
    padding = None if padding is None else F.pad(padding, width)
    return memory, mask, padding


def _latest_token_ids(token_ids: Tensor | None, size: tuple[int, int]) -> Tensor | None:
    """The ids of the queries, [B, T]; None if there are no ids, or they belong to another pass."""
    if token_ids is None:
        return None
    latest = token_ids[:, -size[1] :]
    return latest if latest.shape == size else None


def with_fairseq_call(attention: type[Attention]) -> type[FairseqCall]:
    """The subclass of an attention with fairseq's call; the same class at each call of this function."""
    name = attention.__name__
    wrapped: type[FairseqCall] | None = globals().get(name)
    if wrapped is None or attention not in wrapped.__bases__:
        wrapped = type(
            name, (FairseqCall, attention), {"__module__": __name__, "__doc__": attention.__doc__}
        )
        globals()[name] = wrapped  # pickle looks for a module's class here
    return wrapped


class FairseqSigmaMoE(SigmaMoE):
    """`SigmaMoE` in the place of a layer's first feed-forward matrix: [T, B, C] → [T, B, C]."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        context = current_context()
        tgt_len, batch, _ = x.shape
        padding = _first_mask((context.padding,), (batch, tgt_len))
        if padding is not None:
            padding = padding.t()
        out, (routing,) = super().forward(x, padding, with_routing=True)
        context.record(self, routing)
        return out
