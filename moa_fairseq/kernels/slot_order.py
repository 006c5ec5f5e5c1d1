"""Which expert serves which slot: sorted once for a batch, shared by every projection that uses it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

# An expert's rows are processed in pieces of about this size, so that gathered rows take little memory.
# Shorter pieces cost time (512: 2 % of a layer of 16K32E256D on two CPU cores), longer ones gain nothing.
_PIECE = 1024


class SlotOrder:
    """The S = N·K slots of N tokens (token t, choice k; flat index t·K + k) and their experts.

    num_experts  E
    per_token    K
    in_order     whether K = E and slot k of every token is expert k: then nothing needs sorting

    Everything else is computed when it is first asked for, and kept.
    """

    def __init__(self, expert_index: Tensor, num_experts: int, in_order: bool = False):
        self._expert_index = expert_index
        self.num_experts = num_experts
        self.per_token = expert_index.size(-1)
        self.in_order = in_order
        self._owners: Dict[int, Tensor] = {}
        self._cells: Dict[int, Tensor] = {}
        # no cached_property: torch.compile cannot enter its lock
        self._expert: Optional[Tensor] = None
        self._order_and_offsets: Optional[Tuple[Tensor, Tensor]] = None

    @classmethod
    def from_index(cls, expert_index: Tensor, num_experts: int, in_order: bool = False) -> "SlotOrder":
        """The order of the chosen experts `expert_index` [N, K] int64, each below num_experts."""
        return cls(expert_index, num_experts, in_order)

    @property
    def slots(self) -> int:
        """S = N·K."""
        return self._expert_index.numel()

    @property
    def expert(self) -> Tensor:
        """[S] int64: flat slot → expert; the K slots of a token have different experts."""
        if self._expert is None:  # if all experts are chosen this is a copy, so it is made on demand
            self._expert = self._expert_index.reshape(-1)
        return self._expert

    def sort_by(self, sort: Callable[["SlotOrder"], Optional[Tuple[Tensor, Tensor]]]) -> None:
        """Let `sort` compute (order, offsets) unless they are known; if it returns None, torch sorts."""
        if self._order_and_offsets is None:
            self._order_and_offsets = sort(self)

    @property
    def _sorted(self) -> Tuple[Tensor, Tensor]:
        if self._order_and_offsets is None:
            expert = self.expert
            if self.num_experts <= 256 and expert.is_cuda:
                expert = expert.to(torch.uint8)  # radix sort: one pass for each byte of the keys
            sorted_expert, order = torch.sort(expert, stable=True)
            boundaries = torch.arange(self.num_experts, device=order.device, dtype=expert.dtype)
            # searchsorted needs no zero-filled histogram
            offsets = torch.searchsorted(sorted_expert, boundaries, right=True, out_int32=True)
            self._order_and_offsets = order, offsets
        return self._order_and_offsets

    @property
    def order(self) -> Tensor:
        """[S] int64: position in the order of experts → flat slot; ties keep the slots' order."""
        return self._sorted[0]

    @property
    def offsets(self) -> Tensor:
        """[E] int32: end of each expert's positions (cumulative counts)."""
        return self._sorted[1]

    @cached_property
    def inverse(self) -> Tensor:
        """[S] int64: flat slot → position."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(self.order.numel(), device=self.order.device)
        return inverse

    def owner(self, slots_each: int) -> Tensor:
        """[S] int64: position → the row that owns the slot, where a row owns `slots_each` neighbours."""
        if slots_each == 1:
            return self.order
        if slots_each not in self._owners:
            self._owners[slots_each] = self.order // slots_each
        return self._owners[slots_each]

    def cells(self, slots_each: int) -> Tensor:
        """[S] int64: flat slot → row · E + expert, its place among every expert of every row."""
        if slots_each not in self._cells:
            rows = self.slots // slots_each
            first = torch.arange(0, rows * self.num_experts, self.num_experts, device=self.expert.device)
            cells = self.expert.view(rows, slots_each) + first.unsqueeze(1)
            self._cells[slots_each] = cells.view(-1)
        return self._cells[slots_each]

    @cached_property
    def pieces(self) -> "Pieces":
        """Each expert's positions in pieces; the one place that waits for a GPU."""
        return Pieces(self)


class Pieces:
    """The positions of each expert, one piece after the other.

    experts   the expert of each piece; a large share makes several pieces, none is empty
    unchosen  the experts without a piece
    """

    def __init__(self, order: SlotOrder):
        self.experts: List[int] = []
        self.unchosen: List[int] = []
        self._lengths: List[int] = []
        self._order = order
        self._owners: Dict[int, Tuple[Tensor, ...]] = {}
        start = 0
        for expert, end in enumerate(order.offsets.tolist()):
            if end == start:
                self.unchosen.append(expert)
            else:  # even shares: a short remainder would cost the calls of a long piece
                pieces = max(1, round((end - start) / _PIECE))
                least, longer = divmod(end - start, pieces)
                self.experts += [expert] * pieces
                self._lengths += [least + 1] * longer + [least] * (pieces - longer)
            start = end

    def owner(self, slots_each: int) -> Tuple[Tensor, ...]:
        """`SlotOrder.owner`, a tensor per piece."""
        if slots_each not in self._owners:
            self._owners[slots_each] = torch.split(self._order.owner(slots_each), self._lengths)
        return self._owners[slots_each]

    def column(self, gate: Optional[Tensor]) -> Sequence[Optional[Tensor]]:
        """gate [S] or None → [rows of the piece, 1] or None, one per piece."""
        if gate is None:
            return [None] * len(self.experts)
        sorted_gate = gate.index_select(0, self._order.order).unsqueeze(1)
        return torch.split(sorted_gate, self._lengths)


@dataclass(frozen=True)
class Fan:
    """How one projection's slots read its rows and are added to its sums.

    Slot s reads row s // slots_per_row and is added to sum s // slots_per_sum. The wide side has the
    model's width C, the narrow side the experts' width D: rows are wide and sums narrow if the product
    goes into the experts, and the reverse if it goes into the model.
    """

    order: SlotOrder
    into_experts: bool
    slots_per_row: int
    slots_per_sum: int

    @property
    def slots(self) -> int:
        return self.order.slots

    @property
    def sums(self) -> int:
        return self.slots // self.slots_per_sum

    @property
    def per_wide(self) -> int:
        return self.slots_per_row if self.into_experts else self.slots_per_sum

    @property
    def per_narrow(self) -> int:
        return self.slots_per_sum if self.into_experts else self.slots_per_row

    @property
    def is_plain(self) -> bool:
        """Whether each slot has a narrow row of its own: MoA's queries and outputs."""
        return self.per_narrow == 1
