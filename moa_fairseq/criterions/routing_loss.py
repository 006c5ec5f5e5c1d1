"""Adds the routers' auxiliary losses to any fairseq criterion (MoA Eq. 17)."""

from dataclasses import dataclass, field
from typing import Any, Dict, List

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics
from torch import Tensor

from moa_fairseq.attention.collector import NamedDecisions, collect_decisions
from moa_fairseq.attention.load_statistics import load_statistics
from moa_fairseq.attention.losses import BALANCE_LOSSES, load_balance_loss, z_loss

_PREFIX = "router/"
_ROUND = 4


@dataclass
class RoutingLossConfig:
    """Flags of every criterion with routing; mixed into the config of a fairseq criterion."""

    balance_loss: ChoiceEnum(list(BALANCE_LOSSES)) = field(
        default="moa",
        metadata={
            "help": "what evens out the experts' loads: MoA's L_a (Eq. 13), MoH's L_b (Eq. 7-8) or E times "
            "it as in MoH's code, the mutual information of tokens and experts (SUT, arXiv 2310.07096), or "
            "nothing; loads are logged in any case"
        },
    )
    load_balance_coef: float = field(
        default=0.01, metadata={"help": "coefficient α of the balance loss (MoA Eq. 13, 17)"}
    )
    z_loss_coef: float = field(
        default=0.001, metadata={"help": "coefficient β of the router z-loss (MoA Eq. 16, 17)"}
    )
    aux_loss_reduce: ChoiceEnum(["sum", "mean"]) = field(
        default="sum",
        metadata={"help": "add the auxiliary losses of all modules up (MoA Eq. 17), or take their mean"},
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
    """L = L_model + Σ_modules (α·L_balance + β·L_z) (MoA Eq. 17). Precedes the criterion it extends.

    The auxiliary term is added in training only: validation loss and perplexity are the model's.
    Every router's losses and load statistics are logged in both; `load_balance_loss` is always MoA's L_a,
    and another balance loss that was chosen is logged as `balance_loss`.
    """

    routing = RoutingLossConfig()

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "RoutingLossMixin":
        """Build fairseq's criterion, which knows nothing of routing, and give it the flags."""
        criterion = super().build_criterion(cfg, task)
        names = RoutingLossConfig.__dataclass_fields__
        criterion.routing = RoutingLossConfig(**{name: getattr(cfg, name) for name in names})
        return criterion

    def forward(self, model: torch.nn.Module, sample: Dict[str, Any], reduce: bool = True):
        with collect_decisions() as decisions:
            loss, sample_size, logging_output = super().forward(model, sample, reduce=reduce)
        if not decisions:
            return loss, sample_size, logging_output
        name = str(self.routing.balance_loss)
        losses = {"balance": [BALANCE_LOSSES[name](decision) for _, decision in decisions]}
        losses["z_loss"] = [z_loss(decision) for _, decision in decisions]
        if model.training:
            auxiliary = self.routing.load_balance_coef * sum(losses["balance"])
            auxiliary = auxiliary + self.routing.z_loss_coef * sum(losses["z_loss"])
            if str(self.routing.aux_loss_reduce) == "mean":
                auxiliary = auxiliary / len(decisions)
            loss = loss + auxiliary * (
                sample_size if str(self.routing.aux_loss_scale) == "sample-size" else 1
            )
        if name == "moa":
            losses["load_balance_loss"] = losses.pop("balance")
        else:
            losses["balance_loss"] = losses.pop("balance")
            losses["load_balance_loss"] = [load_balance_loss(decision) for _, decision in decisions]
        logging_output.update(self._statistics(decisions, losses))
        return loss, sample_size, logging_output

    @torch.no_grad()
    def _statistics(self, decisions: NamedDecisions, losses: Dict[str, List[Tensor]]) -> Dict[str, Any]:
        """Sums that `reduce_metrics` divides by `router/passes`, so that workers can be added up."""
        rows = [
            {**{key: values[i].detach() for key, values in losses.items()}, **load_statistics(decision)}
            for i, (_, decision) in enumerate(decisions)
        ]
        means = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
        means["dead_experts"] = means["dead_experts"] * len(rows)  # of the whole model
        output = {_PREFIX + key: value for key, value in means.items()}
        if str(self.routing.router_log) == "modules":
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
