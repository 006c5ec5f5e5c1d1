"""The inputs of one call of an attention, their checks, and the pass that a family computes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from moa_fairseq.layers.kv_cache import KVCache
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.sdpa import NO_MASKS, Masks, add_blocked
from moa_fairseq.layers.static_cache import StaticCache
from moa_fairseq.layers.torch_compat import autocast_dtype

if TYPE_CHECKING:
    from moa_fairseq.layers.attention import Attention

_NON_CAUSAL = "this attention's gate sees the whole sequence: build it with causal=True"
# Keywords of torch's and fairseq's attention, and their names here
_NAMES_ELSEWHERE = {
    "key": "memory",
    "value": "memory",
    "key_padding_mask": "padding, True = padding",
    "attn_mask": "mask, True = blocked",
    "attention_mask": "padding, True = padding, or mask, True = blocked",
    "is_causal": "causal",
    "incremental_state": "cache=attention.new_cache()",
    "need_weights": "the method `with_weights`",
    "need_head_weights": "the method `with_weights`",
    "query_padding_mask": "query_padding",
}


@dataclass
class Call:
    """One pass through an attention, as a family's `compute` sees it. Inputs are zero at padding."""

    x: Tensor  # the inputs of the queries, [B, T, C]
    memory: Tensor | None  # the inputs of the keys, [B, S, kdim]; None: the cache has the keys
    # The inputs of the values, [B, S, vdim]; if they are the same as those of the keys, the same object
    values: Tensor | None
    masks: Masks
    query_padding: Tensor | None = None  # [B, T] bool
    keys_from_x: bool = False  # whether keys are computed from the tokens of the queries alone
    cache: KVCache | None = None
    need_weights: bool = False
    token_ids: Tensor | None = None  # the ids of the queries' tokens, [B, T] int64
    draw: Any = None  # the `expert_draw.ExpertDraw` of an F step


Computed = tuple[Tensor, Tensor | None, tuple[Routing, ...]]


class Options(TypedDict, total=False):
    """The keywords of a call, which `Attention.forward` describes."""

    padding: Tensor | None
    mask: Tensor | None
    causal: bool
    cache: KVCache | None
    query_padding: Tensor | None
    token_ids: Tensor
    draw: Any


@dataclass
class Inputs:
    """The inputs of a call, which `Attention.forward` describes.

    Args:
        x, memory, padding, mask, causal, cache, query_padding: those of the call.
        more: the other keywords, by name; `Attention.reads` has those that are allowed.
    """

    x: Tensor
    memory: Tensor | None
    padding: Tensor | None
    mask: Tensor | None
    causal: bool
    cache: KVCache | None
    query_padding: Tensor | None
    more: dict[str, Any]

    def call(self, attention: "Attention") -> Call:
        """Check the inputs, and make the pass, with zeros at padding, where the inputs may be NaN.

        Args:
            attention: the attention that is called.

        Raises:
            ValueError, TypeError: for inputs that do not fit, or that the attention would ignore.
        """
        x = self.x
        memory = self.memory
        cache = self.cache
        if cache is not None and not isinstance(cache, KVCache):
            raise ValueError(f"cache is a {type(cache).__name__}: make one with new_cache()")
        if memory is not None and attention.self_attention:
            raise ValueError(
                "this attention was built with self_attention=True and takes no memory: leave memory out"
            )
        keys_from_x = memory is None and (cache is None or not cache.holds_memory)
        if self.more or attention.is_non_causal or attention.window is not None:
            self._check_options(attention)
        self._check_tensors(attention, keys_from_x)
        if cache is not None:
            self._check_cache(attention, cache, keys_from_x)
            if memory is not None:
                memory = _unless_cached(memory, cache)
        # With a single query all keys that are computed from x are its own or earlier
        hides_future = self.causal and not (keys_from_x and x.size(1) == 1)
        is_static = isinstance(cache, StaticCache)  # then keys that are not written yet are hidden
        masks = NO_MASKS
        if hides_future or is_static or self.mask is not None or self.padding is not None:
            masks = self._masks(memory, keys_from_x, hides_future)
        query_padding = self.query_padding
        if keys_from_x and masks.padding is not None:
            query_padding = self._padding_of_x(masks.padding)
        if query_padding is not None:  # saves a Python call
            x = without_padding(x, query_padding)
        if keys_from_x:
            memory = x
        elif memory is not None:
            memory = without_padding(memory, self.padding)
        return Call(
            x,
            memory=memory,
            values=memory,
            masks=masks,
            query_padding=query_padding,
            keys_from_x=keys_from_x,
            cache=cache,
            **self.more,
        )

    def _check_options(self, attention: "Attention") -> None:
        for name in self.more:
            if name not in attention.reads:
                raise TypeError(_unread(attention, name))
        shape = self.x.shape[:2]
        token_ids = self.more.get("token_ids")
        if token_ids is not None and token_ids.shape != shape:
            raise ValueError(f"token_ids is {list(token_ids.shape)}, not [B, T] = {list(shape)}")
        if self.causal and attention.is_non_causal:
            raise ValueError(_NON_CAUSAL)
        if (
            attention.window is not None
            and not self.causal
            and (self.cache is None or shape[1] > 1)
        ):
            raise ValueError("this attention was built with a window: give causal=True")

    def _check_tensors(self, attention: "Attention", keys_from_x: bool) -> None:
        """Check x, memory and query_padding."""
        x = self.x
        memory = self.memory
        width = attention.embed_dim
        if x.dim() != 3 or x.size(2) != width:
            raise ValueError(f"x is {list(x.shape)}, not [B, T, C] with C = {width}")
        k_proj = getattr(attention, attention.memory_projections[0], None)
        weight = getattr(k_proj, "weight", None)  # in a quantised layer it is a method
        dtype = weight.dtype if isinstance(weight, Tensor) and weight.is_floating_point() else None
        if x.dtype != dtype:
            _check_dtype("x", x, dtype)
        if keys_from_x and _memory_width(attention, k_proj, x) != width:
            raise ValueError(
                "this attention was built with kdim or vdim for a memory: give memory as well"
            )
        if memory is not None:
            self._check_memory(memory, _memory_width(attention, k_proj, memory))
            if memory.dtype != dtype:
                _check_dtype("memory", memory, dtype)
        if self.query_padding is not None:
            if keys_from_x:
                raise ValueError(
                    "query_padding is for cross-attention; here padding is the padding of x: give padding"
                )
            _check_mask("query_padding", self.query_padding, [x.shape[:2]])

    def _check_memory(self, memory: Tensor, kdim: int) -> None:
        rows = self.x.size(0)
        if self.cache is not None:
            rows //= self.cache.beam_size
        if memory.dim() != 3 or memory.size(0) != rows or memory.size(2) != kdim:
            raise ValueError(
                f"memory is {list(memory.shape)}, not [B, S, kdim] with B = {rows} and kdim = {kdim}"
            )

    def _check_cache(self, attention: "Attention", cache: KVCache, keys_from_x: bool) -> None:
        """Refuse a cache of another attention or batch, and queries that would see later keys."""
        x = self.x
        if cache.owner != attention._instance:
            raise ValueError(
                "cache was made by another attention: give each layer its own cache (new_cache())"
            )
        if attention.is_non_causal:
            raise ValueError(_NON_CAUSAL)
        if cache.rows not in (None, x.size(0)):
            raise ValueError(
                f"cache holds {cache.rows} sequences, but x is {list(x.shape)}: reorder the cache, or make a "
                "new one"
            )
        if keys_from_x and not self.causal and self.mask is None and x.size(1) > 1:
            raise ValueError(
                "x has several positions, and during generation earlier positions must not see later ones: "
                "give causal=True or a mask"
            )

    def _masks(self, memory: Tensor | None, keys_from_x: bool, hides_future: bool) -> Masks:
        """Check the masks of the call, and complete them.

        Args:
            memory: the inputs of the keys in this call; None: x, or the cache has the keys.
            keys_from_x: whether keys are computed from x instead of a memory.
            hides_future: whether queries may not see later keys.
        """
        mask = self.mask
        cache = self.cache
        device = self.x.device
        queries = self.x.size(1)
        cached = 0 if cache is None else cache.length
        if isinstance(cache, StaticCache):
            keys = cache.max_length
        elif memory is not None:
            keys = memory.size(1)
        else:
            keys = cached + queries if keys_from_x else cached
        if self.padding is not None:
            self._check_padding(self.padding, keys, keys_from_x)
        if mask is not None:
            lengths = self._accepted_lengths(mask, keys)
            shapes = [*itertools.product([queries], lengths)]
            by_row = itertools.product([self.x.size(0)], [queries], lengths)
            _check_mask("mask", mask, [*shapes, *by_row], additive=True)
            if mask.size(-1) < keys:  # it has no columns for later positions of a static cache
                mask = F.pad(mask, (0, keys - mask.size(-1)))
        if isinstance(cache, StaticCache):
            hidden = cache.hidden_positions(queries, self.causal, device)
            return Masks(add_blocked(mask, hidden), self.padding)
        is_causal = self.causal and mask is None and keys_from_x and not cached
        if hides_future:
            first = 1 + (cached if keys_from_x else 0)  # the first key that query 0 may not see
            later = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(first)
            mask = add_blocked(mask, later)
        return Masks(mask, self.padding, is_causal)

    def _check_padding(self, padding: Tensor, keys: int, keys_from_x: bool) -> None:
        """Check the padding of the `keys` keys, those of the cache included."""
        rows, queries, _ = self.x.shape
        lengths = [keys]
        if keys_from_x:
            lengths = [queries, *self._accepted_lengths(padding, keys)]
        elif self.cache is not None:
            rows //= self.cache.beam_size
        _check_mask("padding", padding, [*itertools.product([rows], lengths)])

    def _accepted_lengths(self, mask: Tensor, keys: int) -> list[int]:
        """The S that a mask or padding may have: all positions so far, or the size of a static cache."""
        if isinstance(self.cache, StaticCache):
            return sorted(self.cache.accepted_lengths(self.x.size(1), mask.size(-1)))
        return [keys]

    def _padding_of_x(self, padding: Tensor) -> Tensor:
        """The columns of x, the latest positions, in the padding of its keys [B, S]: [B, T]."""
        if isinstance(self.cache, StaticCache):
            return self.cache.padding_of_call(padding, self.x.size(1))
        return padding[:, padding.size(1) - self.x.size(1) :]


def _unless_cached(memory: Tensor, cache: KVCache) -> Tensor | None:
    """The memory, which an empty cache records; None if the cache has the keys of this memory."""
    if cache.max_length is not None:
        raise ValueError("the keys of a memory do not grow: take new_cache() without max_length")
    if not cache.length:
        cache.of_memory(memory)
        return memory
    if not cache.is_of(memory):
        raise ValueError(
            "the cache holds keys of x or of another memory: make a new cache for this memory"
        )
    return None


def _memory_width(attention: "Attention", k_proj: Any, source: Tensor) -> int:
    """The width that the projections of keys and values take; that of the source if they take any."""
    v_proj = getattr(attention, attention.memory_projections[1], None)
    widths: list[Any] = []
    for layer in (k_proj, v_proj):
        # Linear has `in_features`, ExpertLinear `d_in`; other layers take any width
        width = getattr(layer, "in_features", None) or getattr(layer, "d_in", source.size(-1))
        widths.append(width)
    kdim, vdim = widths
    if kdim != vdim:
        raise ValueError(
            f"keys (width {kdim}) and values (width {vdim}) need two inputs, but this call gives one memory: "
            "build the layer with equal kdim and vdim"
        )
    return int(kdim)


def _unread(attention: "Attention", name: str) -> str:
    alias = f" It is {_NAMES_ELSEWHERE[name]} here." if name in _NAMES_ELSEWHERE else ""
    takes = "x, memory, padding, mask, causal, cache, query_padding, with_routing"
    names = ", ".join([takes, *sorted(attention.reads)])
    return f"{type(attention).__name__}'s call does not read {name}.{alias} It takes {names}."


def _check_dtype(name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
    """Refuse a tensor that does not have the attention's dtype, unless autocast converts it."""
    follows = dtype is None or autocast_dtype(tensor.device.type) is not None
    if not (tensor.is_floating_point() and follows):
        raise ValueError(
            f"{name} is {tensor.dtype}, but the attention is {dtype or 'floating point'}: convert one of "
            "the two"
        )


def _check_mask(
    name: str, mask: Tensor, shapes: Sequence[tuple[int, ...]], additive: bool = False
) -> None:
    if mask.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(f"{name} is {list(mask.shape)}, not {expected}")
    if mask.dtype != torch.bool and not (additive and mask.is_floating_point()):
        meaning = "True = blocked, or additive float" if additive else "True = padding"
        raise ValueError(f"{name} is {mask.dtype}: give torch.bool, {meaning}")


def without_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """x with zeros at padding, where x may be NaN, which a weight of zero would not remove from a sum.

    Args:
        x: [B, T, C].
        padding: [B, T] bool, True = padding, or longer, of which the last T are read; None: x is returned.
    """
    if padding is None:
        return x
    return x.masked_fill(padding[:, padding.size(1) - x.size(1) :].unsqueeze(-1), 0.0)
