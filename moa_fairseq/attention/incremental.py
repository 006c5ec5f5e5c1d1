"""fairseq's incremental-state protocol, shared by every attention module of this package."""

from typing import Dict, Optional, Tuple

from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor, nn

from moa_fairseq.attention.core import Cache

IncrementalState = Dict[str, Dict[str, Optional[Tensor]]]


_SHARED = "one_row_per_sentence"  # a cache entry that is there or not: rows are sentences, not hypotheses


@with_incremental_state
class IncrementalAttention(nn.Module):
    """An attention module whose keys and values live in fairseq's incremental state while generating.

    Entries: prev_key and prev_value [B, H, S, D] (one head when it is shared), prev_key_padding_mask
    [B, S] or None; B counts hypotheses (sentences × beam), but sentences only in cross-attention once
    fairseq's generator has announced its beam: all hypotheses of a sentence read the same source.
    """

    beam_size = 1
    dropout_module: FairseqDropout  # of the attention weights

    @property
    def attention_dropout(self) -> float:
        """The probability with which this pass drops attention weights."""
        module = self.dropout_module
        return module.p if self.training or module.apply_during_inference else 0.0

    def set_beam_size(self, beam_size: int) -> None:
        """fairseq's generator calls this before it starts."""
        self.beam_size = beam_size

    def _get_input_buffer(self, incremental_state: Optional[IncrementalState]) -> Cache:
        return self.get_incremental_state(incremental_state, "attn_state") or {}

    def _set_input_buffer(
        self, incremental_state: IncrementalState, buffer: Cache
    ) -> Optional[IncrementalState]:
        return self.set_incremental_state(incremental_state, "attn_state", buffer)

    def reorder_incremental_state(
        self, incremental_state: IncrementalState, new_order: Tensor
    ) -> Optional[IncrementalState]:
        """Follow the beams: row i of every cached tensor becomes row new_order[i] (Tensor [B] of int64).

        Keys that a beam shares stay where they are as long as no sentence left the batch.
        """
        buffer = self._get_input_buffer(incremental_state)
        if not buffer:
            return incremental_state
        shared = buffer.get(_SHARED)
        if shared is not None:
            if buffer["prev_key"].size(0) * self.beam_size == new_order.numel():
                return incremental_state
            new_order = new_order[:: self.beam_size] // self.beam_size
        buffer = {
            name: tensor if tensor is None or tensor is shared else tensor.index_select(0, new_order)
            for name, tensor in buffer.items()
        }
        return self._set_input_buffer(incremental_state, buffer)

    def share_among_beam(
        self, cache: Cache, memory: Tensor, padding: Optional[Tensor]
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """The encoder's output [S, B, C] and padding [B, S] once per sentence, if a beam was announced.

        Marks the cache, so that `reorder_incremental_state` knows what its rows stand for.
        """
        if padding is not None and not padding.any():
            padding = None  # fairseq's encoder always hands one on; looked at once for all steps
        if self.beam_size == 1 or memory.size(1) % self.beam_size:
            return memory, padding
        cache[_SHARED] = memory.new_empty(0)
        padding = None if padding is None else padding[:: self.beam_size]
        return memory[:, :: self.beam_size], padding
