"""Every expert on every wide row in one GEMM, then those that were chosen: for few rows or small experts.

Does E / K times the arithmetic, but has no step per expert: no loop, no wait for the host, no sorting.
"""

from typing import Optional

import torch
from torch import Tensor

from moa_fairseq.kernels.grouped.slotwise import Slotwise
from moa_fairseq.kernels.slot_order import SlotOrder


class EveryExpert(Slotwise):
    """cell [S] int64: flat slot → wide row · E + expert, its place among every expert of every row."""

    def __init__(self, order: SlotOrder, per_wide: int, per_narrow: int):
        super().__init__(order, per_wide, per_narrow)
        rows, experts = order.slots // per_wide, order.num_experts
        first = torch.arange(0, rows * experts, experts, device=order.expert.device)
        self.cell = (order.expert.view(rows, per_wide) + first.unsqueeze(1)).view(-1)

    def into_experts(self, wide: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        matrix = weight.flatten(0, 1).t()  # [E, D, C] → [C, E·D]
        every = wide @ matrix if bias is None else torch.addmm(bias.flatten(), wide, matrix)
        # [S / per_wide, E·D] → [S / per_wide · E, D] → [S, D]
        return every.view(-1, weight.size(1)).index_select(0, self.cell)

    def place(self, slots: Tensor, weight: Tensor) -> Tensor:
        """[S, D] → [S / per_wide, E·D]: each slot at its expert's place, zeros elsewhere."""
        num_experts, dim, _ = weight.shape
        rows = self.slots // self.per_wide
        cells = slots.new_zeros(rows * num_experts, dim)
        return cells.index_copy_(0, self.cell, slots).view(rows, num_experts * dim)

    def into_model(self, placed: Tensor, weight: Tensor) -> Tensor:
        return placed @ weight.flatten(0, 1)  # [S / per_wide, E·D] · [E·D, C]

    def weight_grad(self, placed: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
        return (placed.t() @ wide).view_as(weight)  # [E·D, C] → [E, D, C]

    def bias_grad(self, placed: Tensor, weight: Tensor) -> Tensor:
        return placed.sum(0).view(weight.shape[:2])  # [E·D] → [E, D]
