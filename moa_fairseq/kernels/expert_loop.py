"""One expert after the other: gather its rows, multiply, write or add them where they belong.

What is gathered is one expert's share of the batch, small enough for the processor's cache; nothing of
the size [N·K, C] is ever stored. An expert's rows belong to different tokens, so adding them to the
tokens never collides. Each iteration needs the expert's row count on the host: made for the CPU.
"""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from moa_fairseq.kernels.slot_order import SlotOrder


def _accumulator(like: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros [rows, columns] in float32 at least: K low-precision additions would lose bits."""
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    return like.new_zeros(rows, columns, dtype=dtype)


def dispatch(x: Tensor, weight: Tensor, bias: Optional[Tensor], order: SlotOrder) -> Tensor:
    """x [N, C], weight [E, D, C], bias [E, D] → [N·K, D] in flat slot order."""
    out = x.new_empty(order.order.numel(), weight.size(1))
    for expert, (token, slot) in enumerate(order.by_expert):
        if token.numel():
            rows, matrix = x.index_select(0, token), weight[expert].t()
            product = rows @ matrix if bias is None else torch.addmm(bias[expert], rows, matrix)
            out.index_copy_(0, slot, product)
    return out


def dispatch_backward(
    grad: Tensor, x: Tensor, weight: Tensor, order: SlotOrder, needs: Tuple[bool, bool, bool]
) -> List[Optional[Tensor]]:
    """Gradients of x, weight and bias, those that `needs` asks for; grad [N·K, D]."""
    grad_x = _accumulator(x, *x.shape) if needs[0] else None
    grad_weight = torch.empty_like(weight) if needs[1] else None
    grad_bias = grad.new_zeros(weight.shape[:2]) if needs[2] else None
    for expert, (token, slot) in enumerate(order.by_expert):
        rows = grad.index_select(0, slot)
        if grad_x is not None:
            grad_x.index_add_(0, token, (rows @ weight[expert]).to(grad_x.dtype))
        if grad_weight is not None:
            torch.mm(rows.t(), x.index_select(0, token), out=grad_weight[expert])  # zeros without rows
        if grad_bias is not None:
            torch.sum(rows, 0, out=grad_bias[expert])
    return [None if grad_x is None else grad_x.to(x.dtype), grad_weight, grad_bias]


def combine(slots: Tensor, gate: Tensor, weight: Tensor, order: SlotOrder) -> Tensor:
    """slots [N·K, D], gate [N·K], weight [E, D, C] → [N, C]."""
    out = _accumulator(slots, slots.size(0) // order.per_token, weight.size(2))
    for expert, (token, slot) in enumerate(order.by_expert):
        if token.numel():
            rows = slots.index_select(0, slot).mul_(gate.index_select(0, slot).unsqueeze(1))
            out.index_add_(0, token, (rows @ weight[expert]).to(out.dtype))
    return out.to(slots.dtype)


def combine_backward(
    grad: Tensor,
    slots: Tensor,
    gate: Tensor,
    weight: Tensor,
    order: SlotOrder,
    needs: Tuple[bool, bool, bool],
) -> List[Optional[Tensor]]:
    """Gradients of slots, gate and weight, those that `needs` asks for; grad [N, C]."""
    grad_slots = torch.empty_like(slots) if needs[0] else None
    grad_gate = torch.empty_like(gate) if needs[1] else None
    grad_weight = torch.empty_like(weight) if needs[2] else None
    for expert, (token, slot) in enumerate(order.by_expert):
        upstream = grad.index_select(0, token)
        rows, share = slots.index_select(0, slot), gate.index_select(0, slot).unsqueeze(1)
        if grad_slots is not None or grad_gate is not None:
            projected = upstream @ weight[expert].t()
            if grad_gate is not None:
                grad_gate.index_copy_(0, slot, (projected * rows).sum(1))
            if grad_slots is not None:
                grad_slots.index_copy_(0, slot, projected.mul_(share))
        if grad_weight is not None:
            torch.mm(rows.mul_(share).t(), upstream, out=grad_weight[expert])
    return [grad_slots, grad_gate, grad_weight]
