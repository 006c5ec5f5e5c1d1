"""A cache of fixed size: every step of a generation has the same shapes, so one graph serves all steps."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from moa_fairseq.layers.kv_cache import KVCache


class StaticCache(KVCache):
    """Keys and values in tensors for `max_length` positions, which each step writes in place.

    `Attention.new_cache(batch=…, max_length=…)` makes one, and it is used as a `KVCache`. No step waits for a
    GPU. The first call makes the tensors, in the dtype and on the device of its keys.

    Args:
        owner: the number of the attention that made it.
        batch: B.
        max_length: S, the number of positions of the text and of what is generated.
    """

    max_length: int

    def __init__(self, owner: int, batch: int, max_length: int):
        super().__init__(owner)
        self.batch = batch
        self.max_length = max_length
        self._filled: Tensor | None = None  # how many positions are written: a scalar, int64
        self._written = 0  # the same, counted by Python; a compiled graph does not count
        # False once a graph has written: only `_filled` is right then
        self._count_is_complete = True
        self._step = 0  # the number of positions of the latest call

    @property
    def rows(self) -> int:
        return self.batch

    @property
    def length(self) -> int | Tensor:
        """The number of positions written: the int 0 before the first call, then a scalar int64 tensor."""
        return 0 if self._filled is None else self._filled

    def accepted_lengths(self, queries: int, length: int) -> set[int]:
        """The lengths that a mask or a padding may have: the positions so far, or max_length.

        Args:
            queries: T, the number of positions of the call.
            length: the length that the mask or padding has. It is accepted if only the GPU knows the number
                of positions so far, because reading this number would wait for the GPU.
        """
        if is_compiling() or not self._count_is_complete:
            so_far = max(length, queries)
        else:
            so_far = self._written + queries
        return {min(so_far, self.max_length), self.max_length}

    def padding_of_call(self, padding: Tensor, queries: int) -> Tensor:
        """The padding of a call's own positions, [B, T].

        Args:
            padding: of the call's positions, of all positions so far, or of max_length positions, [B, …].
            queries: T, the number of positions of the call, which follow all positions written.
        """
        if padding.size(1) < self.max_length:
            return padding[:, padding.size(1) - queries :]
        positions = self.length + torch.arange(queries, device=padding.device)
        # Positions beyond the end are clamped here, because `extend` refuses them
        return padding.index_select(1, positions.clamp(max=self.max_length - 1))

    def hidden_positions(self, queries: int, causal: bool, device: torch.device) -> Tensor:
        """The positions that the queries of a call may not see, because they are later or not written yet.

        Args:
            queries: T, the number of positions of the call, which follow all positions written.
            causal: whether a query sees no later query; otherwise every query sees all T.
            device: the device of the queries.

        Returns:
            [T, S] bool, True = hidden.
        """
        if causal:
            last = torch.arange(queries, device=device)
        else:
            last = torch.full((queries,), queries - 1, device=device)
        return torch.arange(self.max_length, device=device) > (self.length + last)[:, None]

    def extend(self, k: Tensor, v: Tensor, experts: Tensor | None = None) -> None:
        """Write keys and values after those that are written.

        Args:
            k, v: keys and values of the step, [B, G, S', D], with their positions applied.
            experts: None: keys of single experts need a `KVCache`.

        Raises:
            ValueError: for more positions than max_length, and if keys or values require a gradient.
        """
        assert experts is None
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "a cache with max_length is written in place, so no gradient passes: call the layer under "
                "torch.no_grad(), or take new_cache()"
            )
        self._step = k.size(2)
        if is_compiling():
            self._count_is_complete = False
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
        positions = self._filled + torch.arange(self._step, device=k.device)
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        self._filled += self._step

    def extend_padding(self, padding: Tensor | None) -> Tensor | None:
        """Write the padding of a step, after `extend`. What was padding in an earlier step stays padding.

        Args:
            padding: of the step's positions, of all positions so far, or of max_length positions, [B, …]
                bool, True = padding; None: the step has no padding.

        Returns:
            The padding of max_length positions, [B, S] bool; None while no step had padding.
        """
        if padding is None:
            return self.padding
        if self.padding is None:
            self.padding = padding.new_zeros(padding.size(0), self.max_length)
            self._keep_in_place(self.padding)
        first = self.length - self._step
        if padding.size(1) == self._step:
            positions = first + torch.arange(self._step, device=padding.device)
            self.padding.index_copy_(1, positions, padding)
        else:
            earlier = torch.arange(self.max_length, device=padding.device) < first
            self.padding &= earlier
            self.padding[:, : padding.size(1)] |= padding
        return self.padding

    def reorder(self, order: Tensor) -> None:
        """Replace row i of every tensor by its row order[i], in place.

        Args:
            order: [B] int64.

        Raises:
            ValueError: for a number of rows other than B.
        """
        if order.numel() != self.batch:
            raise ValueError(
                f"order has {order.numel()} rows, but the cache was made with batch={self.batch}: keep them "
                "all, or take new_cache()"
            )
        self._of_keys(lambda tensor, _: tensor.copy_(tensor.index_select(0, order)))

    def trim(self, length: int) -> None:
        """Forget all positions but the first `length`. This waits for a GPU.

        Args:
            length: the number of positions that stay, from 0 to the number written.

        Raises:
            ValueError: for a length outside this range.
        """
        filled = int(self.length)
        if not 0 <= length <= filled:
            raise ValueError(
                f"length {length} must be between 0 and the {filled} positions in the cache"
            )
        if self._filled is not None:
            self._filled.fill_(length)
        for tensor, axis in ((self.keys, 2), (self.values, 2), (self.padding, 1)):
            if tensor is not None:  # a forgotten NaN would pass through a weight of zero
                tensor.narrow(axis, length, filled - length).zero_()
        self._written = length
        self._count_is_complete = True

    def tensors(self) -> tuple[Tensor, ...]:
        return super().tensors() if self._filled is None else (*super().tensors(), self._filled)

    def _keep_in_place(self, *tensors: Tensor) -> None:
        """Tell torch.compile that the tensors keep their addresses, so CUDA graphs may write them."""
        if not is_compiling():
            for tensor in tensors:
                if tensor.is_cuda:
                    torch._dynamo.mark_static_address(tensor)
