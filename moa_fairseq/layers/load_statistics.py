"""Statistics for the log: how evenly routers used their experts in one batch."""

import torch
from torch import Tensor

from moa_fairseq.layers.routing import Routing, RoutingSums


def load_statistics(routed: Routing | RoutingSums) -> dict[str, Tensor]:
    """Statistics of the experts' loads: the share of the slots of real tokens that each routed expert got.

    Args:
        routed: one routing, or the sums of M routings.

    Returns:
        By name, [M], or scalars for one routing, where E is the number of routed experts of all groups:
        load_entropy: the entropy of the loads in nats; log E if all loads are equal.
        max_load, min_load: the largest and the smallest load; 1/E if all loads are equal.
        dead_experts: the number of experts that no token of the batch selected.
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
