"""A projection and its gradients from a handful of products, each over all experts and all slots at once.

Results of the experts' width, [S, D], are stored for every slot; those of the model's width, [S, C], never.
"""

import abc
from typing import List, Optional, Sequence

import torch
from torch import Tensor

from moa_fairseq.kernels.slot_order import SlotOrder


class Slotwise(abc.ABC):
    """A plan of the products of one decision (`SlotOrder.plan`) whose subclass has the five products."""

    def __init__(self, order: SlotOrder, per_wide: int, per_narrow: int):
        self.slots, self.per_wide, self.per_narrow = order.slots, per_wide, per_narrow

    @abc.abstractmethod
    def into_experts(self, wide: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        """A_e(s) · wide[s // per_wide] + bias[e(s)] by flat slot: [S / per_wide, C] → [S, D]."""

    @abc.abstractmethod
    def place(self, slots: Tensor, weight: Tensor) -> Tensor:
        """Slots [S, D] as the other products want them."""

    @abc.abstractmethod
    def into_model(self, placed: Tensor, weight: Tensor) -> Tensor:
        """Σ_{s of row} slots[s] · weight[e(s)], [S / per_wide, C]."""

    @abc.abstractmethod
    def weight_grad(self, placed: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
        """Σ_{s of e} slots[s]ᵀ · wide[s // per_wide], [E, D, C]; zeros for an expert without slots."""

    @abc.abstractmethod
    def bias_grad(self, placed: Tensor, weight: Tensor) -> Tensor:
        """Σ_{s of e} slots[s], [E, D]."""

    def forward(
        self, rows: Tensor, weight: Tensor, bias: Optional[Tensor], gate: Optional[Tensor], into_experts: bool
    ) -> Tensor:
        """As kernels.project; gate [S], bias [E, D] into the experts only."""
        if not into_experts:
            return self.into_model(self.place(self._by_slot(rows, gate), weight), weight)
        slots = self.into_experts(rows, weight, bias)
        return self._by_narrow_row(slots, gate)

    def backward(
        self,
        grad: Tensor,
        rows: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        gate: Optional[Tensor],
        into_experts: bool,
        needs: Sequence[bool],
    ) -> List[Optional[Tensor]]:
        """Gradients of rows, weight, bias and gate, those that `needs` asks for."""
        grad_rows = grad_weight = grad_bias = grad_gate = None
        narrow, wide = (grad, rows) if into_experts else (rows, grad)
        if needs[1] or needs[2] or (needs[0] and into_experts):
            placed = self.place(self._by_slot(narrow, gate), weight)
            if needs[0] and into_experts:
                grad_rows = self.into_model(placed, weight)
            if needs[1]:
                grad_weight = self.weight_grad(placed, wide, weight)
            if needs[2]:
                grad_bias = self.bias_grad(placed, weight)
        if needs[3] or (needs[0] and not into_experts):
            product = self.into_experts(wide, weight, bias)
            if needs[3]:
                grad_gate = torch.linalg.vecdot(product, self._by_slot(narrow, None))
            if not into_experts:
                grad_rows = self._by_narrow_row(product, gate)
        return [grad_rows, grad_weight, grad_bias, grad_gate]

    def _by_slot(self, narrow: Tensor, gate: Optional[Tensor]) -> Tensor:
        """gate[s] · narrow[s // per_narrow]: [S / per_narrow, D] → [S, D]"""
        if self.per_narrow == 1:
            return narrow if gate is None else narrow * gate.unsqueeze(1)
        slots = narrow.unsqueeze(1).expand(-1, self.per_narrow, -1)
        if gate is not None:
            slots = slots * gate.view(-1, self.per_narrow, 1)
        return slots.reshape(-1, narrow.size(1))

    def _by_narrow_row(self, slots: Tensor, gate: Optional[Tensor]) -> Tensor:
        """Σ_{s of row} gate[s] · slots[s]: [S, D], which is overwritten → [S / per_narrow, D]"""
        slots = slots if gate is None else slots.mul_(gate.unsqueeze(1))
        return slots if self.per_narrow == 1 else slots.view(-1, self.per_narrow, slots.size(1)).sum(1)
