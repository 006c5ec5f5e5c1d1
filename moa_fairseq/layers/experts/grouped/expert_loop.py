"""A loop over experts: gather the rows of an expert, multiply them, and write or add the products.

Each step gathers a piece of an expert's rows that fits the processor's cache, so nothing as large as all
slots is stored. The slots of an expert belong to different rows, so no row is added to twice in a step. Each
step needs the expert's number of rows on the host, so the loop is for CPUs.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moa_fairseq.layers.experts.expert_permutation import ExpertPermutation

# The rows of a piece, so that gathered rows take little memory. Shorter pieces cost time (512: 2 % of a layer
# of 16K32E256D on two CPU cores), longer pieces save none.
_PIECE = 1024


class _Piece(NamedTuple):
    """Slots of one expert that are multiplied at once."""

    expert: int
    is_first: bool  # whether it is the first piece of its expert
    source: Tensor  # the rows to read, of width C in a product up, of width D in a product down
    target: Tensor  # the rows to write or add to
    gates: Tensor | None  # [rows of the piece, 1]


class ExpertLoop:
    """A plan of the products of one routing (`ExpertPermutation.plan`): the slots of every expert, in pieces.

    Only the constructor waits for a GPU. `experts` has the expert of each piece (an expert with many slots
    has several pieces, and no piece is empty); `wide_rows` and `narrow_rows` have the rows of its slots, of
    width C and D. `unchosen` are the experts without slots.

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
        self.is_first: list[bool] = []
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
                self.is_first += [True] + [False] * (pieces - 1)
                self.lengths += [least + 1] * longer + [least] * (pieces - longer)
            start = end
        self.wide_rows = self._rows(self.per_wide)
        self.narrow_rows = self._rows(self.per_narrow)

    def _rows(self, per_row: int) -> tuple[Tensor, ...]:
        """The rows of the slots of each piece, if per_row neighbouring slots share a row."""
        return torch.split(self.order if per_row == 1 else self.order // per_row, self.lengths)

    def _pieces(self, gate: Tensor | None, is_up: bool) -> Iterator[_Piece]:
        source = self.wide_rows
        target = self.narrow_rows
        if not is_up:
            source, target = target, source
        gates: Iterable[Tensor | None] = repeat(None)
        if gate is not None:
            gates = torch.split(gate.index_select(0, self.order).unsqueeze(1), self.lengths)
        return map(_Piece, self.experts, self.is_first, source, target, gates)

    def forward(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, is_up: bool
    ) -> Tensor:
        """Compute what `SortedRows.forward` does, piece by piece."""
        if is_up:
            matrices = weight.transpose(1, 2)
            per_row = self.per_narrow
        else:
            matrices = weight
            per_row = self.per_wide
        out = _new_rows(rows, self.slots // per_row, matrices.size(2), per_row)
        for expert, _, source, target, gates in self._pieces(gate, is_up):
            inputs = rows.index_select(0, source)
            if gates is not None and not is_up:  # gates are applied at width D
                inputs.mul_(gates)
            # [rows of the piece, C or D] · [C or D, D or C]
            if bias is None:
                product = inputs @ matrices[expert]
            else:
                product = torch.addmm(bias[expert], inputs, matrices[expert])
            if gates is not None and is_up:
                product.mul_(gates)
            _add_rows(out, target, product, per_row)
        return out.to(rows.dtype)

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
        needs_rows, needs_weight, needs_bias, needs_gate = needs
        if is_up:
            matrices = weight
            per_row = self.per_wide
        else:
            matrices = weight.transpose(1, 2)
            per_row = self.per_narrow
        grad_rows = _new_rows(rows, rows.size(0), rows.size(1), per_row) if needs_rows else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = grad.new_empty(weight.shape[:2]) if needs_bias else None
        grad_gates: list[Tensor] = []
        for piece in self._pieces(gate, is_up):
            upstream = grad.index_select(0, piece.target)
            inputs = rows.index_select(0, piece.source) if needs_gate else None
            if needs_rows or needs_gate:
                # [rows of the piece, D or C] · [D or C, C or D]
                product = upstream @ matrices[piece.expert]
                if inputs is not None:
                    grad_gates.append(_gate_gradients(product, inputs, upstream, bias, piece))
                if grad_rows is not None:
                    if piece.gates is not None:
                        product = product.mul_(piece.gates)
                    _add_rows(grad_rows, piece.source, product, per_row)
            if needs_weight and inputs is None:
                # Only now, because the cache has room for two such buffers
                inputs = rows.index_select(0, piece.source)
            if needs_weight or needs_bias:
                narrow, wide = (upstream, inputs) if is_up else (inputs, upstream)
                _add_parameter_gradients(piece, narrow, wide, grad_weight, grad_bias)
        for gradient in (grad_weight, grad_bias):
            if gradient is not None:
                for expert in self.unchosen:
                    gradient[expert].zero_()
        return [
            None if grad_rows is None else grad_rows.to(rows.dtype),
            grad_weight,
            grad_bias,
            self._in_slot_order(grad_gates, gate) if needs_gate else None,
        ]

    def _in_slot_order(self, gradients: list[Tensor], gate: Tensor | None) -> Tensor:
        """Reorder the gradients of all pieces to the order of the gates, [S]."""
        assert gate is not None
        result = torch.empty_like(gate)
        if gradients:
            result.index_copy_(0, self.order, torch.cat(gradients))
        return result


def _gate_gradients(
    product: Tensor, inputs: Tensor, upstream: Tensor, bias: Tensor | None, piece: _Piece
) -> Tensor:
    """The gradients of the gates of a piece, [rows of the piece]."""
    gradients = (product * inputs).sum(1)
    return gradients if bias is None else gradients + upstream @ bias[piece.expert]


def _add_parameter_gradients(
    piece: _Piece, narrow: Any, wide: Any, grad_weight: Tensor | None, grad_bias: Tensor | None
) -> None:
    """Write the gradients of an expert's parameters, or add to those of its earlier pieces.

    Args:
        piece: the piece.
        narrow: its rows of width D, gradients or inputs, which are multiplied by the gates in place.
        wide: its rows of width C; only for grad_weight.
        grad_weight, grad_bias: the gradients of all experts, [E, D, C] and [E, D]; None: not needed.
    """
    if piece.gates is not None:
        narrow.mul_(piece.gates)
    if grad_weight is not None:
        matrix = grad_weight[piece.expert]
        if piece.is_first:
            torch.mm(narrow.t(), wide, out=matrix)
        else:
            matrix.addmm_(narrow.t(), wide)
    if grad_bias is not None:
        vector = grad_bias[piece.expert]
        if piece.is_first:
            torch.sum(narrow, 0, out=vector)
        else:
            vector += narrow.sum(0)


def _new_rows(like: Tensor, count: int, width: int, per_row: int) -> Tensor:
    """Rows to write to; if they are sums of per_row slots, zeros in float32 or wider, as sums lose bits."""
    if per_row == 1:
        return like.new_empty(count, width)
    dtype = torch.promote_types(like.dtype, torch.float32)
    return like.new_zeros(count, width, dtype=dtype)


def _add_rows(target: Tensor, row: Tensor, values: Tensor, per_row: int) -> None:
    """Write the values to the rows of the target, or add them to sums of per_row slots."""
    if per_row == 1:
        target.index_copy_(0, row, values)
    else:
        target.index_add_(0, row, values.to(target.dtype))
