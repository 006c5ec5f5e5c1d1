"""Every expert on every token in one GEMM, then the K that were chosen: for few tokens or small experts.

Does E / K times the arithmetic, and no step per expert: no loop, nothing to wait for.
"""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from moa_fairseq.kernels.slot_order import SlotOrder


def _spread(slots: Tensor, weight: Tensor, order: SlotOrder) -> Tensor:
    """[N·K, D] → [N, E·D]: each slot at its expert's place, zeros elsewhere."""
    num_experts, dim, _ = weight.shape
    tokens = slots.size(0) // order.per_token
    cells = slots.new_zeros(tokens * num_experts, dim)
    return cells.index_copy_(0, order.cell, slots).view(tokens, num_experts * dim)


def dispatch(x: Tensor, weight: Tensor, bias: Optional[Tensor], order: SlotOrder) -> Tensor:
    """As expert_loop.dispatch."""
    matrix = weight.flatten(0, 1).t()
    every = x @ matrix if bias is None else torch.addmm(bias.flatten(), x, matrix)
    return every.view(-1, weight.size(1)).index_select(0, order.cell)


def dispatch_backward(
    grad: Tensor, x: Tensor, weight: Tensor, order: SlotOrder, needs: Tuple[bool, bool, bool]
) -> List[Optional[Tensor]]:
    """As expert_loop.dispatch_backward."""
    every = _spread(grad, weight, order)
    return [
        every @ weight.flatten(0, 1) if needs[0] else None,
        (every.t() @ x).view_as(weight) if needs[1] else None,
        every.sum(0).view(weight.shape[:2]) if needs[2] else None,
    ]


def combine(slots: Tensor, gate: Tensor, weight: Tensor, order: SlotOrder) -> Tensor:
    """As expert_loop.combine."""
    return _spread(slots * gate.unsqueeze(1), weight, order) @ weight.flatten(0, 1)


def combine_backward(
    grad: Tensor,
    slots: Tensor,
    gate: Tensor,
    weight: Tensor,
    order: SlotOrder,
    needs: Tuple[bool, bool, bool],
) -> List[Optional[Tensor]]:
    """As expert_loop.combine_backward."""
    grad_slots = grad_gate = grad_weight = None
    if needs[2]:
        grad_weight = (_spread(slots * gate.unsqueeze(1), weight, order).t() @ grad).view_as(weight)
    if needs[0] or needs[1]:
        every = grad @ weight.flatten(0, 1).t()
        projected = every.view(-1, weight.size(1)).index_select(0, order.cell)
        grad_gate = torch.linalg.vecdot(projected, slots)
        grad_slots = projected.mul_(gate.unsqueeze(1))
    return [grad_slots, grad_gate, grad_weight]
