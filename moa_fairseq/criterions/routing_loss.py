"""Adds the routers' auxiliary losses to any fairseq criterion (MoA Eq. 17)."""

from dataclasses import dataclass, field
from typing import Any, Dict, List

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics
from torch import Tensor

from moa_fairseq.attention.collector import NamedDecisions, collect_decisions
from moa_fairseq.attention.load_statistics import load_statistics
from moa_fairseq.attention.losses import load_balance_loss, z_loss

_PREFIX = "router/"
_ROUND = 4


@dataclass
class RoutingLossConfig:
    """Flags of every criterion with routing; mixed into the config of a fairseq criterion."""

    load_balance_coef: float = field(
        default=0.01, metadata={"help": "coefficient α of the load-balance loss (MoA Eq. 13, 17)"}
    )
    z_loss_coef: float = field(
        default=0.001, metadata={"help": "coefficient β of the router z-loss (MoA Eq. 16, 17)"}
    )
    aux_loss_scale: ChoiceEnum(["sample-size", "none"]) = field(
        default="sample-size",
        metadata={
            "help": "the model's loss is a sum over sample_size tokens: 'sample-size' multiplies the "
            "auxiliary term by it (Eq. 17); 'none' adds it as it is, as MoA's released code does"
        },
    )
    router_log: ChoiceEnum(["summary", "modules"]) = field(
        default="summary",
        metadata={"help": "log router statistics averaged over all modules, or of each module as well"},
    )


class RoutingLossMixin:
    """L = L_model + Σ_modules (α·L_a + β·L_z) (MoA Eq. 17). Precedes the criterion it extends.

    The auxiliary term is added in training only: validation loss and perplexity are the model's.
    Every router's losses and load statistics are logged in both.
    """

    load_balance_coef: float
    z_loss_coef: float
    aux_loss_scale: str
    router_log: str

    def forward(self, model: torch.nn.Module, sample: Dict[str, Any], reduce: bool = True):
        with collect_decisions() as decisions:
            loss, sample_size, logging_output = super().forward(model, sample, reduce=reduce)
        if not decisions:
            return loss, sample_size, logging_output
        balance = [load_balance_loss(decision) for _, decision in decisions]
        z = [z_loss(decision) for _, decision in decisions]
        if model.training:
            scale = sample_size if str(self.aux_loss_scale) == "sample-size" else 1
            auxiliary = self.load_balance_coef * sum(balance) + self.z_loss_coef * sum(z)
            loss = loss + auxiliary * scale
        logging_output.update(self._statistics(decisions, balance, z))
        return loss, sample_size, logging_output

    def _statistics(
        self, decisions: NamedDecisions, balance: List[Tensor], z: List[Tensor]
    ) -> Dict[str, Any]:
        """Sums that `reduce_metrics` divides by `router/passes`, so that workers can be added up."""
        rows = [
            {"load_balance_loss": a.detach(), "z_loss": b.detach(), **load_statistics(decision)}
            for (_, decision), a, b in zip(decisions, balance, z)
        ]
        means = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
        means["dead_experts"] = means["dead_experts"] * len(rows)  # of the whole model
        output = {_PREFIX + key: value for key, value in means.items()}
        if str(self.router_log) == "modules":
            for (name, _), row in zip(decisions, rows):
                output.update({f"{_PREFIX}{key}.{name}": value for key, value in row.items()})
        output[_PREFIX + "passes"] = 1
        return output

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """Log fairseq's metrics, then the mean over forward passes of every router statistic."""
        super().reduce_metrics(logging_outputs)
        passes = sum(log.get(_PREFIX + "passes", 0) for log in logging_outputs)
        if not passes:
            return
        keys = dict.fromkeys(key for log in logging_outputs for key in log if key.startswith(_PREFIX))
        for key in keys:
            if key != _PREFIX + "passes":
                total = sum(log.get(key, 0) for log in logging_outputs)
                metrics.log_scalar(key[len(_PREFIX) :], total / passes, passes, round=_ROUND)
