"""The obvious backend: every expert on every row, then pick. Slow, differentiable twice, easy to check."""

from typing import Optional

import torch
from torch import Tensor

from moa_fairseq.kernels.slot_order import Fan


def project(rows: Tensor, weight: Tensor, bias: Optional[Tensor], gate: Optional[Tensor], fan: Fan) -> Tensor:
    """sums[m] = Σ_{s of m} gate[s] · (A_e · rows[s // slots_per_row] + bias[e]), e being the slot's expert.

    A_e is weight[e] into the experts, its transpose into the model. rows [R, C or D], weight [E, D, C],
    gate [S] → [S / slots_per_sum, D or C]. bias [E, D]: into the experts only.
    """
    dim = weight.size(1)
    if fan.into_experts:
        every_expert = torch.einsum("rc,edc->red", rows, weight)
        if bias is not None:
            every_expert = every_expert + bias
        index = fan.order.expert.view(rows.size(0), fan.slots_per_row, 1).expand(-1, -1, dim)
        slots = _gated(every_expert.gather(1, index).view(-1, dim), gate)
        return slots.view(fan.sums, fan.slots_per_sum, dim).sum(1)
    slots = _gated(rows.repeat_interleave(fan.slots_per_row, 0), gate)
    index = fan.order.expert.view(fan.sums, fan.slots_per_sum, 1).expand(-1, -1, dim)
    every_expert = slots.new_zeros(fan.sums, weight.size(0), dim)
    every_expert = every_expert.scatter_add(1, index, slots.view(index.shape))
    return torch.einsum("med,edc->mc", every_expert, weight)


def _gated(slots: Tensor, gate: Optional[Tensor]) -> Tensor:
    return slots if gate is None else slots * gate.unsqueeze(1)
