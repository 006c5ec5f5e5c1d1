"""The expert of each slot, sorted once for a batch, for all products that use it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Plan = TypeVar("Plan")
# Arguments of Triton's products: whether a product leads up, slots of each row, slots of each sum
Fan = tuple[bool, int, int]


class ExpertPermutation:
    """The permutation of S = N·K slots (token t, choice k; flat index t·K + k) into the order of experts.

    Every property is computed on first use, and cached.

    Args:
        expert_ids: the experts of each token, [N, K] int64; the K experts of a token differ.
        num_experts: E.
        in_order: whether K = E and slot k of every token is expert k, so that nothing needs sorting.
    """

    def __init__(self, expert_ids: Tensor, num_experts: int, in_order: bool = False):
        self.expert_ids = expert_ids
        self.num_experts = num_experts
        self.in_order = in_order
        self.tokens, self.per_token = expert_ids.shape  # N, K
        self.slots = expert_ids.numel()  # S
        self.ways: dict[tuple[Any, ...], Any] = {}  # the ways that `project` selected, by sizes
        # Not cached_property, because torch.compile cannot enter its lock
        self._expert: Tensor | None = None
        self._cell: Tensor | None = None
        self._order_and_offsets: tuple[Tensor, Tensor] | None = None
        self._plans: dict[tuple[Callable[..., Any], int], Any] = {}

    @property
    def expert(self) -> Tensor:
        """The expert of each flat slot, [S] int64."""
        # If all experts are selected this is a copy, so it is made on demand
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
        """Let `sort` compute `order` and `offsets`, unless they are cached.

        Args:
            sort: takes this object, and returns both; None: torch sorts.
        """
        if self._order_and_offsets is None:
            self._order_and_offsets = sort(self)

    @property
    def sorted(self) -> tuple[Tensor, Tensor]:
        """`order` and `offsets`."""
        if self._order_and_offsets is None:
            expert = self.expert
            if self.num_experts <= 256 and expert.is_cuda:
                # A radix sort takes one pass for each byte of the keys
                expert = expert.to(torch.uint8)
            sorted_expert, order = torch.sort(expert, stable=True)
            boundaries = torch.arange(self.num_experts, device=order.device, dtype=expert.dtype)
            # searchsorted needs no zero-filled histogram
            offsets = torch.searchsorted(sorted_expert, boundaries, right=True, out_int32=True)
            self._order_and_offsets = order, offsets
        return self._order_and_offsets

    @property
    def order(self) -> Tensor:
        """The flat slots in the order of experts, [S] int64; the slots of an expert stay in order."""
        return self.sorted[0]

    @property
    def offsets(self) -> Tensor:
        """The end of each expert's slots in `order` (cumulative counts), [E] int32."""
        return self.sorted[1]

    def plan(self, kind: Callable[["ExpertPermutation", int], Plan], fan: int) -> Plan:
        """kind(self, fan), which is cached: all products of a routing share it.

        Args:
            kind: a class of plans, such as `ExpertLoop`.
            fan: the number of neighbouring slots that share a row of width D.
        """
        key = kind, fan
        if key not in self._plans:
            self._plans[key] = kind(self, fan)
        plan: Plan = self._plans[key]
        return plan
