"""The inputs of one call of an attention, their checks, and the pass that a family computes."""

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
_ELSEWHERE = {
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
    same_tokens: bool = False  # whether keys are computed from the tokens of the queries alone
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

    @classmethod
    def of(cls, x: Tensor, memory: Tensor | None, given: dict[str, Any]) -> "Inputs":
        """Make the inputs from a dictionary of keywords.

        Args:
            x, memory: those of the call.
            given: the keywords of the call; those that every attention reads are removed from it.
        """
        return cls(
            x,
            memory,
            padding=given.pop("padding", None),
            mask=given.pop("mask", None),
            causal=given.pop("causal", False),
            cache=given.pop("cache", None),
            query_padding=given.pop("query_padding", None),
            more=given,
        )

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
        keys_from_x = memory is None and not (cache is not None and cache.holds_memory)
        if self.more or attention.is_non_causal or attention.window is not None:
            self._check_options(attention)
        self._check_tensors(attention, keys_from_x)
        if cache is not None and self._check_cache(attention, cache):
            memory = None
        query_padding = self.query_padding
        hides_future = self.causal and not (
            keys_from_x and x.size(1) == 1
        )  # 1: the latest position
        masks = NO_MASKS
        if (
            self.mask is not None
            or self.padding is not None
            or hides_future
            or isinstance(cache, StaticCache)
        ):
            masks = self._masks(memory, keys_from_x, hides_future)
        if keys_from_x and masks.padding is not None:
            if isinstance(cache, StaticCache):
                query_padding = cache.padding_of_call(masks.padding, x.size(1))
            else:
                query_padding = masks.padding[:, masks.padding.size(1) - x.size(1) :]
        if query_padding is not None:
            x = without_padding(x, query_padding)
        if keys_from_x:
            memory = x
        elif memory is not None:
            memory = without_padding(memory, self.padding)
        return Call(x, memory, memory, masks, query_padding, keys_from_x, cache, **self.more)

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
        """Check widths, dtypes and batches of x and memory, and the padding of x in cross-attention."""
        x = self.x
        memory = self.memory
        width = attention.embed_dim
        if x.dim() != 3 or x.size(2) != width:
            raise ValueError(f"x is {list(x.shape)}, not [B, T, C] with C = {width}")
        keys, values = attention.memory_projections
        k_proj = getattr(attention, keys, None)
        weight = getattr(k_proj, "weight", None)  # in a quantised layer it is a method
        dtype = weight.dtype if isinstance(weight, Tensor) and weight.is_floating_point() else None
        if x.dtype != dtype:
            _check_dtype("x", x, dtype)
        source = x if keys_from_x else memory
        if source is not None:
            # Linear has `in_features`, ExpertLinear `d_in`; other layers take any width. Not a function, to
            # save Python calls
            v_proj = getattr(attention, values, None)
            default = source.size(-1)
            kdim = getattr(k_proj, "in_features", None) or getattr(k_proj, "d_in", default)
            vdim = getattr(v_proj, "in_features", None) or getattr(v_proj, "d_in", default)
            if kdim != vdim:
                raise ValueError(
                    f"keys (width {kdim}) and values (width {vdim}) need two inputs, but this call gives one "
                    "memory: build the layer with equal kdim and vdim"
                )
            if keys_from_x and kdim != width:
                raise ValueError(
                    "this attention was built with kdim or vdim for a memory: give memory as well"
                )
        if memory is not None:
            rows = x.size(0) if self.cache is None else x.size(0) // self.cache.beam_size
            if memory.dim() != 3 or memory.size(0) != rows or memory.size(2) != kdim:
                raise ValueError(
                    f"memory is {list(memory.shape)}, not [B, S, kdim] with B = {rows} and kdim = {kdim}"
                )
            if memory.dtype != dtype:
                _check_dtype("memory", memory, dtype)
        if self.query_padding is not None:
            if keys_from_x:
                raise ValueError(
                    "query_padding is for cross-attention; here padding is the padding of x: give padding"
                )
            _check_mask("query_padding", self.query_padding, [x.shape[:2]])

    def _check_cache(self, attention: "Attention", cache: KVCache) -> bool:
        """Check the cache, or record a new memory in it. Returns whether it has the keys of the memory."""
        x = self.x
        memory = self.memory
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
        if memory is None:
            if not (self.causal or cache.holds_memory or self.mask is not None or x.size(1) < 2):
                raise ValueError(
                    "x has several positions, and during generation earlier positions must not see later "
                    "ones: give causal=True or a mask"
                )
            return False
        if cache.max_length is not None:
            raise ValueError(
                "the keys of a memory do not grow: take new_cache() without max_length"
            )
        if not cache.length:
            cache.of_memory(memory)
            return False
        if not cache.is_of(memory):
            raise ValueError(
                "the cache holds keys of x or of another memory: make a new cache for this memory"
            )
        return True

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
        elif keys_from_x:
            keys = cached + queries
        else:
            keys = cached if memory is None else memory.size(1)
        if self.padding is not None:
            self._check_padding(self.padding, keys, keys_from_x)
        if mask is not None:
            shapes = [(queries, length) for length in self._lengths(keys, mask)]
            by_batch = [(self.x.size(0), *shape) for shape in shapes]
            _check_mask("mask", mask, [*shapes, *by_batch], True)
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
        batch, queries, _ = self.x.shape
        if keys_from_x:
            shapes = [(batch, length) for length in (queries, *self._lengths(keys, padding))]
        else:
            shapes = [(batch if self.cache is None else batch // self.cache.beam_size, keys)]
        _check_mask("padding", padding, shapes)

    def _lengths(self, keys: int, given: Tensor) -> list[int]:
        """The possible S of a mask or of padding: all positions so far; with a static cache its size, too."""
        if isinstance(self.cache, StaticCache):
            return sorted(self.cache.accepted_lengths(self.x.size(1), given.size(-1)))
        return [keys]


def _unread(attention: "Attention", name: str) -> str:
    alias = f" It is {_ELSEWHERE[name]} here." if name in _ELSEWHERE else ""
    takes = ["x", "memory", "padding", "mask", "causal", "cache", "query_padding", "with_routing"]
    names = ", ".join([*takes, *sorted(attention.reads)])
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
