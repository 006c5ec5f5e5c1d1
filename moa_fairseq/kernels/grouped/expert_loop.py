"""One expert after the other: gather its rows, multiply them, write or add the products to their places.

Each step gathers a piece of one expert's share of the batch, small enough for the processor's cache: nothing
as large as all slots is ever stored. An expert's slots belong to different rows, so adding them never
collides. Each iteration needs the expert's row count on the host, so this is for the CPU.
"""

from typing import Any, List, Optional, Sequence

import torch
from torch import Tensor

from moa_fairseq.kernels.slot_order import Fan


def _target(like: Tensor, rows: int, columns: int, slots_each: int) -> Tensor:
    """[rows, columns] to write to, or zeros to add to, in float32 at least: sums would lose bits."""
    if slots_each == 1:
        return like.new_empty(rows, columns)
    return like.new_zeros(rows, columns, dtype=like.dtype if like.dtype == torch.float64 else torch.float32)


def _put(target: Tensor, owner: Tensor, values: Tensor, slots_each: int) -> None:
    if slots_each == 1:
        target.index_copy_(0, owner, values)
    else:
        target.index_add_(0, owner, values if values.dtype == target.dtype else values.to(target.dtype))


def forward(
    rows: Tensor, weight: Tensor, bias: Optional[Tensor], gate: Optional[Tensor], fan: Fan, _: Any = None
) -> Tensor:
    """As reference.project."""
    pieces, matrices = fan.order.pieces, weight.transpose(1, 2) if fan.into_experts else weight
    out = _target(rows, fan.sums, matrices.size(2), fan.slots_per_sum)
    for expert, source, target, share in zip(
        pieces.experts, pieces.owner(fan.slots_per_row), pieces.owner(fan.slots_per_sum), pieces.column(gate)
    ):
        inputs, matrix = rows.index_select(0, source), matrices[expert]
        if share is not None and not fan.into_experts:  # the gate is applied on the narrow side
            inputs.mul_(share)
        product = inputs @ matrix if bias is None else torch.addmm(bias[expert], inputs, matrix)
        if share is not None and fan.into_experts:
            product.mul_(share)
        _put(out, target, product, fan.slots_per_sum)
    return out.to(rows.dtype)


def backward(
    grad: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    gate: Optional[Tensor],
    fan: Fan,
    needs: Sequence[bool],
    _: Any = None,
) -> List[Optional[Tensor]]:
    """Gradients of rows, weight, bias and gate, those that `needs` asks for."""
    pieces, matrices = fan.order.pieces, weight if fan.into_experts else weight.transpose(1, 2)
    grad_rows = _target(rows, rows.size(0), rows.size(1), fan.slots_per_row) if needs[0] else None
    grad_weight = torch.empty_like(weight) if needs[1] else None
    grad_bias = grad.new_empty(weight.shape[:2]) if needs[2] else None
    grad_shares: List[Tensor] = []
    for expert in pieces.unchosen:  # its gradient is zero, not missing
        for each in (grad_weight, grad_bias):
            if each is not None:
                each[expert].zero_()
    previous = -1
    for expert, source, target, share in zip(
        pieces.experts, pieces.owner(fan.slots_per_row), pieces.owner(fan.slots_per_sum), pieces.column(gate)
    ):
        upstream = grad.index_select(0, target)
        inputs = rows.index_select(0, source) if needs[3] else None
        if needs[0] or needs[3]:
            product = upstream @ matrices[expert]
            if inputs is not None:
                shares = (product * inputs).sum(1)
                grad_shares.append(shares if bias is None else shares + upstream @ bias[expert])
            if grad_rows is not None:
                product = product if share is None else product.mul_(share)
                _put(grad_rows, source, product, fan.slots_per_row)
        if needs[1] and inputs is None:  # not earlier: the cache has room for two such buffers
            inputs = rows.index_select(0, source)
        narrow, wide = (upstream, inputs) if fan.into_experts else (inputs, upstream)
        if share is not None and narrow is not None:
            narrow.mul_(share)
        is_first, previous = expert != previous, expert
        if grad_weight is not None and narrow is not None and wide is not None:
            if is_first:
                torch.mm(narrow.t(), wide, out=grad_weight[expert])
            else:
                grad_weight[expert].addmm_(narrow.t(), wide)
        if grad_bias is not None and narrow is not None:
            if is_first:
                torch.sum(narrow, 0, out=grad_bias[expert])
            else:
                grad_bias[expert] += narrow.sum(0)
    grad_gate = None
    if needs[3] and gate is not None:
        grad_gate = torch.empty_like(gate)
        if grad_shares:
            grad_gate.index_copy_(0, fan.order.order, torch.cat(grad_shares))
    return [None if grad_rows is None else grad_rows.to(rows.dtype), grad_weight, grad_bias, grad_gate]
