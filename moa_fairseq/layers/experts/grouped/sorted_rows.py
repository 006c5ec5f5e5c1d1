"""All experts in one call of torch's grouped_mm, on rows gathered in the order of experts.

This is for GPUs, because nothing waits for the host. Rows are gathered and never scattered: the gradient of a
permutation is the inverse permutation, and the slots of a row are neighbours, so their sum is a plain
reduction. Results of width C are computed in steps of rows or columns, never for all slots at once.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moa_fairseq.layers.experts.expert_permutation import ExpertPermutation

HAS_GROUPED_MM = hasattr(F, "grouped_mm")
_ALIGNMENT = 16  # bytes; grouped_mm requires strides that are multiples of this
# Smaller buffers are computed in one step, because more launches would cost more than the memory
_FREE_ELEMENTS = 8 * 2**20
_UNIT = 128  # the number of rows or columns of a step is a multiple of this


def unsupported_reason(rows: Tensor, weight: Tensor) -> str:
    """Why torch's grouped_mm does not support these rows, or is not faster; "" if it is faster.

    Args:
        rows: inputs, [M, I].
        weight: matrices, [E, O, I].
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
    """(start, end) of steps through `total`, of length _FREE_ELEMENTS // other, but at least `least`."""
    most = max(_FREE_ELEMENTS // max(1, other), least)
    step = max(1, -(-most // _UNIT)) * _UNIT
    return ((start, min(start + step, total)) for start in range(0, max(total, 1), step))


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """The parts side by side, without a copy if there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class SortedRows:
    """A plan of the products of one routing (`ExpertPermutation.plan`), for all experts and slots at once.

    wide_row [S] maps a sorted position to the row of width C, inverse [S] maps a flat slot to its sorted
    position. Results of width D, [S, D], are stored for every slot; results of width C, [S, C], never are.

    Args:
        order: the permutation of the S slots.
        fan: the number of neighbouring slots that share a row of width D.
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
        """Compute the sums of a `Product`.

        Args:
            rows: inputs; up: [N, C]; down: [S / fan, D].
            weight: the experts' matrices, [E, D, C].
            bias: the experts' biases, [E, D], or None; for products up only.
            gate: [S]; None: all gates are 1.
            is_up: whether the product leads up, from C to D.

        Returns:
            The sums; up: [S / fan, D]; down: [N, C].
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
        """Compute the gradients of rows, weight, bias and gate.

        Args:
            grad: the gradient of the result of `forward`.
            rows, weight, bias, gate, is_up: the arguments of `forward`.
            needs: which of the four gradients are needed.

        Returns:
            Four gradients, None for one that is not needed (that of the rows may exist nevertheless).
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
        rows = _joined(parts, 0)
        if bias is not None:
            rows = rows + bias.index_select(0, self.expert.index_select(0, self.order))
        return rows.index_select(0, self.inverse)

    def _arrange(self, slots: Tensor) -> Tensor:
        """Gather slots [S, D] in the order of experts."""
        return slots.index_select(0, self.order)

    def _down(self, arranged: Tensor, weight: Tensor) -> Tensor:
        """Σ_{s of row} slots[s] · weight[e(s)], [S / per_wide, C], in steps of columns."""
        parts = []
        for start, end in _steps(weight.size(2), self.slots, weight.size(1)):
            rows = F.grouped_mm(arranged, weight[:, :, start:end], offs=self.offsets)
            rows = rows.index_select(0, self.inverse)
            # [S, step] → [S / per_wide, step]
            parts.append(rows.view(-1, self.per_wide, end - start).sum(1))
        return _joined(parts, 1)

    def _weight_grad(self, arranged: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
        """Σ_{s of e} slots[s]ᵀ · wide[s // per_wide], [E, D, C]; zeros for an expert without slots.

        In steps of columns.
        """
        parts = []
        for start, end in _steps(weight.size(2), self.slots, weight.size(1)):
            rows = wide[:, start:end].index_select(0, self.wide_row)
            parts.append(F.grouped_mm(arranged.t(), rows, offs=self.offsets))
        return _joined(parts, 2)

    def _bias_grad(self, arranged: Tensor, weight: Tensor) -> Tensor:
        """Σ_{s of e} slots[s], [E, D]."""
        sums = arranged.new_zeros(weight.shape[:2], dtype=torch.float32)
        expert = self.expert.index_select(0, self.order)
        return sums.index_add_(0, expert, arranged.float()).to(arranged.dtype)
