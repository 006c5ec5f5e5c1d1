"""How evenly a router used its experts in one batch: numbers for the log."""

from typing import Dict

import torch
from torch import Tensor

from moa_fairseq.attention.routing import RoutingDecision


@torch.no_grad()
def load_statistics(decision: RoutingDecision) -> Dict[str, Tensor]:
    """Scalars about the share of the batch's slots that each expert got, padding excluded.

    load_entropy: in nats, log E when even. max_load, min_load: the largest and smallest share
    (1/E when even). dead_experts: how many got no token of this batch.
    """
    counts = decision.expert_counts
    share = counts / counts.sum().clamp_min(1.0)
    return {
        "load_entropy": torch.special.entr(share).sum().float(),
        "max_load": share.max().float(),
        "min_load": share.min().float(),
        "dead_experts": (counts == 0).sum().float(),
    }
