"""A cache of one size for a whole generation: each step has the same shapes, so it is one graph."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from moa_fairseq.layers.kv_cache import KVCache


class StaticCache(KVCache):
    """Keys and values in tensors for `max_length` positions, which each step writes in place.

    `Attention.new_cache(batch=…, max_length=…)` makes one; it is called as a `KVCache` is. Nothing in a step
    waits for a GPU. The tensors are made by the first call, in the dtype and on the device of its keys.

    Args:
        owner: which attention made it.
        batch: B.
        max_length: S, of the text with what is generated.
    """

    max_length: int

    def __init__(self, owner: int, batch: int, max_length: int):
        super().__init__(owner)
        self.batch = batch
        self.max_length = max_length
        self._filled: Tensor | None = None  # a scalar, int64
        self._written = 0  # positions, as far as the host counts them; a graph counts none
        self._is_counted = True  # whether that is all of them
        self._step = 0  # positions of the latest call

    @property
    def rows(self) -> int:
        return self.batch

    @property
    def length(self) -> int | Tensor:
        """How many positions it holds: a scalar tensor, 0 before the first call."""
        return 0 if self._filled is None else self._filled

    def lengths(self, queries: int, given: int) -> set[int]:
        """How many positions a mask or a padding may have: those so far, or all that there may be.

        Args:
            queries: T, those of the call.
            given: how many it has, which is believed where only a GPU knows how many there are.
        """
        if is_compiling() or not self._is_counted:
            so_far = max(given, queries)
        else:
            so_far = self._written + queries
        return {min(so_far, self.max_length), self.max_length}

    def latest(self, padding: Tensor, queries: int) -> Tensor:
        """The padding of a call's own positions, [B, T].

        Args:
            padding: of these, of all positions so far, or of all that there may be, [B, …].
            queries: T, which stand behind all positions that it holds.
        """
        if padding.size(1) < self.max_length:
            return padding[:, padding.size(1) - queries :]
        # clamped: `extend` refuses what is beyond
        place = self.length + torch.arange(queries, device=padding.device)
        return padding.index_select(1, place.clamp(max=self.max_length - 1))

    def hidden(self, queries: int, causal: bool, device: torch.device) -> Tensor:
        """What the queries of a call may not see: [T, S] bool, True = not written yet, or later.

        Args:
            queries: T, of which the first stands behind all positions so far.
            causal: no query sees a later one; otherwise all of them see the last.
            device: of the queries.
        """
        if causal:
            last = torch.arange(queries, device=device)
        else:
            last = torch.full((queries,), queries - 1, device=device)
        return torch.arange(self.max_length, device=device) > (self.length + last)[:, None]

    def extend(self, k: Tensor, v: Tensor, experts: Tensor | None = None) -> None:
        """Write keys and values behind those that it holds.

        Args:
            k, v: those of the step, [B, G, S', D], at their positions already.
            experts: None.

        Raises:
            ValueError: for more positions than max_length, and where a gradient would have to pass.
        """
        assert experts is None
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "a cache with max_length is written in place, so no gradient passes: call the layer under "
                "torch.no_grad(), or take new_cache()"
            )
        self._step = k.size(2)
        if is_compiling():
            self._is_counted = False
        else:
            if self._written + self._step > self.max_length:
                raise ValueError(
                    f"the cache has room for max_length={self.max_length} positions, of which "
                    f"{self.max_length - self._written} are left, but x has {self._step}"
                )
            self._written += self._step
        if self.keys is None or self.values is None or self._filled is None:
            self.keys = k.new_zeros(*k.shape[:2], self.max_length, k.size(3))
            self.values = v.new_zeros(*v.shape[:2], self.max_length, v.size(3))
            self._filled = torch.zeros((), dtype=torch.int64, device=k.device)
            self._keep_in_place(self.keys, self.values, self._filled)
        place = self._filled + torch.arange(self._step, device=k.device)
        self.keys.index_copy_(2, place, k)
        self.values.index_copy_(2, place, v)
        self._filled += self._step

    def extend_padding(self, padding: Tensor | None) -> Tensor | None:
        """The padding [B, S] of all positions, those without keys included.

        Args:
            padding: of the step's positions, of all so far, or of all that there may be; None where the step
                has no padding. What was padding in an earlier step stays padding.
        """
        if padding is None:
            return self.padding
        if self.padding is None:
            self.padding = padding.new_zeros(padding.size(0), self.max_length)
            self._keep_in_place(self.padding)
        first = self.length - self._step
        if padding.size(1) == self._step:
            place = first + torch.arange(self._step, device=padding.device)
            self.padding.index_copy_(1, place, padding)
        else:
            earlier = torch.arange(self.max_length, device=padding.device) < first
            self.padding &= earlier
            self.padding[:, : padding.size(1)] |= padding
        return self.padding

    def reorder(self, order: Tensor) -> None:
        """Row i of everything becomes row order[i], in place.

        Args:
            order: [B] int64.

        Raises:
            ValueError: for another number of rows.
        """
        if order.numel() != self.batch:
            raise ValueError(
                f"order has {order.numel()} rows, but the cache was made with batch={self.batch}: keep them "
                "all, or take new_cache()"
            )
        self._of_keys(lambda tensor, _: tensor.copy_(tensor.index_select(0, order)))

    def trim(self, length: int) -> None:
        """Forget all positions but the first `length`, which waits for a GPU.

        Args:
            length: how many positions stay, 0 … those that it holds.

        Raises:
            ValueError: for a length that is not held.
        """
        filled = int(self.length)
        if not 0 <= length <= filled:
            raise ValueError(
                f"length {length} must be between 0 and the {filled} positions in the cache"
            )
        if self._filled is not None:
            self._filled.fill_(length)
        for tensor, axis in ((self.keys, 2), (self.values, 2), (self.padding, 1)):
            if tensor is not None:  # a weight of zero does not hide a NaN
                tensor.narrow(axis, length, filled - length).zero_()
        self._written = length
        self._is_counted = True

    def tensors(self) -> tuple[Tensor, ...]:
        return super().tensors() if self._filled is None else (*super().tensors(), self._filled)

    def _keep_in_place(self, *tensors: Tensor) -> None:
        """Tell torch.compile that these tensors stay where they are, so that CUDA graphs may write them."""
        if not is_compiling():
            for tensor in tensors:
                if tensor.is_cuda:
                    torch._dynamo.mark_static_address(tensor)
