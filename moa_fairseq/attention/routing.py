"""What a router says about a batch of tokens."""

from dataclasses import dataclass
from functools import cached_property
from typing import Optional

from torch import Tensor

from moa_fairseq.kernels.slot_order import SlotOrder


@dataclass
class RoutingDecision:
    """The experts chosen for N tokens, and how sure the router was.

    expert_index [N, K] int64  the chosen experts (MoA Eq. 8); arange(E) in every row when K = E
    gate         [N, K] float32  their weights (MoA Eq. 9); zero on padding
    probs        [N, E] float32  routing probabilities (MoA Eq. 7)
    logits       [N, E] float32  before the softmax
    padding_mask [N] bool, or None when there is none; True marks padding
    time_first   whether the N = B·T positions stand as [T, B], or else as [B, T], flattened; N = B where
                 a sequence has one decision
    """

    expert_index: Tensor
    gate: Tensor
    probs: Tensor
    logits: Tensor
    padding_mask: Optional[Tensor] = None
    time_first: bool = False

    @property
    def num_experts(self) -> int:
        return self.probs.size(1)

    @property
    def chooses_all(self) -> bool:
        """Whether K = E: slot k is expert k, nothing needs sorting."""
        return self.expert_index.size(1) == self.num_experts

    @cached_property
    def kept(self) -> Tensor:
        """1 for real tokens, 0 for padding: [N] in the probabilities' dtype."""
        if self.padding_mask is None:
            return self.probs.new_ones(self.probs.size(0))
        return (~self.padding_mask).to(self.probs.dtype)

    @cached_property
    def expert_counts(self) -> Tensor:
        """f_i of MoA Eq. 14: how many tokens chose each expert, [E] float64, padding excluded."""
        kept = self.kept.double().unsqueeze(1).expand(self.expert_index.shape)
        counts = kept.new_zeros(self.num_experts)
        return counts.scatter_add(0, self.expert_index.reshape(-1), kept.reshape(-1))

    @cached_property
    def slot_order(self) -> Optional[SlotOrder]:
        """Slots sorted by expert, computed at the first use and shared afterwards; None when K = E."""
        if self.chooses_all:
            return None
        return SlotOrder.from_index(self.expert_index, self.num_experts)
