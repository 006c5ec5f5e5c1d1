"""Which expert serves which slot: sorted once for a batch, shared by every projection that uses it."""

from typing import Any, Callable, Dict, Optional, Tuple, TypeVar

import torch
from torch import Tensor

Plan = TypeVar("Plan")
Fan = Tuple[bool, int, int]  # of a product: whether it leads into the experts, slots per row, slots per sum


class SlotOrder:
    """The S = N·K slots of N tokens (token t, choice k; flat index t·K + k) and their experts.

    expert_index  [N, K] int64, each below num_experts; the K of a token differ
    num_experts   E
    in_order      whether K = E and slot k of every token is expert k: then nothing needs sorting

    Everything else is computed when it is first asked for, and kept.
    """

    def __init__(self, expert_index: Tensor, num_experts: int, in_order: bool = False):
        self._expert_index = expert_index
        self.num_experts, self.per_token, self.in_order = num_experts, expert_index.size(-1), in_order
        self.slots = expert_index.numel()  # S
        # no cached_property: torch.compile cannot enter its lock
        self._expert: Optional[Tensor] = None
        self._order_and_offsets: Optional[Tuple[Tensor, Tensor]] = None
        self._plans: Dict[Tuple[Callable[..., Any], int, int], Any] = {}

    @property
    def expert(self) -> Tensor:
        """[S] int64: flat slot → expert."""
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

    def plan(self, kind: Callable[["SlotOrder", int, int], Plan], per_wide: int, per_narrow: int) -> Plan:
        """kind(self, per_wide, per_narrow), made once: the products of a decision share it.

        A product's wide side has the model's width C, its narrow side the experts' D. `per_wide` neighbouring
        slots share a wide row, `per_narrow` a narrow one.
        """
        key = kind, per_wide, per_narrow
        if key not in self._plans:
            self._plans[key] = kind(self, per_wide, per_narrow)
        plan: Plan = self._plans[key]
        return plan
