"""`--criterion masked_lm_with_routing`: masked language modelling with routers."""

from dataclasses import dataclass
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss

from moa_fairseq.criterions.routing_loss import RoutingLossConfig, RoutingLossMixin


@dataclass
class MaskedLmWithRoutingConfig(RoutingLossConfig, MaskedLmConfig):
    pass


@register_criterion("masked_lm_with_routing", dataclass=MaskedLmWithRoutingConfig)
class MaskedLmWithRouting(RoutingLossMixin, MaskedLmLoss):
    """fairseq's masked-LM loss plus α·L_a + β·L_z of every router (MoA Eq. 17).

    sample_size is the number of masked tokens; routers see, and are balanced over, all tokens that
    are no padding.
    """

    def __init__(self, cfg: MaskedLmWithRoutingConfig, task: Any) -> None:
        super().__init__(cfg, task)
        self.load_balance_coef = cfg.load_balance_coef
        self.z_loss_coef = cfg.z_loss_coef
        self.aux_loss_scale = cfg.aux_loss_scale
        self.router_log = cfg.router_log
