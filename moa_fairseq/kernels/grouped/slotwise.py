"""A projection and its gradients from a handful of products, each over all experts and all slots at once.

Results of the experts' width, [S, D], are stored for every slot; those of the model's width, [S, C], never.
The products come from a `walk`: `every_expert` or `sorted_rows`. Both have

    into_experts(wide, weight, bias, fan)   A_e(s) · wide[s // per_wide] + bias[e(s)], [S, D] by flat slot
    place(slots, weight, fan)               slots [S, D], as the other products want them
    into_model(placed, weight, fan)         Σ_{s of row} slots[s] · weight[e(s)], [S / per_wide, C]
    weight_grad(placed, wide, weight, fan)  Σ_{s of e} slots[s]ᵀ · wide[s // per_wide], [E, D, C]
    bias_grad(placed, weight, fan)          Σ_{s of e} slots[s], [E, D]
"""

from typing import Any, List, Optional, Sequence

import torch
from torch import Tensor

from moa_fairseq.kernels.slot_order import Fan


def _spread(narrow: Tensor, gate: Optional[Tensor], slots_each: int) -> Tensor:
    """gate[s] · narrow[s // slots_each]: [S / slots_each, D] → [S, D]"""
    if slots_each == 1:
        return narrow if gate is None else narrow * gate.unsqueeze(1)
    slots = narrow.unsqueeze(1).expand(-1, slots_each, -1)
    if gate is not None:
        slots = slots * gate.view(-1, slots_each, 1)
    return slots.reshape(-1, narrow.size(1))


def _added(slots: Tensor, slots_each: int) -> Tensor:
    """Neighbours added: [S, D] → [S / slots_each, D]"""
    return slots if slots_each == 1 else slots.view(-1, slots_each, slots.size(1)).sum(1)


def forward(
    rows: Tensor, weight: Tensor, bias: Optional[Tensor], gate: Optional[Tensor], fan: Fan, walk: Any
) -> Tensor:
    """As reference.project."""
    if not fan.into_experts:
        placed = walk.place(_spread(rows, gate, fan.per_narrow), weight, fan)
        sums: Tensor = walk.into_model(placed, weight, fan)
        return sums
    slots = walk.into_experts(rows, weight, bias, fan)
    return _added(slots if gate is None else slots.mul_(gate.unsqueeze(1)), fan.per_narrow)


def backward(
    grad: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    gate: Optional[Tensor],
    fan: Fan,
    needs: Sequence[bool],
    walk: Any,
) -> List[Optional[Tensor]]:
    """Gradients of rows, weight, bias and gate, those that `needs` asks for."""
    grad_rows = grad_weight = grad_bias = grad_gate = None
    narrow, wide = (grad, rows) if fan.into_experts else (rows, grad)
    if needs[1] or needs[2] or (needs[0] and fan.into_experts):
        placed = walk.place(_spread(narrow, gate, fan.per_narrow), weight, fan)
        if needs[0] and fan.into_experts:
            grad_rows = walk.into_model(placed, weight, fan)
        if needs[1]:
            grad_weight = walk.weight_grad(placed, wide, weight, fan)
        if needs[2]:
            grad_bias = walk.bias_grad(placed, weight, fan)
    if needs[3] or (needs[0] and not fan.into_experts):
        product = walk.into_experts(wide, weight, bias, fan)
        if needs[3]:
            grad_gate = torch.linalg.vecdot(product, _spread(narrow, None, fan.per_narrow))
        if not fan.into_experts:
            grad_rows = _added(product if gate is None else product.mul_(gate.unsqueeze(1)), fan.per_narrow)
    return [grad_rows, grad_weight, grad_bias, grad_gate]
