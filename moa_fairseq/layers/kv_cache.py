"""The keys and values that an attention keeps between the steps of a generation."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The tensors that have a row for each sequence, and their axis of positions
_OF_KEYS = (("keys", 2), ("values", 2), ("padding", 1), ("key_experts", 1))


class KVCache:
    """The keys and values of the positions so far.

    `Attention.new_cache` makes a cache; a call extends it. In cross-attention the cache holds the memory's
    keys and values, which the first call computes. In a beam search it may have one row for each sentence,
    which beam_size neighbouring rows of queries share.

    Args:
        owner: the number of the attention that made the cache.
        can_trim: whether every cached number belongs to one position, so that positions can be removed.
        needed: the number of latest positions that the next query sees; None: all.
    """

    def __init__(self, owner: int = 0, can_trim: bool = True, needed: int | None = None):
        self.owner = owner
        self.can_trim = can_trim
        self.needed = needed
        self.dropped = 0  # the number of positions that the window has left behind
        self.max_length: int | None = None  # of a `StaticCache`; None: the cache grows
        self.keys: Tensor | None = None  # [B, G, S, D]
        self.values: Tensor | None = None  # [B, G, S, D]
        self.padding: Tensor | None = None  # [B, S] bool, True = padding; None: no padding so far
        self.key_experts: Tensor | None = None  # [B, S, K], the experts that made the keys, if any
        self.sums: dict[str, Tensor] = {}  # other state of a family, by name, [B, …]
        self.beam_size = 1
        self.holds_memory = False  # whether the keys are those of a memory
        self._version = 0  # how often the memory had been written to, as torch counts
        self._memory: weakref.ref[Tensor] | None = None

    @property
    def rows(self) -> int | None:
        """B, the number of rows of queries; None before the first call."""
        return None if self.keys is None else self.keys.size(0) * self.beam_size

    @property
    def length(self) -> Any:
        """The number of positions so far, those that a window has left behind included."""
        if self.keys is None:
            return 0
        return self.dropped + self.keys.size(2)

    def of_memory(self, memory: Tensor) -> None:
        """Record the memory from which the keys are computed."""
        self.holds_memory = True
        self._memory = weakref.ref(memory)
        self._version = _version(memory)

    def is_of(self, memory: Tensor) -> bool:
        """Whether the keys were computed from this tensor, and it has not been written to since."""
        is_same = self._memory is not None and self._memory() is memory
        return is_same and self._version == _version(memory)

    def slide(self) -> None:
        """Drop all but the latest `needed` positions, because the next query sees no others."""
        assert self.needed is not None
        if self.keys is None:
            return
        surplus = self.keys.size(2) - self.needed
        if surplus > 0:
            self._of_keys(
                lambda tensor, axis: tensor.narrow(axis, surplus, tensor.size(axis) - surplus)
            )
            self.dropped += surplus

    def extend(self, k: Tensor, v: Tensor, experts: Tensor | None = None) -> None:
        """Append keys and values.

        Args:
            k, v: keys and values of the step, [B, G, S', D], with their positions applied.
            experts: the experts that made them, [B, S', K] int64, if `Attention.keys_by_expert`.
        """
        if self.keys is None or self.values is None:
            self.keys = k
            self.values = v
            self.key_experts = experts
            return
        self.keys = torch.cat([self.keys, k], dim=2)
        self.values = torch.cat([self.values, v], dim=2)
        if experts is not None and self.key_experts is not None:
            self.key_experts = torch.cat([self.key_experts, experts], dim=1)

    def extend_padding(self, padding: Tensor | None) -> Tensor | None:
        """Append the padding of a step, after `extend`.

        Args:
            padding: of the step's positions, or of all positions so far; None: the step has no padding.
                Earlier or later steps may differ in this. What was padding in an earlier step stays padding,
                because its keys were computed from zeros.

        Returns:
            The padding of all positions, [B, S] bool, True = padding; None while no step had padding.
        """
        if self.keys is None:
            return padding
        batch = self.keys.size(0)
        length = self.keys.size(2)
        cached_padding = self.padding
        if padding is not None and padding.size(1) >= length:
            padding = padding[:, padding.size(1) - length :]
            if cached_padding is not None:
                padding = padding | F.pad(cached_padding, (0, length - cached_padding.size(1)))
        elif padding is not None:
            before = length - padding.size(1)
            if cached_padding is None:
                earlier = padding.new_zeros(batch, before)
            else:
                earlier = cached_padding[:, :before]
            padding = torch.cat([earlier, padding], dim=1)
        elif cached_padding is not None:
            padding = torch.cat(
                [cached_padding, cached_padding.new_zeros(batch, length - cached_padding.size(1))],
                dim=1,
            )
        self.padding = padding
        return padding

    def reorder(self, order: Tensor) -> None:
        """Follow the hypotheses of a beam: replace row i of every tensor by its row order[i].

        Keys that the hypotheses of a sentence share are not moved until a sentence is finished.

        Args:
            order: rows of hypotheses, [B'] int64; B' is less than B once sentences are finished.
        """
        if self.sums:
            self.sums = {name: tensor.index_select(0, order) for name, tensor in self.sums.items()}
        if self.keys is not None and self.beam_size > 1:
            if self.keys.size(0) * self.beam_size == order.numel():
                return
            order = order[:: self.beam_size] // self.beam_size
        for name, _ in _OF_KEYS:  # a loop instead of `_of_keys`, to save Python calls in each step
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, order))

    def trim(self, length: int) -> None:
        """Forget all positions but the first `length`.

        Args:
            length: the number of positions that stay, from 0 to S.

        Raises:
            ValueError: for a length outside this range; if the next query would see a position that a window
                has left behind; and if the cache has a running sum over positions (MAE's gate).
        """
        if not self.can_trim:
            raise ValueError(
                "this attention keeps a running sum over positions, so its cache cannot be trimmed"
            )
        if not 0 <= length <= self.length:
            raise ValueError(
                f"length {length} must be between 0 and the {self.length} positions in the cache"
            )
        remaining = length - self.dropped
        if self.needed is not None and self.dropped and remaining < self.needed:
            raise ValueError(
                f"length {length} is too short: this attention has a window, and its cache has dropped the "
                f"first {self.dropped} positions, some of which the next query would see"
            )
        self._of_keys(lambda tensor, axis: tensor.narrow(axis, 0, remaining))

    def _of_keys(self, change: Callable[[Tensor, int], Tensor]) -> None:
        """Replace every tensor that has positions by change(tensor, axis of positions)."""
        for name, axis in _OF_KEYS:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor, axis))

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors in the cache."""
        tensors = (self.keys, self.values, self.padding, self.key_experts, *self.sums.values())
        return tuple(tensor for tensor in tensors if tensor is not None)


def _version(tensor: Tensor) -> int:
    """How often the tensor has been written to, as torch counts; 0 in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
