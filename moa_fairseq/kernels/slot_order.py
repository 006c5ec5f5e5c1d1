"""The expert-sorted order of a batch's slots, computed once and shared by every projection."""

from dataclasses import dataclass
from functools import cached_property
from typing import List, Tuple

import torch
from torch import Tensor


@dataclass
class SlotOrder:
    """Where each of the N·K slots (token t, choice k; flat index t·K + k) goes when sorted by expert.

    order   [N·K] int64  sorted position → flat slot
    token   [N·K] int64  sorted position → token
    offsets [E]   int32  end of each expert's rows in the sorted order (cumulative counts)
    expert  [N·K] int64  flat slot → expert
    per_token            K
    """

    order: Tensor
    token: Tensor
    offsets: Tensor
    expert: Tensor
    per_token: int

    @classmethod
    def from_index(cls, expert_index: Tensor, num_experts: int) -> "SlotOrder":
        """Sort the slots of `expert_index` [N, K] by expert; ties keep token order."""
        flat = expert_index.reshape(-1)
        sorted_expert, order = torch.sort(flat, stable=True)
        boundaries = torch.arange(num_experts, device=order.device)
        # searchsorted needs no zero-filled histogram
        offsets = torch.searchsorted(sorted_expert, boundaries, right=True, out_int32=True)
        per_token = expert_index.size(-1)
        return cls(order, order // per_token, offsets, flat, per_token)

    @cached_property
    def inverse(self) -> Tensor:
        """[N·K] int64: flat slot → sorted position."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(self.order.numel(), device=self.order.device)
        return inverse

    @cached_property
    def cell(self) -> Tensor:
        """[N·K] int64: flat slot → token · E + expert, its place among every expert of every token."""
        tokens = self.expert.numel() // self.per_token
        first = torch.arange(tokens, device=self.expert.device) * self.offsets.numel()
        return (self.expert.view(tokens, self.per_token) + first.unsqueeze(1)).view(-1)

    @cached_property
    def by_expert(self) -> List[Tuple[Tensor, Tensor]]:
        """(tokens, slots) of each expert, int64; the one place that waits for a GPU."""
        ends = self.offsets.tolist()
        counts = [end - start for start, end in zip([0, *ends], ends)]
        return list(zip(self.token.split(counts), self.order.split(counts)))
