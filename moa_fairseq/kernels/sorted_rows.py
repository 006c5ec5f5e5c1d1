"""All experts at once by torch's grouped_mm: rows are gathered in expert order, one call multiplies them.

For GPUs: nothing waits for the host. Rows are only ever gathered, never scattered: a permutation's
gradient is the inverse permutation, and the K slots of a token are neighbours, so their sum is a plain
reduction. Price: the gathered input, K times the tokens, is stored while a product runs.
"""

from typing import Callable, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moa_fairseq.kernels.slot_order import SlotOrder

GROUPED_MM: Optional[Callable] = getattr(F, "grouped_mm", None)
_ALIGNMENT = 16  # bytes; grouped_mm demands strides that are multiples of it


def takes(rows: Tensor, weight: Tensor) -> bool:
    """Whether grouped_mm accepts rows [M, I] times weight [E, O, I] transposed, and gains by it."""
    if GROUPED_MM is None or rows.dtype != weight.dtype or rows.size(0) == 0:
        return False
    if not rows.is_cuda or rows.dtype != torch.bfloat16:
        return False  # elsewhere it is a loop that synchronises: no gain over ours
    unit = _ALIGNMENT // rows.element_size()
    return all(size % unit == 0 for size in (rows.size(1), weight.size(1), weight.size(2)))


def _outer(left: Tensor, right: Tensor, order: SlotOrder) -> Tensor:
    """out[e] = Σ_{i of e} left[i]ᵀ · right[i]: [M, D], [M, C] sorted by expert → [E, D, C].

    An expert without rows gets zeros: its weights then have a zero gradient, not none.
    """
    return GROUPED_MM(left.t(), right, offs=order.offsets)


def dispatch(x: Tensor, weight: Tensor, bias: Optional[Tensor], order: SlotOrder) -> Tensor:
    """As expert_loop.dispatch."""
    rows = GROUPED_MM(x.index_select(0, order.token), weight.transpose(1, 2), offs=order.offsets)
    if bias is not None:
        rows = rows + bias.index_select(0, _expert_of_row(order))
    return rows.index_select(0, order.inverse)


def dispatch_backward(
    grad: Tensor, x: Tensor, weight: Tensor, order: SlotOrder, needs: Tuple[bool, bool, bool]
) -> List[Optional[Tensor]]:
    """As expert_loop.dispatch_backward."""
    grad = grad.index_select(0, order.order)
    grad_x = grad_weight = grad_bias = None
    if needs[0]:
        rows = GROUPED_MM(grad, weight, offs=order.offsets).index_select(0, order.inverse)
        grad_x = rows.view(x.size(0), order.per_token, x.size(1)).sum(1)
    if needs[1]:
        grad_weight = _outer(grad, x.index_select(0, order.token), order)
    if needs[2]:
        sums = grad.new_zeros(weight.shape[:2], dtype=torch.float32)
        grad_bias = sums.index_add_(0, _expert_of_row(order), grad.float()).to(grad.dtype)
    return [grad_x, grad_weight, grad_bias]


def combine(slots: Tensor, gate: Tensor, weight: Tensor, order: SlotOrder) -> Tensor:
    """As expert_loop.combine."""
    rows = (slots * gate.unsqueeze(1)).index_select(0, order.order)
    rows = GROUPED_MM(rows, weight, offs=order.offsets).index_select(0, order.inverse)
    return rows.view(-1, order.per_token, weight.size(2)).sum(1)


def combine_backward(
    grad: Tensor,
    slots: Tensor,
    gate: Tensor,
    weight: Tensor,
    order: SlotOrder,
    needs: Tuple[bool, bool, bool],
) -> List[Optional[Tensor]]:
    """As expert_loop.combine_backward."""
    rows = grad.index_select(0, order.token)
    grad_slots = grad_gate = grad_weight = None
    if needs[0] or needs[1]:
        projected = GROUPED_MM(rows, weight.transpose(1, 2), offs=order.offsets)
        projected = projected.index_select(0, order.inverse)
        grad_slots = projected * gate.unsqueeze(1)
        grad_gate = (projected * slots).sum(1)
    if needs[2]:
        gated = (slots * gate.unsqueeze(1)).index_select(0, order.order)
        grad_weight = _outer(gated, rows, order)
    return [grad_slots, grad_gate, grad_weight]


def _expert_of_row(order: SlotOrder) -> Tensor:
    """[N·K] int64: the expert of each sorted row."""
    rows = torch.arange(order.order.numel(), device=order.order.device, dtype=order.offsets.dtype)
    return torch.searchsorted(order.offsets, rows, right=True)
