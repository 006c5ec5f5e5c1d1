"""The loss of an adaptive softmax over all words."""

import threading
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from fairseq.criterions import CRITERION_REGISTRY, register_criterion
from fairseq.criterions.adaptive_loss import AdaptiveLoss, AdaptiveLossConfig
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.settings import flag
from moa_fairseq.plugin.patches.table import patch


@dataclass
class WholeAdaptiveLossConfig(AdaptiveLossConfig):
    """fairseq's flags, and a flag for fairseq's own loss."""

    fairseq_adaptive_loss: bool = flag(
        False,
        "fairseq's own loss for an adaptive softmax, for comparison with its results. It ignores the "
        "second word of each cluster, which the model then never learns to predict",
    )


class WholeAdaptiveLoss(AdaptiveLoss):
    """fairseq's loss of an adaptive softmax, plus the loss of the words that fairseq takes for padding.

    In the first cluster a target is the word's number in the dictionary, in any other cluster the word's
    number within that cluster. Padding has number 1 in the dictionary, and fairseq ignores the target 1 in
    all clusters.
    """

    as_fairseq = False

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "WholeAdaptiveLoss":
        criterion: WholeAdaptiveLoss = super().build_criterion(cfg, task)
        criterion.as_fairseq = cfg.fairseq_adaptive_loss
        return criterion

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Loss, sample size and logging output, as fairseq's `forward` returns them.

        Raises:
            UserError: if the first cluster does not contain the padding symbol.
        """
        decoder: Any = model.decoder
        softmax = decoder.adaptive_softmax
        if self.as_fairseq or softmax is None:  # fairseq refuses a model without the softmax
            return super().forward(model, sample, reduce)
        if softmax.cutoff[0] <= self.padding_idx:
            raise UserError(
                f"--adaptive-softmax-cutoff {softmax.cutoff[0]},…: the first cluster must contain the "
                f"special symbols: give {self.padding_idx + 1} or more as the first number."
            )
        results: list[Any] = []
        thread = threading.get_ident()  # other threads may compute losses with the same softmax

        def read(module: nn.Module, args: Any, result: Any) -> None:
            if threading.get_ident() == thread:
                results.append(result)

        hook = softmax.register_forward_hook(read)
        try:
            loss, sample_size, entries = super().forward(model, sample, reduce)
        finally:
            hook.remove()
        outputs, targets = results[0]
        for logits, target in zip(outputs[1:], targets[1:]):  # all clusters but the first
            if target is not None:
                ignored = target.eq(self.padding_idx)
                loss = loss + F.cross_entropy(logits[ignored], target[ignored], reduction="sum")
        return loss, sample_size, entries | {"loss": loss.data}


@patch(
    "fairseq.criterions:CRITERION_REGISTRY",
    "plugin/criterions/test_adaptive_loss.py::test_the_loss_is_that_of_the_full_softmax",
    None,
)
def install() -> None:
    """Register `WholeAdaptiveLoss` as the criterion adaptive_loss.

    --criterion adaptive_loss takes the second word of each cluster of an adaptive softmax but the first for
    padding, in training and validation: it has no loss.

    With --fairseq-adaptive-loss the criterion computes fairseq's own loss.
    """
    del CRITERION_REGISTRY["adaptive_loss"]
    register_criterion("adaptive_loss", dataclass=WholeAdaptiveLossConfig)(WholeAdaptiveLoss)
