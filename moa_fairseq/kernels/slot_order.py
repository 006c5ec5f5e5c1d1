"""The expert-sorted order of a batch's slots, computed once and shared by every projection."""

from dataclasses import dataclass
from typing import List

import torch
from torch import Tensor


@dataclass
class SlotOrder:
    """Where each of the N·K slots (token t, choice k; flat index t·K + k) goes when sorted by expert.

    order   [N·K] int64  sorted position → flat slot
    inverse [N·K] int64  flat slot → sorted position
    token   [N·K] int64  sorted position → token
    offsets [E]   int32  end of each expert's rows in the sorted order (cumulative counts)
    per_token            K
    """

    order: Tensor
    inverse: Tensor
    token: Tensor
    offsets: Tensor
    per_token: int

    @classmethod
    def from_index(cls, expert_index: Tensor, num_experts: int) -> "SlotOrder":
        """Sort the slots of `expert_index` [N, K] by expert; ties keep token order."""
        flat = expert_index.reshape(-1)
        sorted_expert, order = torch.sort(flat, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        boundaries = torch.arange(num_experts, device=order.device)
        # searchsorted needs no host synchronisation and no zero-filled histogram
        offsets = torch.searchsorted(sorted_expert, boundaries, right=True, out_int32=True)
        per_token = expert_index.size(-1)
        return cls(order, inverse, order // per_token, offsets, per_token)

    def ends(self) -> List[int]:
        """`offsets` on the host; the one place where the loop over experts synchronises."""
        return self.offsets.tolist()
