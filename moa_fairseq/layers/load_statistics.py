"""How evenly routers used their experts in one batch, and how sure they were: numbers for the log."""

import torch
from torch import Tensor

from moa_fairseq.layers.routing import Routing, RoutingSums


def load_statistics(routed: Routing | RoutingSums) -> dict[str, Tensor]:
    """Statistics of the share of slots that each routed expert got, padding excluded.

    Args:
        routed: one decision, or the sums of M.

    Returns:
        Each [M], or scalars for one decision, E being the routed experts of all groups:
        load_entropy: in nats, log E when even.
        max_load, min_load: the largest and smallest share (1/E when even).
        dead_experts: how many got no token of this batch.
    """
    if isinstance(routed, Routing):
        statistics = load_statistics(RoutingSums([routed]))
        return {key: value.squeeze(0) for key, value in statistics.items()}
    share = routed.load.flatten(1)
    if routed.groups > 1:  # all groups have the same number of slots
        share = share / routed.groups
    least, most = share.aminmax(dim=1)
    return {
        "load_entropy": torch.special.entr(share).sum(1),
        "max_load": most,
        "min_load": least,
        "dead_experts": (routed.sums.counts == 0).sum(1, dtype=share.dtype),
    }
