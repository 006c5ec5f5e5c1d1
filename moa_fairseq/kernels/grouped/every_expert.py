"""Every expert on every wide row in one GEMM, then those that were chosen: for few rows or small experts.

Does E / K times the arithmetic, but has no step per expert: no loop, no wait for the host, no sorting.
The functions are those that `slotwise` describes.
"""

from typing import Optional

import torch
from torch import Tensor

from moa_fairseq.kernels.slot_order import Fan


def into_experts(wide: Tensor, weight: Tensor, bias: Optional[Tensor], fan: Fan) -> Tensor:
    """[S / per_wide, C] → [S, D]"""
    matrix = weight.flatten(0, 1).t()
    every = wide @ matrix if bias is None else torch.addmm(bias.flatten(), wide, matrix)
    return every.view(-1, weight.size(1)).index_select(0, fan.order.cells(fan.per_wide))


def place(slots: Tensor, weight: Tensor, fan: Fan) -> Tensor:
    """[S, D] → [S / per_wide, E·D]: each slot at its expert's place, zeros elsewhere."""
    num_experts, dim, _ = weight.shape
    rows = fan.slots // fan.per_wide
    cells = slots.new_zeros(rows * num_experts, dim)
    return cells.index_copy_(0, fan.order.cells(fan.per_wide), slots).view(rows, num_experts * dim)


def into_model(placed: Tensor, weight: Tensor, fan: Fan) -> Tensor:
    """[S / per_wide, E·D] → [S / per_wide, C]"""
    return placed @ weight.flatten(0, 1)


def weight_grad(placed: Tensor, wide: Tensor, weight: Tensor, fan: Fan) -> Tensor:
    return (placed.t() @ wide).view_as(weight)


def bias_grad(placed: Tensor, weight: Tensor, fan: Fan) -> Tensor:
    return placed.sum(0).view(weight.shape[:2])
