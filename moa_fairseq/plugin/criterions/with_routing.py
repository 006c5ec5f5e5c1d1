"""`--criterion <fairseq's>_with_routing`: fairseq's criterions with the routers' auxiliary losses added."""

from dataclasses import dataclass

from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.criterions.sentence_prediction import (
    SentencePredictionConfig,
    SentencePredictionCriterion,
)

from moa_fairseq.plugin.criterions.routing_loss import RoutingLossConfig, RoutingLossMixin
from moa_fairseq.plugin.patches.adaptive_loss import WholeAdaptiveLoss, WholeAdaptiveLossConfig


@dataclass
class LabelSmoothedCrossEntropyWithRoutingConfig(
    RoutingLossConfig, LabelSmoothedCrossEntropyCriterionConfig
):
    pass


@register_criterion(
    "label_smoothed_cross_entropy_with_routing",
    dataclass=LabelSmoothedCrossEntropyWithRoutingConfig,
)
class LabelSmoothedCrossEntropyWithRouting(RoutingLossMixin, LabelSmoothedCrossEntropyCriterion):
    """Translation: label-smoothed cross entropy plus the losses of every router."""


@dataclass
class MaskedLmWithRoutingConfig(RoutingLossConfig, MaskedLmConfig):
    pass


@register_criterion("masked_lm_with_routing", dataclass=MaskedLmWithRoutingConfig)
class MaskedLmWithRouting(RoutingLossMixin, MaskedLmLoss):
    """Masked language models. sample_size counts masked tokens; routers see all tokens but padding."""


@dataclass
class CrossEntropyWithRoutingConfig(RoutingLossConfig, CrossEntropyCriterionConfig):
    pass


@register_criterion("cross_entropy_with_routing", dataclass=CrossEntropyWithRoutingConfig)
class CrossEntropyWithRouting(RoutingLossMixin, CrossEntropyCriterion):
    """Causal language models with a plain softmax."""


@dataclass
class AdaptiveLossWithRoutingConfig(RoutingLossConfig, WholeAdaptiveLossConfig):
    pass


@register_criterion("adaptive_loss_with_routing", dataclass=AdaptiveLossWithRoutingConfig)
class AdaptiveLossWithRouting(RoutingLossMixin, WholeAdaptiveLoss):
    """Causal language models with an adaptive softmax (`--adaptive-softmax-cutoff`)."""


@dataclass
class SentencePredictionWithRoutingConfig(RoutingLossConfig, SentencePredictionConfig):
    pass


@register_criterion(
    "sentence_prediction_with_routing", dataclass=SentencePredictionWithRoutingConfig
)
class SentencePredictionWithRouting(RoutingLossMixin, SentencePredictionCriterion):
    """Classes of sentences. sample_size counts sentences; routers see all tokens but padding."""
