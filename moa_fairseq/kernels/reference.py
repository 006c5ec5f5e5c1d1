"""The obvious backend: every expert on every row, then pick. Slow, differentiable twice, easy to check."""

from typing import Optional

import torch
from torch import Tensor

from moa_fairseq.kernels.slot_order import Fan, SlotOrder


def project(
    rows: Tensor, weight: Tensor, bias: Optional[Tensor], gate: Optional[Tensor], order: SlotOrder, fan: Fan
) -> Tensor:
    """sums[m] = Σ_{s of m} gate[s] · (A_e · rows[s // slots_per_row] + bias[e]), e being the slot's expert.

    A_e is weight[e] into the experts, its transpose into the model. rows [R, C or D], weight [E, D, C],
    gate [S] → [S / slots_per_sum, D or C]. bias [E, D]: into the experts only.
    """
    into_experts, slots_per_row, slots_per_sum = fan
    (num_experts, dim, _), sums = weight.shape, order.slots // slots_per_sum
    share = 1.0 if gate is None else gate.unsqueeze(1)
    if into_experts:
        every_expert = torch.einsum("rc,edc->red", rows, weight)
        if bias is not None:
            every_expert = every_expert + bias
        index = order.expert.view(rows.size(0), slots_per_row, 1).expand(-1, -1, dim)
        slots = every_expert.gather(1, index).view(-1, dim) * share  # [R, S / R, D] → [S, D]
        return slots.view(sums, slots_per_sum, dim).sum(1)
    slots = rows.repeat_interleave(slots_per_row, 0) * share
    index = order.expert.view(sums, slots_per_sum, 1).expand(-1, -1, dim)
    every_expert = slots.new_zeros(sums, num_experts, dim).scatter_add(1, index, slots.view(index.shape))
    return torch.einsum("med,edc->mc", every_expert, weight)
