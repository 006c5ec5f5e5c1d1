"""What a router says about a batch of tokens."""

from dataclasses import dataclass
from functools import cached_property
from typing import Optional

from torch import Tensor

from moa_fairseq.kernels import SlotOrder


@dataclass
class RoutingDecision:
    """The experts chosen for N = B·T tokens (batch first), or N = B sequences, and how sure the router was.

    expert_index [N, K] int64  the chosen experts (MoA Eq. 8); arange(E) in every row when K = E
    gate         [N, K] float32  their weights (MoA Eq. 9); zero on padding
    probs        [N, E] float32  routing probabilities (MoA Eq. 7)
    logits       [N, E] float32  before the softmax
    num_experts  E, all groups together
    groups       equal parts of experts and slots that are routed apart, one after the other (the heads of
                 SwitchHead): slots of group g hold experts of group g
    shared       the first so many slots always hold the first so many experts (MoH): nothing is decided
                 there, and losses and statistics leave them out
    side         "queries", or "keys" where the tokens are those that keys and values are made of
    scope        "tokens", or "sequences" where a sequence has one decision
    padding_mask [N] bool, or None when there is none; True marks padding
    auxiliary    whether losses may act on it; without (SwitchHead's attention), there are statistics only
    """

    expert_index: Tensor
    gate: Tensor
    probs: Tensor
    logits: Tensor
    num_experts: int
    groups: int = 1
    shared: int = 0
    side: str = "queries"
    scope: str = "tokens"
    padding_mask: Optional[Tensor] = None
    auxiliary: bool = True

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
        """f_i of MoA Eq. 14: how many real tokens chose each routed expert, [E − shared] float64."""
        chosen = self.expert_index[:, self.shared :] - self.shared
        kept = self.kept.double().unsqueeze(1).expand(chosen.shape)
        counts = kept.new_zeros(self.num_experts - self.shared)
        return counts.scatter_add(0, chosen.reshape(-1), kept.reshape(-1))

    @cached_property
    def routed_probs(self) -> Tensor:
        """The probabilities of the experts that are chosen among, [N, E − shared]."""
        return self.probs[:, self.shared :]

    @cached_property
    def slot_order(self) -> SlotOrder:
        """Slots sorted by expert, made at the first use and shared afterwards; nothing is sorted if K = E."""
        return SlotOrder.from_index(self.expert_index, self.num_experts, in_order=self.chooses_all)
