"""Expert-sorted backend: rows are sorted by expert, each expert's rows meet its matrix in one GEMM.

Products go through `torch.nn.functional.grouped_mm` where it takes the device, dtype and strides,
else through one `mm` per expert that writes into a preallocated output. Inputs are gathered, never
scattered: a permutation's gradient is the inverse permutation, and the K slots of a token are
neighbours, so their sum is a plain reduction.
"""

from typing import Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moa_fairseq.kernels.slot_order import SlotOrder

_GROUPED_MM: Optional[Callable] = getattr(F, "grouped_mm", None)
_TMA_BYTES = 16  # grouped_mm demands strides that are multiples of 16 bytes


def grouped_mm_takes(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped_mm accepts rows [M, I] times weight [E, I, O] as they are."""
    if _GROUPED_MM is None or rows.dtype != weight.dtype or rows.size(0) == 0:
        return False
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if rows.is_cuda and rows.dtype != torch.bfloat16:
        return False  # other dtypes fall back to a loop that synchronises: no gain over ours
    unit = _TMA_BYTES // rows.element_size()
    return all(size % unit == 0 for size in (rows.size(1), weight.size(1), weight.size(2)))


def grouped_product(rows: Tensor, weight: Tensor, order: SlotOrder) -> Tensor:
    """out[i] = rows[i] · weight[e(i)]: rows [M, I] sorted by expert, weight [E, I, O] → [M, O]."""
    if grouped_mm_takes(rows, weight):
        return _GROUPED_MM(rows, weight, offs=order.offsets)
    out = rows.new_empty(rows.size(0), weight.size(2))
    start = 0
    for expert, end in enumerate(order.ends()):
        if end > start:
            torch.mm(rows[start:end], weight[expert], out=out[start:end])
        start = end
    return out


def grouped_outer(left: Tensor, right: Tensor, order: SlotOrder) -> Tensor:
    """out[e] = Σ_{i of e} left[i]ᵀ · right[i]: [M, D], [M, C] sorted by expert → [E, D, C].

    An expert without rows gets zeros: its weights then have a zero gradient, not none.
    """
    out = left.new_empty(order.offsets.numel(), left.size(1), right.size(1))
    start = 0
    for expert, end in enumerate(order.ends()):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=out[expert])
        else:
            out[expert].zero_()
        start = end
    return out


class _Dispatch(Function):
    """x [N, C], weight [E, D, C] → slots [N·K, D] in flat slot order."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, order: SlotOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(x, weight)
        sorted_slots = grouped_product(x.index_select(0, order.token), weight.transpose(1, 2), order)
        return sorted_slots.index_select(0, order.inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        order, (x, weight) = ctx.order, ctx.saved_tensors
        grad = grad.index_select(0, order.order)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            rows = grouped_product(grad, weight, order).index_select(0, order.inverse)
            grad_x = rows.view(x.size(0), order.per_token, x.size(1)).sum(1)
        if ctx.needs_input_grad[1]:
            grad_weight = grouped_outer(grad, x.index_select(0, order.token), order)
        return grad_x, grad_weight, None


class _Combine(Function):
    """slots [N·K, D], gate [N·K], weight [E, D, C] → [N, C]."""

    @staticmethod
    def forward(ctx, slots: Tensor, gate: Tensor, weight: Tensor, order: SlotOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(slots, gate, weight)
        rows = (slots * gate.unsqueeze(1)).index_select(0, order.order)
        rows = grouped_product(rows, weight, order).index_select(0, order.inverse)
        return rows.view(-1, order.per_token, weight.size(2)).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        order, (slots, gate, weight) = ctx.order, ctx.saved_tensors
        grad_rows = grad.index_select(0, order.token)
        grad_slots = grad_gate = grad_weight = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            projected = grouped_product(grad_rows, weight.transpose(1, 2), order)
            projected = projected.index_select(0, order.inverse)
            grad_slots = projected * gate.unsqueeze(1)
            grad_gate = (projected * slots).sum(1)
        if ctx.needs_input_grad[2]:
            rows = (slots * gate.unsqueeze(1)).index_select(0, order.order)
            grad_weight = grouped_outer(rows, grad_rows, order)
        return grad_slots, grad_gate, grad_weight, None


def dispatch(x: Tensor, weight: Tensor, order: SlotOrder) -> Tensor:
    """Project each token by its K experts: x [N, C], weight [E, D, C] → [N, K, D]."""
    slots = _Dispatch.apply(x, weight, order)
    return slots.view(x.size(0), order.per_token, weight.size(1))


def combine(slots: Tensor, gate: Tensor, weight: Tensor, order: SlotOrder) -> Tensor:
    """Gate-weighted sum of each token's K projected slots: slots [N, K, D], gate [N, K] → [N, C]."""
    return _Combine.apply(slots.reshape(-1, slots.size(2)), gate.reshape(-1), weight, order)
