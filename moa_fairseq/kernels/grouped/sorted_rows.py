"""All experts at once by torch's grouped_mm: rows are gathered in expert order, one call multiplies them.

For GPUs: nothing waits for the host. Rows are only ever gathered, never scattered: a permutation's
gradient is the inverse permutation, and the slots of a row are neighbours, so their sum is a plain
reduction. Results of the model's width are made in steps of rows or columns, never for all slots at once.
"""

from typing import Iterator, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moa_fairseq.kernels.grouped.slotwise import Slotwise
from moa_fairseq.kernels.slot_order import SlotOrder

HAS_GROUPED_MM = hasattr(F, "grouped_mm")
_ALIGNMENT = 16  # bytes; grouped_mm demands strides that are multiples of it
_FREE_ELEMENTS = 8 * 2**20  # a buffer of this size is never cut: launches would cost more than it does
_UNIT = 128  # rows or columns of a step are a multiple of it


def takes(rows: Tensor, weight: Tensor) -> bool:
    """Whether grouped_mm accepts rows [M, I] times weight [E, O, I] transposed, and is faster."""
    if not HAS_GROUPED_MM or rows.dtype != weight.dtype or rows.size(0) == 0:
        return False
    if not rows.is_cuda or rows.dtype != torch.bfloat16:
        return False  # elsewhere it is a loop that waits for the host: no faster than ours
    if torch.version.hip is None and torch.cuda.get_device_properties(rows.device).major != 9:
        return False  # Ampere has that loop, too, and Blackwell wrong gradients for an expert without rows
    unit = _ALIGNMENT // rows.element_size()
    return all(size % unit == 0 for size in (rows.size(1), weight.size(1), weight.size(2)))


def _steps(total: int, other: int, least: int) -> Iterator[Tuple[int, int]]:
    """(start, end) of steps through `total`: of _FREE_ELEMENTS // other, or of `least` if that is more."""
    most = max(_FREE_ELEMENTS // max(1, other), least)
    step = max(1, -(-most // _UNIT)) * _UNIT
    return ((start, min(start + step, total)) for start in range(0, max(total, 1), step))


class SortedRows(Slotwise):
    """wide_row [S]: sorted position → wide row; inverse [S]: flat slot → sorted position."""

    def __init__(self, order: SlotOrder, per_wide: int, per_narrow: int):
        super().__init__(order, per_wide, per_narrow)
        self.expert, self.order, self.offsets = order.expert, order.order, order.offsets
        self.inverse = torch.empty_like(self.order)
        self.inverse[self.order] = torch.arange(self.slots, device=self.order.device)
        self.wide_row = self.order if per_wide == 1 else self.order // per_wide

    def into_experts(self, wide: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        """In steps of sorted positions: only the narrow product is kept."""
        matrices, parts = weight.transpose(1, 2), []
        for start, end in _steps(self.slots, wide.size(1), self.slots * weight.size(1) // wide.size(1)):
            whole = end - start == self.slots
            ends = self.offsets if whole else (self.offsets - start).clamp(0, end - start)
            parts.append(F.grouped_mm(wide.index_select(0, self.wide_row[start:end]), matrices, offs=ends))
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        if bias is not None:
            rows = rows + bias.index_select(0, self.expert.index_select(0, self.order))
        return rows.index_select(0, self.inverse)

    def place(self, slots: Tensor, weight: Tensor) -> Tensor:
        """[S, D] in expert order."""
        return slots.index_select(0, self.order)

    def into_model(self, placed: Tensor, weight: Tensor) -> Tensor:
        """In steps of columns."""
        parts = []
        for start, end in _steps(weight.size(2), self.slots, weight.size(1)):
            rows = F.grouped_mm(placed, weight[:, :, start:end], offs=self.offsets)
            rows = rows.index_select(0, self.inverse)
            parts.append(rows.view(-1, self.per_wide, end - start).sum(1))  # [S, step] → [S / per_wide, step]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def weight_grad(self, placed: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
        """In steps of columns. The gradient of an expert without rows is zero, not missing."""
        parts = []
        for start, end in _steps(weight.size(2), self.slots, weight.size(1)):
            rows = wide[:, start:end].index_select(0, self.wide_row)
            parts.append(F.grouped_mm(placed.t(), rows, offs=self.offsets))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def bias_grad(self, placed: Tensor, weight: Tensor) -> Tensor:
        sums = placed.new_zeros(weight.shape[:2], dtype=torch.float32)
        expert = self.expert.index_select(0, self.order)
        return sums.index_add_(0, expert, placed.float()).to(placed.dtype)
