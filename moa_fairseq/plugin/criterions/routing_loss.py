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

if TYPE_CHECKING:  # fairseq makes enums of a flag's choices, and its classes have no types
    from fairseq.criterions import FairseqCriterion as Extended

    BalanceLoss = str
    Reduction = str
    Scale = str
    Detail = str
else:
    Extended = object
    BalanceLoss = ChoiceEnum(list(BALANCE_LOSSES))
    Reduction = ChoiceEnum(["sum", "mean"])
    Scale = ChoiceEnum(["sample-size", "none"])
    Detail = ChoiceEnum(["summary", "modules"])


@dataclass
class RoutingLossConfig:
    """Flags of every criterion with routing; mixed into the config of a fairseq criterion."""

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


class RoutingLossMixin(Extended):
    """L = L_model + Σ_modules (α·L_balance + β·L_z) (MoA Eq. 17). Precedes the criterion it extends.

    The auxiliary term is added in training only: validation loss and perplexity are the model's.
    Every router's losses and load statistics are logged in both. `load_balance_loss` is always MoA's L_a; if
    another balance loss was chosen, it is logged as `balance_loss`.
    """

    routing = RoutingLossConfig()

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "RoutingLossMixin":
        """Build fairseq's criterion, which knows nothing of routing, and give it the flags.

        Raises:
            UserError: for a coefficient that is negative, infinite or not a number.
        """
        for name in ("load_balance_coef", "z_loss_coef"):
            if not 0 <= getattr(cfg, name) < math.inf:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} is {getattr(cfg, name)}: give 0 or a positive number.")
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
        """The scalar Σ α·L_balance + β·L_z over the modules of one forward pass, and what is to be logged.

        The values to log stay on the device: means over modules ("dead_experts": the sum over the model), and
        each module's own on request.

        Args:
            routings: what `collect_routings` found, at least one.

        Returns:
            The sum, or the mean with --aux-loss-reduce mean, over the modules on which losses may act, 0
            where there are none; and an entry for the logging output.
        """
        name = str(self.routing.balance_loss)
        kinds = RoutingSums.by_kind([routing for _, routing in routings])
        balance = list(map(BALANCE_LOSSES[name], kinds))
        z = list(map(OF_ANY_FAMILY["z_loss"], kinds))
        weights = self.routing.load_balance_coef, self.routing.z_loss_coef
        auxiliary = weighted_loss(kinds, balance, z, *weights, str(self.routing.aux_loss_reduce))
        with torch.no_grad():
            rows: dict[str, list[Tensor]] = {"load_balance_loss": balance, "z_loss": z}
            if name != "moa":
                rows["balance_loss"] = balance
                rows["load_balance_loss"] = list(map(BALANCE_LOSSES["moa"], kinds))
            statistics = list(map(load_statistics, kinds))
            rows.update({key: [row[key] for row in statistics] for key in statistics[0]})
            # [statistics, modules]
            values = torch.stack(list(map(one_row, rows.values())))
            names = list(rows)
            means = values.mean(1)
            means[names.index("dead_experts")].mul_(len(routings))
            if str(self.routing.router_log) == "modules":
                modules = [routings[place][0] for sums in kinds for place in sums.order]
                names += [f"{key}.{module}" for key in rows for module in modules]
                means = torch.cat([means, values.flatten()])
        return auxiliary, logged(_PREFIX, names, means)

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log fairseq's metrics, then the mean over forward passes of every router statistic."""
        super().reduce_metrics(logging_outputs)
        values, passes = mean_values(_PREFIX, logging_outputs)
        for name, value in values.items():
            metrics.log_scalar(name, value, passes, round=_ROUND)
