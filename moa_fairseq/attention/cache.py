"""fairseq's incremental-state protocol: what an attention remembers between the steps of a generation."""

import itertools
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from moa_fairseq.attention.collector import hypotheses

Cache = Dict[str, Optional[Tensor]]
IncrementalState = Dict[str, Cache]

_instances = itertools.count()
_OF_KEYS = ("prev_key", "prev_value", "prev_key_padding_mask", "prev_key_index")
_SHARED = "beam"  # an entry [beam, 0]: if present, a row of the keys serves all hypotheses of a sentence


class CachedAttention(nn.Module):
    """An attention module whose keys and values live in the incremental state while generating.

    Entries: prev_key and prev_value [B, H, S, D] (one head when it is shared), prev_key_padding_mask
    [B, S] or None, prev_key_index [B, S, K] where keys have experts, and what a family adds, [B, ...]. B is
    the number of hypotheses (sentences × beam). In cross-attention during a beam search the keys' B is the
    number of sentences: all hypotheses of a sentence read the same source.
    """

    def __init__(self) -> None:
        super().__init__()
        self._state_key = f"mixture_attention.{next(_instances)}"

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """A copy (copy.deepcopy, pickle) gets its own entry in the state, hence its own keys and values."""
        super().__setstate__(state)
        self._state_key = f"mixture_attention.{next(_instances)}"

    def cache_in(self, incremental_state: Optional[IncrementalState]) -> Optional[Cache]:
        """This module's part of the state, empty before the first step; None when nothing is generated."""
        if incremental_state is None:
            return None
        return incremental_state.setdefault(self._state_key, {})

    def _get_input_buffer(self, incremental_state: Optional[IncrementalState]) -> Cache:
        """fairseq's decoder layer calls this to see whether keys are cached."""
        return self.cache_in(incremental_state) or {}

    def reorder_incremental_state(
        self, incremental_state: Optional[IncrementalState], new_order: Tensor
    ) -> Optional[IncrementalState]:
        """Follow the beams: row i of every cached tensor becomes row new_order[i] (Tensor [B] of int64).

        Keys that a beam shares stay where they are as long as no sentence left the batch.
        """
        cache = self.cache_in(incremental_state)
        if not cache:
            return incremental_state
        order_of_keys: Optional[Tensor] = new_order
        shared, keys = cache.get(_SHARED), cache.get("prev_key")
        if shared is not None and keys is not None:
            beam = shared.size(0)
            same = keys.size(0) * beam == new_order.numel()
            order_of_keys = None if same else new_order[::beam] // beam
        for name, tensor in cache.items():
            order = order_of_keys if name in _OF_KEYS else new_order
            if tensor is not None and name != _SHARED and order is not None:
                cache[name] = tensor.index_select(0, order)
        return incremental_state

    def share_among_beam(
        self, cache: Cache, memory: Tensor, padding: Optional[Tensor]
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """The encoder's output [B, S, C] and padding [B, S] once per sentence inside a `hypotheses` block.

        Marks the cache, so that `reorder_incremental_state` knows what the keys' rows stand for.
        """
        beam = hypotheses.get()
        if beam == 1:
            return memory, padding
        cache[_SHARED] = memory.new_empty(beam, 0)
        return memory[::beam], None if padding is None else padding[::beam]


def cached_length(cache: Optional[Cache]) -> int:
    """How many positions of keys the cache holds."""
    previous = None if cache is None else cache.get("prev_key")
    return 0 if previous is None else previous.size(2)


def extend_cache(
    cache: Cache, k: Optional[Tensor], v: Optional[Tensor], static: bool, index: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """The keys and values of all steps so far, [B, H, S, D]; the cache is updated in place.

    static: the encoder's keys and values, cached once, are returned as they are. Without new ones, those of
    the cache are returned. index [B, S, K]: the experts of the keys, if they have any.
    """
    keys, values, before = (cache.get(f"prev_{name}") for name in ("key", "value", "key_index"))
    if k is None or v is None or (static and keys is not None):
        assert keys is not None and values is not None, "an attention without keys"
        return keys, values, before
    if keys is not None and values is not None:
        k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
    cache["prev_key"], cache["prev_value"] = k, v
    if index is not None:
        index = index if before is None else torch.cat([before, index], dim=1)
        cache["prev_key_index"] = index
    return k, v, index


def extend_padding(
    cache: Cache, key_padding_mask: Optional[Tensor], batch: int, length: int, static: bool
) -> Optional[Tensor]:
    """The key padding mask [B, S] of all steps so far, S = length; None while nothing is padded.

    A step may come without a mask before or after one with it: missing steps are unpadded.
    """
    previous = cache.get("prev_key_padding_mask")
    if static and "prev_key_padding_mask" in cache:  # the keys and their padding are the same
        return previous
    if previous is not None:
        step = length - previous.size(1)
        if key_padding_mask is None:
            new = previous.new_zeros(batch, step, dtype=torch.bool)
        else:
            new = key_padding_mask.bool()[:, key_padding_mask.size(1) - step :]
        key_padding_mask = torch.cat([previous.bool(), new], dim=1)
    elif key_padding_mask is not None:
        before = key_padding_mask.new_zeros(batch, length - key_padding_mask.size(1), dtype=torch.bool)
        key_padding_mask = torch.cat([before, key_padding_mask.bool()], dim=1)
    cache["prev_key_padding_mask"] = key_padding_mask
    return key_padding_mask
