"""`--criterion label_smoothed_cross_entropy_with_routing`: translation with routers."""

from dataclasses import dataclass
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)

from moa_fairseq.criterions.routing_loss import RoutingLossConfig, RoutingLossMixin


@dataclass
class LabelSmoothedCrossEntropyWithRoutingConfig(RoutingLossConfig, LabelSmoothedCrossEntropyCriterionConfig):
    pass


@register_criterion(
    "label_smoothed_cross_entropy_with_routing", dataclass=LabelSmoothedCrossEntropyWithRoutingConfig
)
class LabelSmoothedCrossEntropyWithRouting(RoutingLossMixin, LabelSmoothedCrossEntropyCriterion):
    """fairseq's label-smoothed cross entropy plus α·L_a + β·L_z of every router (MoA Eq. 17)."""

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        load_balance_coef: float,
        z_loss_coef: float,
        aux_loss_scale: str,
        router_log: str,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
    ):
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self.load_balance_coef = load_balance_coef
        self.z_loss_coef = z_loss_coef
        self.aux_loss_scale = aux_loss_scale
        self.router_log = router_log
