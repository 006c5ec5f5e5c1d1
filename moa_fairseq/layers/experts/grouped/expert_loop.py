"""A loop over experts: gather the rows of an expert, multiply them, and write or add the products.

Each step gathers a piece of an expert's rows that fits the processor's cache, so nothing as large as all
slots is stored. The slots of an expert belong to different rows, so no row is added to twice in a step. Each
step needs the expert's number of rows on the host, so the loop is for CPUs.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moa_fairseq.layers.experts.expert_permutation import ExpertPermutation

# The rows of a piece, so that gathered rows take little memory. Shorter pieces cost time (512: 2 % of a layer
# of 16K32E256D on two CPU cores), longer pieces save none.
_PIECE = 1024


class ExpertLoop:
    """A plan of the products of one routing (`ExpertPermutation.plan`): the slots of every expert, in pieces.

    Only the constructor waits for a GPU. `experts` has the expert of each piece (an expert with many slots
    has several pieces, and no piece is empty); `wide_rows` and `narrow_rows` have the rows of its slots.
    `unchosen` are the experts without slots.

    Args:
        order: the permutation of the S slots.
        fan: the number of neighbouring slots that share a row of width D.
    """

    def __init__(self, order: ExpertPermutation, fan: int):
        self.slots = order.slots
        self.per_wide = order.per_token
        self.per_narrow = fan
        self.order = order.order
        self.experts: list[int] = []
        self.unchosen: list[int] = []
        self.lengths: list[int] = []
        start = 0
        for expert, end in enumerate(order.offsets.tolist()):
            if end == start:
                self.unchosen.append(expert)
            else:  # pieces of even lengths: a short remainder would cost as many calls as a long piece
                pieces = max(1, round((end - start) / _PIECE))
                least, longer = divmod(end - start, pieces)
                self.experts += [expert] * pieces
                self.lengths += [least + 1] * longer + [least] * (pieces - longer)
            start = end
        self.wide_rows, self.narrow_rows = (
            torch.split(self.order if per_row == 1 else self.order // per_row, self.lengths)
            for per_row in (self.per_wide, self.per_narrow)
        )

    def _pieces(
        self, gate: Tensor | None, is_up: bool
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
        """For each piece: the expert, rows to read, rows to write, gates [rows of the piece, 1] or None."""
        sides = (self.wide_rows, self.narrow_rows)
        gates: Sequence[Tensor | None] = [None] * len(self.experts)
        if gate is not None:
            gates = torch.split(gate.index_select(0, self.order).unsqueeze(1), self.lengths)
        return zip(self.experts, *(sides if is_up else sides[::-1]), gates)

    def forward(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, is_up: bool
    ) -> Tensor:
        """Compute what `SortedRows.forward` does, piece by piece."""
        if is_up:
            matrices = weight.transpose(1, 2)
            per_sum = self.per_narrow
        else:
            matrices = weight
            per_sum = self.per_wide
        out = _target(rows, self.slots // per_sum, matrices.size(2), per_sum)
        for expert, source, target, share in self._pieces(gate, is_up):
            inputs = rows.index_select(0, source)
            matrix = matrices[expert]
            if share is not None and not is_up:  # the gate is applied at width D
                inputs.mul_(share)
            # [rows of the piece, C or D] · [C or D, D or C]
            if bias is None:
                product = inputs @ matrix
            else:
                product = torch.addmm(bias[expert], inputs, matrix)
            if share is not None and is_up:
                product.mul_(share)
            _put(out, target, product, per_sum)
        return out.to(rows.dtype)

    def _clear_unchosen(self, *gradients: Tensor | None) -> None:
        """Set the gradients of experts without slots to zero."""
        for gradient in gradients:
            if gradient is not None:
                for expert in self.unchosen:
                    gradient[expert].zero_()

    def _by_slot(self, gate: Tensor | None, gradients: list[Tensor]) -> Tensor:
        """Reorder the gradients of all pieces to the order of the gates, [S]."""
        assert gate is not None
        result = torch.empty_like(gate)
        if gradients:
            result.index_copy_(0, self.order, torch.cat(gradients))
        return result

    def backward(
        self,
        grad: Tensor,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gate: Tensor | None,
        is_up: bool,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """Compute what `SortedRows.backward` does; the gradients of an expert without slots are zero."""
        if is_up:
            matrices = weight
            per_row = self.per_wide
        else:
            matrices = weight.transpose(1, 2)
            per_row = self.per_narrow
        grad_rows = None
        if needs[0]:
            grad_rows = _target(rows, rows.size(0), rows.size(1), per_row)
        grad_weight = None
        if needs[1]:
            grad_weight = torch.empty_like(weight)
        grad_bias = None
        if needs[2]:
            grad_bias = grad.new_empty(weight.shape[:2])
        self._clear_unchosen(grad_weight, grad_bias)
        grad_shares: list[Tensor] = []
        previous = -1
        for expert, source, target, share in self._pieces(gate, is_up):
            upstream = grad.index_select(0, target)
            inputs = None
            if needs[3]:
                inputs = rows.index_select(0, source)
            if needs[0] or needs[3]:
                # [rows of the piece, D or C] · [D or C, C or D]
                product = upstream @ matrices[expert]
                if inputs is not None:
                    grad_shares.append(_gate_gradients(product, inputs, upstream, bias, expert))
                if grad_rows is not None:
                    if share is not None:
                        product = product.mul_(share)
                    _put(grad_rows, source, product, per_row)
            # Gathered only now, because the cache has room for two such buffers
            if needs[1] and inputs is None:
                inputs = rows.index_select(0, source)
            narrow, wide = (upstream, inputs) if is_up else (inputs, upstream)
            if share is not None and narrow is not None:
                narrow.mul_(share)
            is_first = expert != previous
            previous = expert
            if grad_weight is not None:
                assert narrow is not None
                assert wide is not None
                _add_product(grad_weight[expert], narrow.t(), wide, is_first)
            if grad_bias is not None and narrow is not None:
                _add_sum(grad_bias[expert], narrow, is_first)
        grad_gate = self._by_slot(gate, grad_shares) if needs[3] else None
        return [
            None if grad_rows is None else grad_rows.to(rows.dtype),
            grad_weight,
            grad_bias,
            grad_gate,
        ]


def _gate_gradients(
    product: Tensor, inputs: Tensor, upstream: Tensor, bias: Tensor | None, expert: int
) -> Tensor:
    """The gradients of the gates of a piece, [rows of the piece]."""
    gradients = (product * inputs).sum(1)
    return gradients if bias is None else gradients + upstream @ bias[expert]


def _add_product(target: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """Write the product [D, rows of the piece] · [rows of the piece, C] to the target, or add it."""
    if is_first:
        torch.mm(left, right, out=target)
    else:
        target.addmm_(left, right)


def _add_sum(target: Tensor, rows: Tensor, is_first: bool) -> None:
    """Write the sum of the rows [rows of the piece, D] to the target, or add it."""
    if is_first:
        torch.sum(rows, 0, out=target)
    else:
        target += rows.sum(0)


def _target(like: Tensor, rows: int, columns: int, slots_each: int) -> Tensor:
    """A target [rows, columns]: to write to, or zeros to add to, in float32 or wider, as sums lose bits."""
    if slots_each == 1:
        return like.new_empty(rows, columns)
    dtype = torch.promote_types(like.dtype, torch.float32)
    return like.new_zeros(rows, columns, dtype=dtype)


def _put(target: Tensor, row: Tensor, values: Tensor, slots_each: int) -> None:
    if slots_each == 1:
        target.index_copy_(0, row, values)
    else:
        target.index_add_(
            0, row, values if values.dtype == target.dtype else values.to(target.dtype)
        )
