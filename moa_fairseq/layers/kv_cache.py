"""What an attention remembers between the steps of a generation."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# What has a row for each sentence of the keys, with the axis of its positions
_OF_KEYS = (("keys", 2), ("values", 2), ("padding", 1), ("key_experts", 1))


class KVCache:
    """Keys and values of the positions so far. `Attention.new_cache` makes one; a call extends it.

    In cross-attention it holds the memory's keys and values, which the first call makes. During a beam search
    their rows may be sentences, each of which serves beam_size neighbouring rows of queries.

    Args:
        owner: which attention made it.
        can_trim: whether everything that it keeps belongs to single positions.
        needed: how many of the latest positions the next query sees; None: all.
    """

    def __init__(self, owner: int = 0, can_trim: bool = True, needed: int | None = None):
        self.owner = owner
        self.can_trim = can_trim
        self.needed = needed
        self.dropped = 0  # positions before those that it holds
        self.max_length: int | None = None  # of a `StaticCache`
        self.keys: Tensor | None = None  # [B, G, S, D]
        self.values: Tensor | None = None  # [B, G, S, D]
        self.padding: Tensor | None = None  # [B, S] bool, True = padding; None while there is none
        self.key_experts: Tensor | None = None  # [B, S, K], where keys have experts
        self.sums: dict[str, Tensor] = {}  # what else a family keeps, [B, …]
        self.beam_size = 1
        self.holds_memory = False  # the keys are of cross-attention
        self._version = 0  # of the memory, by torch's count of writes
        self._memory: weakref.ref[Tensor] | None = None

    @property
    def rows(self) -> int | None:
        """For how many rows of queries it is, B; None while that is open."""
        return None if self.keys is None else self.keys.size(0) * self.beam_size

    @property
    def length(self) -> Any:
        """How many positions there have been, S, with those that it has dropped."""
        if self.keys is None:
            return 0
        return self.dropped + self.keys.size(2)

    def of_memory(self, memory: Tensor) -> None:
        """Note that the keys are made of a memory."""
        self.holds_memory = True
        self._memory = weakref.ref(memory)
        self._version = _version(memory)

    def is_of(self, memory: Tensor) -> bool:
        """Whether the keys were made of this very tensor, which has not been written to since."""
        is_same = self._memory is not None and self._memory() is memory
        return is_same and self._version == _version(memory)

    def slide(self) -> None:
        """Drop the positions that the next query does not see, where it sees `needed`."""
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
        """Append keys and values, and the experts that made them, if any did.

        Args:
            k, v: those of the step, [B, G, S', D], at their positions already.
            experts: [B, S', K] int64, for `Attention.keys_by_expert`.
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
        """The padding [B, S] of all positions, with those of the latest step, whose keys are here already.

        Args:
            padding: of the step's positions, or of all so far; None where the step has no padding. It may
                come before or after steps without one. What was padding in an earlier step stays padding:
                its keys are made of zeros.

        Returns:
            [B, S] bool, True = padding; None while no step had one.
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
        """Follow the hypotheses of a beam: row i of everything becomes row order[i].

        Keys that the hypotheses of a sentence share stay where they are as long as no sentence left.

        Args:
            order: [B'] int64, rows of the hypotheses; B' may be less than B once sentences are finished.
        """
        if self.sums:
            self.sums = {name: tensor.index_select(0, order) for name, tensor in self.sums.items()}
        if self.keys is not None and self.beam_size > 1:
            if self.keys.size(0) * self.beam_size == order.numel():
                return
            order = order[:: self.beam_size] // self.beam_size
        for name, _ in _OF_KEYS:  # at each step of a beam search, so without a call for each
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, order))

    def trim(self, length: int) -> None:
        """Forget all positions but the first `length`.

        Args:
            length: how many positions stay, 0 … S. The padding is cut with the keys.

        Raises:
            ValueError: for a length that is not held, with a window also for one whose next query would see a
                dropped position, and where a running sum has no positions (MAE's gate).
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
        """Change every tensor that has a row for each sentence of the keys and a place for each position."""
        for name, axis in _OF_KEYS:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor, axis))

    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        tensors = (self.keys, self.values, self.padding, self.key_experts, *self.sums.values())
        return tuple(tensor for tensor in tensors if tensor is not None)


def _version(tensor: Tensor) -> int:
    """How often torch has seen the tensor written to; it does not count in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
