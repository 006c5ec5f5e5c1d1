"""The entropy of every gate, for the training log."""

from collections.abc import Callable
from typing import Any

import torch
from fairseq.logging import metrics

from moa_fairseq.layers.routing import RoutingSums
from moa_fairseq.plugin.forward_context import collect_routings
from moa_fairseq.plugin.logged_values import logged, mean_values

_NAME = "gate_entropy"
_PREFIX = f"{_NAME}/"


class GateEntropyLog:
    """A criterion that also reports each gate's entropy H(g) = −Σ g_i log g_i in nats (MAE §5.1).

    It is called like the criterion that it wraps. An entropy is the mean over the rows of the gate that are
    no padding. Routings are collected around the forward pass only, because activation checkpointing repeats
    them in the backward pass.

    Args:
        criterion: called with model and sample, it returns loss, sample size and logging output.
    """

    def __init__(self, criterion: Callable):
        self.criterion = criterion

    def __call__(self, model: torch.nn.Module, sample: dict[str, Any], **options: Any):
        with collect_routings() as routings:
            loss, sample_size, logging_output = self.criterion(model, sample, **options)
        if routings:
            kinds = RoutingSums.by_kind([routing for _, routing in routings])
            names = [f"{_NAME}.{routings[place][0]}" for sums in kinds for place in sums.order]
            with torch.no_grad():
                entropies = torch.cat([sums.entropy_and_probs()[0] for sums in kinds])
            logging_output.update(logged(_PREFIX, names, entropies))
        return loss, sample_size, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log `gate_entropy`, the mean over modules and passes, and each module's `gate_entropy.<module>`."""
        means, passes = mean_values(_PREFIX, logging_outputs)
        if means:
            metrics.log_scalar(_NAME, sum(means.values()) / len(means), passes, round=4)
        for name, mean in means.items():
            metrics.log_scalar(name, mean, passes, round=4)
