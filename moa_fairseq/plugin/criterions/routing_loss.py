"""Adds the routers' auxiliary losses to any fairseq criterion (MoA Eq. 17)."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics
from torch import Tensor

from moa_fairseq.errors import UserError
from moa_fairseq.layers.load_statistics import load_statistics
from moa_fairseq.layers.losses import BALANCE_LOSSES, OF_ANY_FAMILY, one_row, weighted_loss
from moa_fairseq.layers.routing import RoutingSums
from moa_fairseq.layers.settings import flag
from moa_fairseq.plugin.forward_context import NamedRoutings, collect_routings
from moa_fairseq.plugin.logged_values import logged, mean_values

_PREFIX = "router/"
_ROUND = 4
# Statistics that are summed over the modules of a model; all others are averaged.
_SUMMED = ("dead_experts",)

if TYPE_CHECKING:  # fairseq makes enums of a flag's choices, and its classes have no types
    from fairseq.criterions import FairseqCriterion

    BalanceLoss = str
    Reduction = str
    Scale = str
    Detail = str
else:
    FairseqCriterion = object
    BalanceLoss = ChoiceEnum(list(BALANCE_LOSSES))
    Reduction = ChoiceEnum(["sum", "mean"])
    Scale = ChoiceEnum(["sample-size", "none"])
    Detail = ChoiceEnum(["summary", "modules"])


@dataclass
class RoutingLossConfig:
    """Flags of every criterion with routing; it is mixed into the config of a fairseq criterion."""

    balance_loss: BalanceLoss = flag(
        "moa",
        "load-balancing loss. moa: L_a of MoA's Eq. 13. moh: L_b of MoH's Eq. 7-8. "
        "moh-released: E times L_b, as in MoH's code. mutual-information: of tokens and experts (SUT, "
        "arXiv 2310.07096). entropy: of the mean softmax (sigma-MoE, arXiv 2310.10837). SwitchHead's "
        "attention has no balance loss. Loads are logged with every choice",
    )
    load_balance_coef: float = flag(0.01, "coefficient α of the balance loss (MoA Eq. 13, 17)")
    z_loss_coef: float = flag(0.001, "coefficient β of the router z-loss (MoA Eq. 16, 17)")
    aux_loss_reduce: Reduction = flag(
        "sum", "reduction of the auxiliary losses over modules: sum (MoA Eq. 17) or mean"
    )
    aux_loss_scale: Scale = flag(
        "sample-size",
        "scale of the auxiliary term. The model's loss is a sum over sample_size tokens. sample-size: times "
        "sample_size (Eq. 17); none: unscaled, as in MoA's released code",
    )
    router_log: Detail = flag(
        "summary",
        "logged router statistics: averages over all modules (summary), or per module as well",
    )


class RoutingLossMixin(FairseqCriterion):
    """L = L_model + Σ_modules (α·L_balance + β·L_z) (MoA Eq. 17). Precedes the criterion that it extends.

    The auxiliary term is added in training only: validation loss and perplexity are the model's. The losses
    and load statistics of every router are logged in both. In the log, `load_balance_loss` is always MoA's
    L_a, and another balance loss is `balance_loss`.
    """

    routing = RoutingLossConfig()

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "RoutingLossMixin":
        """Build fairseq's criterion, and give it the flags of routing, which fairseq's does not read.

        Raises:
            UserError: if a coefficient is negative, infinite or not a number.
        """
        for name in ("load_balance_coef", "z_loss_coef"):
            if not 0 <= getattr(cfg, name) < math.inf:
                raise UserError(
                    f"--{name.replace('_', '-')} is {getattr(cfg, name)}: give 0 or a positive number."
                )
        criterion = super().build_criterion(cfg, task)
        names = RoutingLossConfig.__dataclass_fields__
        criterion.routing = RoutingLossConfig(**{name: getattr(cfg, name) for name in names})
        return criterion

    def forward(self, model: torch.nn.Module, sample: dict[str, Any], reduce: bool = True):
        with collect_routings() as routings:
            loss, sample_size, logging_output = super().forward(model, sample, reduce=reduce)
        if not routings:
            return loss, sample_size, logging_output
        auxiliary, entries = self.terms(routings)
        if model.training:
            if str(self.routing.aux_loss_scale) == "sample-size":
                auxiliary = auxiliary * sample_size
            loss = loss + auxiliary
        logging_output.update(entries)
        return loss, sample_size, logging_output

    def terms(self, routings: NamedRoutings) -> tuple[Tensor, dict[str, Any]]:
        """The auxiliary loss of one forward pass, and the entry for the log.

        Args:
            routings: the names and routings of the modules (`collect_routings`), at least one.

        Returns:
            auxiliary: α·L_balance + β·L_z, a scalar; the sum over the modules on which losses may act, or the
                mean with --aux-loss-reduce mean; 0 if there are no such modules.
            entry: an entry for the logging output, whose values stay on the device: each statistic of the
                model, and with --router-log modules also of each module.
        """
        sums_by_kind = RoutingSums.by_kind([routing for _, routing in routings])
        balance = list(map(BALANCE_LOSSES[str(self.routing.balance_loss)], sums_by_kind))
        z = list(map(OF_ANY_FAMILY["z_loss"], sums_by_kind))
        auxiliary = weighted_loss(
            sums_by_kind,
            balance,
            z,
            self.routing.load_balance_coef,
            self.routing.z_loss_coef,
            str(self.routing.aux_loss_reduce),
        )
        with torch.no_grad():
            statistics = self._statistics(sums_by_kind, balance, z)
            modules = [routings[index][0] for sums in sums_by_kind for index in sums.order]
            return auxiliary, self._entry(statistics, modules)

    def _statistics(
        self, sums_by_kind: list[RoutingSums], balance: list[Tensor], z: list[Tensor]
    ) -> dict[str, Tensor]:
        """Each logged statistic, [modules], in the order of the modules in `sums_by_kind`."""
        by_kind = {"load_balance_loss": balance, "z_loss": z}
        if str(self.routing.balance_loss) != "moa":
            by_kind["balance_loss"] = balance
            by_kind["load_balance_loss"] = list(map(BALANCE_LOSSES["moa"], sums_by_kind))
        loads = list(map(load_statistics, sums_by_kind))
        by_kind.update({name: [load[name] for load in loads] for name in loads[0]})
        return {name: one_row(values) for name, values in by_kind.items()}

    def _entry(self, statistics: dict[str, Tensor], modules: list[str]) -> dict[str, Any]:
        values = torch.stack(list(statistics.values()))  # [statistics, modules]
        names = list(statistics)
        of_model = values.mean(1)
        for name in _SUMMED:
            of_model[names.index(name)].mul_(len(modules))
        if str(self.routing.router_log) == "modules":
            names += [f"{name}.{module}" for name in statistics for module in modules]
            of_model = torch.cat([of_model, values.flatten()])
        return logged(_PREFIX, names, of_model)

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log fairseq's metrics, then the mean over forward passes of every router statistic."""
        super().reduce_metrics(logging_outputs)
        values, passes = mean_values(_PREFIX, logging_outputs)
        for name, value in values.items():
            metrics.log_scalar(name, value, passes, round=_ROUND)
