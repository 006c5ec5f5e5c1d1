"""All experts at once by torch's grouped_mm: rows are gathered in expert order, one call multiplies them.

For GPUs: nothing waits for the host. Rows are only ever gathered, never scattered: a permutation's
gradient is the inverse permutation, and the slots of a row are neighbours, so their sum is a plain
reduction. Results of the model's width are made in steps of rows or columns, never for all slots at once.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moa_fairseq.layers.experts.expert_permutation import ExpertPermutation

HAS_GROUPED_MM = hasattr(F, "grouped_mm")
_ALIGNMENT = 16  # bytes; grouped_mm demands strides that are multiples of it
# A buffer of this size is never cut: launches would cost more than it does
_FREE_ELEMENTS = 8 * 2**20
_UNIT = 128  # rows or columns of a step are a multiple of it


def unsupported_reason(rows: Tensor, weight: Tensor) -> str:
    """Why torch's grouped_mm does not multiply these rows, or is not faster; "" if it is.

    Args:
        rows: [M, I].
        weight: [E, O, I].
    """
    if not HAS_GROUPED_MM or rows.dtype != weight.dtype or rows.size(0) == 0:
        return "torch has no grouped_mm, or not for these rows"
    if not rows.is_cuda or rows.dtype != torch.bfloat16:
        return "elsewhere it is a loop that waits for the host, no faster than ours"
    if torch.version.hip is None and torch.cuda.get_device_properties(rows.device).major != 9:
        return "Ampere has that loop, too, and Blackwell wrong gradients for an expert without rows"
    unit = _ALIGNMENT // rows.element_size()
    if any(size % unit for size in (rows.size(1), weight.size(1), weight.size(2))):
        return f"its rows must be multiples of {_ALIGNMENT} bytes"
    return ""


def _steps(total: int, other: int, least: int) -> Iterator[tuple[int, int]]:
    """(start, end) of steps through `total`: of _FREE_ELEMENTS // other, or of `least` if that is more."""
    most = max(_FREE_ELEMENTS // max(1, other), least)
    step = max(1, -(-most // _UNIT)) * _UNIT
    return ((start, min(start + step, total)) for start in range(0, max(total, 1), step))


class SortedRows:
    """A plan of one routing's products (`ExpertPermutation.plan`), each over all experts and slots at once.

    wide_row [S]: sorted position → wide row; inverse [S]: flat slot → sorted position. Results of the
    experts' width, [S, D], are stored for every slot; those of the model's width, [S, C], never.

    Args:
        order: of the S slots.
        fan: how many neighbouring slots share a row of the experts' width.
    """

    def __init__(self, order: ExpertPermutation, fan: int):
        self.slots = order.slots
        self.per_wide = order.per_token
        self.per_narrow = fan
        self.expert = order.expert
        self.order = order.order
        self.offsets = order.offsets
        self.inverse = torch.empty_like(self.order)
        self.inverse[self.order] = torch.arange(self.slots, device=self.order.device)
        if self.per_wide == 1:
            self.wide_row = self.order
        else:
            self.wide_row = self.order // self.per_wide

    def forward(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, is_up: bool
    ) -> Tensor:
        """The sums of a `Product`.

        Args:
            rows: up: [N, C]; down: [S / fan, D].
            weight: [E, D, C].
            bias: [E, D] or None; of a product up only.
            gate: [S] or None for ones.
            is_up: the direction.

        Returns:
            Up: [S / fan, D]; down: [N, C].
        """
        if not is_up:
            return self._down(self._arrange(self._by_slot(rows, gate)), weight)
        slots = self._up(rows, weight, bias)
        return self._by_narrow_row(slots, gate)

    def backward(
        self,
        grad: Tensor,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gate: Tensor | None,
        is_up: bool,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """Gradients of rows, weight, bias and gate, those that `needs` asks for.

        Args:
            grad: of the result of `forward`.
            rows, weight, bias, gate, is_up: as `forward` had them.
            needs: which of the four gradients are asked for.

        Returns:
            Four gradients, None where none is asked for; the one of the rows may be there unasked.
        """
        grad_rows = grad_weight = grad_bias = grad_gate = None
        if is_up:
            narrow = grad
            wide = rows
        else:
            narrow = rows
            wide = grad
        if needs[1] or needs[2] or (needs[0] and is_up):
            arranged = self._arrange(self._by_slot(narrow, gate))
            if needs[0] and is_up:
                grad_rows = self._down(arranged, weight)
            if needs[1]:
                grad_weight = self._weight_grad(arranged, wide, weight)
            if needs[2]:
                grad_bias = self._bias_grad(arranged, weight)
        if needs[3] or (needs[0] and not is_up):
            product = self._up(wide, weight, bias)
            if needs[3]:
                grad_gate = torch.linalg.vecdot(product, self._by_slot(narrow, None))
            if not is_up:
                grad_rows = self._by_narrow_row(product, gate)
        return [grad_rows, grad_weight, grad_bias, grad_gate]

    def _by_slot(self, narrow: Tensor, gate: Tensor | None) -> Tensor:
        """gate[s] · narrow[s // per_narrow]: [S / per_narrow, D] → [S, D]"""
        if self.per_narrow == 1:
            if gate is None:
                return narrow
            return narrow * gate.unsqueeze(1)
        slots = narrow.unsqueeze(1).expand(-1, self.per_narrow, -1)
        if gate is not None:
            slots = slots * gate.view(-1, self.per_narrow, 1)
        return slots.reshape(-1, narrow.size(1))

    def _by_narrow_row(self, slots: Tensor, gate: Tensor | None) -> Tensor:
        """Σ_{s of row} gate[s] · slots[s]: [S, D], which is overwritten → [S / per_narrow, D]"""
        if gate is not None:
            slots = slots.mul_(gate.unsqueeze(1))
        if self.per_narrow == 1:
            return slots
        return slots.view(-1, self.per_narrow, slots.size(1)).sum(1)

    def _up(self, wide: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A_e(s) · wide[s // per_wide] + bias[e(s)] by flat slot: [S / per_wide, C] → [S, D].

        In steps of sorted positions: only the narrow product is kept.
        """
        matrices = weight.transpose(1, 2)
        parts = []
        for start, end in _steps(
            self.slots, wide.size(1), self.slots * weight.size(1) // wide.size(1)
        ):
            is_single_step = end - start == self.slots
            ends = self.offsets
            if not is_single_step:
                ends = (self.offsets - start).clamp(0, end - start)
            parts.append(
                F.grouped_mm(wide.index_select(0, self.wide_row[start:end]), matrices, offs=ends)
            )
        if len(parts) == 1:
            rows = parts[0]
        else:
            rows = torch.cat(parts)
        if bias is not None:
            rows = rows + bias.index_select(0, self.expert.index_select(0, self.order))
        return rows.index_select(0, self.inverse)

    def _arrange(self, slots: Tensor) -> Tensor:
        """[S, D] in the order of experts."""
        return slots.index_select(0, self.order)

    def _down(self, arranged: Tensor, weight: Tensor) -> Tensor:
        """Σ_{s of row} slots[s] · weight[e(s)], [S / per_wide, C], in steps of columns."""
        parts = []
        for start, end in _steps(weight.size(2), self.slots, weight.size(1)):
            rows = F.grouped_mm(arranged, weight[:, :, start:end], offs=self.offsets)
            rows = rows.index_select(0, self.inverse)
            # [S, step] → [S / per_wide, step]
            parts.append(rows.view(-1, self.per_wide, end - start).sum(1))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, 1)

    def _weight_grad(self, arranged: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
        """Σ_{s of e} slots[s]ᵀ · wide[s // per_wide], [E, D, C]; zeros for an expert without slots.

        In steps of columns.
        """
        parts = []
        for start, end in _steps(weight.size(2), self.slots, weight.size(1)):
            rows = wide[:, start:end].index_select(0, self.wide_row)
            parts.append(F.grouped_mm(arranged.t(), rows, offs=self.offsets))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, 2)

    def _bias_grad(self, arranged: Tensor, weight: Tensor) -> Tensor:
        """Σ_{s of e} slots[s], [E, D]."""
        sums = arranged.new_zeros(weight.shape[:2], dtype=torch.float32)
        expert = self.expert.index_select(0, self.order)
        return sums.index_add_(0, expert, arranged.float()).to(arranged.dtype)
