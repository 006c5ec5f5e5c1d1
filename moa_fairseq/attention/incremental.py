"""fairseq's incremental-state protocol, shared by every attention module of this package."""

from typing import Dict, Optional

from fairseq.incremental_decoding_utils import with_incremental_state
from torch import Tensor, nn

from moa_fairseq.attention.core import Cache

IncrementalState = Dict[str, Dict[str, Optional[Tensor]]]


@with_incremental_state
class IncrementalAttention(nn.Module):
    """An attention module whose keys and values live in fairseq's incremental state while generating.

    Entries: prev_key and prev_value [B, H, S, D] (one head when it is shared), prev_key_padding_mask
    [B, S] or None; B counts hypotheses (sentences × beam).
    """

    def _get_input_buffer(self, incremental_state: Optional[IncrementalState]) -> Cache:
        return self.get_incremental_state(incremental_state, "attn_state") or {}

    def _set_input_buffer(
        self, incremental_state: IncrementalState, buffer: Cache
    ) -> Optional[IncrementalState]:
        return self.set_incremental_state(incremental_state, "attn_state", buffer)

    def reorder_incremental_state(
        self, incremental_state: IncrementalState, new_order: Tensor
    ) -> Optional[IncrementalState]:
        """Follow the beams: row i of every cached tensor becomes row new_order[i]."""
        buffer = self._get_input_buffer(incremental_state)
        if buffer:
            buffer = {
                name: None if tensor is None else tensor.index_select(0, new_order)
                for name, tensor in buffer.items()
            }
            incremental_state = self._set_input_buffer(incremental_state, buffer)
        return incremental_state
