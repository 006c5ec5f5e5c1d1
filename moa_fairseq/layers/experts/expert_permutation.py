"""Which expert serves which slot: sorted once for a batch, shared by the products that use it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Plan = TypeVar("Plan")
# Of Triton's products: whether it leads up, slots per row, slots per sum
Fan = tuple[bool, int, int]


class ExpertPermutation:
    """The permutation of S = N·K slots (token t, choice k; flat index t·K + k) into the order of experts.

    Everything is computed when it is first asked for, and kept.

    Args:
        expert_ids: the experts of each token, [N, K] int64; the K of a token differ.
        num_experts: E.
        in_order: whether K = E and slot k of every token is expert k: then nothing needs sorting.
    """

    def __init__(self, expert_ids: Tensor, num_experts: int, in_order: bool = False):
        self.expert_ids = expert_ids
        self.num_experts = num_experts
        self.in_order = in_order
        self.tokens, self.per_token = expert_ids.shape  # N, K
        self.slots = expert_ids.numel()  # S
        self.ways: dict[tuple[Any, ...], Any] = {}  # what `project` chose for weights of some sizes
        # no cached_property: torch.compile cannot enter its lock
        self._expert: Tensor | None = None
        self._cell: Tensor | None = None
        self._order_and_offsets: tuple[Tensor, Tensor] | None = None
        self._plans: dict[tuple[Callable[..., Any], int], Any] = {}

    @property
    def expert(self) -> Tensor:
        """[S] int64: flat slot → expert."""
        # If all experts are chosen this is a copy, so it is made on demand
        if self._expert is None:
            self._expert = self.expert_ids.reshape(-1)
        return self._expert

    @property
    def cell(self) -> Tensor:
        """[S] int64: flat slot → token · E + expert, its place among every expert of every token."""
        if self._cell is None:
            first = torch.arange(self.tokens, device=self.expert_ids.device) * self.num_experts
            self._cell = (self.expert_ids + first.unsqueeze(1)).view(-1)
        return self._cell

    def sort_by(self, sort: Callable[["ExpertPermutation"], tuple[Tensor, Tensor] | None]) -> None:
        """Let `sort` compute `order` and `offsets` unless they are known.

        Args:
            sort: gets this object, and returns both, or None: then torch sorts.
        """
        if self._order_and_offsets is None:
            self._order_and_offsets = sort(self)

    @property
    def sorted(self) -> tuple[Tensor, Tensor]:
        """`order` and `offsets`."""
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
        """[S] int64, the sorted slots: position in the order of experts → flat slot; ties stay in order."""
        return self.sorted[0]

    @property
    def offsets(self) -> Tensor:
        """[E] int32: end of each expert's positions (cumulative counts)."""
        return self.sorted[1]

    def plan(self, kind: Callable[["ExpertPermutation", int], Plan], fan: int) -> Plan:
        """kind(self, fan), made once: the products of a routing share it.

        Args:
            kind: a class of plans, such as `ExpertLoop`.
            fan: slots of a row of the experts' width.
        """
        key = kind, fan
        if key not in self._plans:
            self._plans[key] = kind(self, fan)
        plan: Plan = self._plans[key]
        return plan
