"""The entropy of every gate, for the training log."""

from typing import Any, Callable, Dict, List

import torch
from fairseq.logging import metrics
from torch import Tensor

from moa_fairseq.attention.collector import collect_decisions
from moa_fairseq.attention.routing import RoutingDecision

_PREFIX = "gate_entropy"
_PASSES = f"{_PREFIX}/passes"


class GateEntropyLog:
    """A criterion that also reports each gate's entropy; called like the criterion it wraps.

    Decisions are collected around the forward pass only: activation checkpointing makes them again in
    the backward pass.
    """

    def __init__(self, criterion: Callable):
        self.criterion = criterion

    def __call__(self, model: torch.nn.Module, sample: Dict[str, Any], **options: Any):
        with collect_decisions() as decisions:
            loss, sample_size, logging_output = self.criterion(model, sample, **options)
        if decisions:
            for name, decision in decisions:
                logging_output[f"{_PREFIX}.{name}"] = gate_entropy(decision)
            logging_output[_PASSES] = 1
        return loss, sample_size, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs: List[Dict[str, Any]]) -> None:
        """Log `gate_entropy`, the mean over modules and passes, and `gate_entropy.<module>` of each."""
        passes = sum(log.get(_PASSES, 0) for log in logging_outputs)
        if not passes:
            return
        keys = dict.fromkeys(k for log in logging_outputs for k in log if k.startswith(f"{_PREFIX}."))
        means = {key: sum(log.get(key, 0) for log in logging_outputs) / passes for key in keys}
        metrics.log_scalar(_PREFIX, sum(means.values()) / len(means), passes, round=4)
        for key, mean in means.items():
            metrics.log_scalar(key, mean, passes, round=4)


@torch.no_grad()
def gate_entropy(decision: RoutingDecision) -> Tensor:
    """H(g) = −Σ g_i log g_i in nats, averaged over the gate's rows that are no padding (MAE §5.1)."""
    entropy = torch.special.entr(decision.probs).sum(-1)
    if decision.padding_mask is None:
        return entropy.mean().float()
    real = (~decision.padding_mask).to(entropy.dtype)
    return ((entropy * real).sum() / real.sum().clamp_min(1.0)).float()
