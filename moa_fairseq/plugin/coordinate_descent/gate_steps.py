"""The steps of the gates: before an update (MAE Algorithm 1), or together with the update (NOBCD)."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from fairseq.logging import metrics
from fairseq.optim.amp_optimizer import AMPOptimizer
from torch import nn
from torch.nn import Parameter

from moa_fairseq.layers.running_statistics import running_statistics_of, update_running_statistics
from moa_fairseq.layers.sequence_gate import gate_parameters
from moa_fairseq.plugin.coordinate_descent.gate_sgd import GateGradients, GateSGD
from moa_fairseq.plugin.model import sum_over_workers


class GStep:
    """Takes G steps with the model and the criterion of fairseq's trainer, but not with its optimizer.

    In fp16 the loss is scaled as fairseq scales it in the same update; if the gates' gradients still
    overflow, the step is repeated at half the scale. The lower scale is not kept, so that a restart from a
    checkpoint takes the same steps. The gates and their gradients are always in float32.

    Args:
        trainer: fairseq's trainer.
        lr, clip_norm: the learning rate and the largest norm of the gates' SGD (no clipping if clip_norm is
            0).
    """

    def __init__(self, trainer: Any, lr: float, clip_norm: float):
        self.trainer = trainer
        self.sgd = GateSGD(lr, clip_norm)
        self._last_samples: list[dict[str, Any]] | None = None

    def __call__(self, samples: list[dict[str, Any]]) -> None:
        """Update the gates once with the micro-batches of all workers.

        Args:
            samples: this worker's micro-batches of one update, as fairseq's trainer gets them. If the same
                list comes again, because with --amp fairseq repeats the F step after an overflow, no
                further step is taken.

        Raises:
            UserError: if the gates have diverged.
        """
        if samples is self._last_samples:
            return
        self._last_samples = samples
        model = self.trainer.get_model()
        parameters = gate_parameters(model)
        scale = loss_scale(self.trainer.optimizer)
        while True:
            gradients = self._gradients(samples, parameters, scale)
            finite = gradients.all_reduce()
            if finite or scale <= 1.0:
                break
            scale /= 2
        update_running_statistics(running_statistics_of(model), sum_over_workers())
        self.sgd.step(gradients, finite, scales_loss(self.trainer.optimizer))
        if finite:
            loss, sample_size = gradients.flat[-2:].tolist()
            metrics.log_scalar(
                "g_loss", loss / max(sample_size, 1.0) / math.log(2), sample_size, round=3
            )

    def _gradients(
        self, samples: Sequence[dict[str, Any]], parameters: Sequence[Parameter], scale: float
    ) -> GateGradients:
        """The gradients of all micro-batches of this worker, all with the same state of the gates."""
        trainer = self.trainer
        model = trainer.get_model()
        criterion = trainer.get_criterion()
        trainer._set_seed()
        model.train()
        criterion.train()
        model.set_num_updates(trainer.get_num_updates())
        for statistics in running_statistics_of(model):
            statistics.forget()
        with requiring_gradients(parameters):
            sums = GateGradients(parameters)
            for sample in samples:
                sample, is_dummy = trainer._prepare_sample(sample)
                if is_dummy:  # this worker has no micro-batch left
                    continue
                with torch.autocast(trainer.device.type, enabled=bool(trainer.cfg.common.amp)):
                    loss, sample_size, _ = criterion(model, sample)
                sums.add(loss, float(sample_size), scale)
        return sums


class JointStep:
    """Takes one plain SGD step on the gates per update, along the gradient of the update's own backward.

    For fairseq the gates are frozen: its optimizer, gradient all-reduce, clipping and schedule never see
    them. Each micro-batch adds to the gradients of the gates (`in_backward`), scaled as fairseq scales the
    loss; `around_step` adds up those of all workers, divides them by the update's sample size, and updates
    the gates, without a second pass. If fairseq skips an update for an overflow, the gates skip it as well.
    Nothing is kept between updates.

    Args:
        model: a model with gates.
        lr, clip_norm: as in `GStep`.
    """

    def __init__(self, model: nn.Module, lr: float, clip_norm: float):
        self.parameters = gate_parameters(model)
        self.sgd = GateSGD(lr, clip_norm)
        self.sample_size = 0.0

    def reset(self) -> None:
        """Drop what an incomplete update has left."""
        self.sample_size = 0.0
        for parameter in self.parameters:
            parameter.grad = None

    def in_backward(self) -> contextlib.AbstractContextManager:
        """A context for the forward and backward pass of a micro-batch, in which the gates get gradients."""
        return requiring_gradients(self.parameters)

    @contextlib.contextmanager
    def around_step(self, optimizer: Any) -> Iterator[None]:
        """A context for the step of fairseq's optimizer, after which the gates take theirs.

        All workers must enter it together.

        Args:
            optimizer: fairseq's optimizer, before its step.

        Raises:
            UserError: if the gates have diverged.
        """
        scale = loss_scale(optimizer)
        yield
        if isinstance(optimizer, AMPOptimizer) and loss_scale(optimizer) < scale:
            return  # torch's scaler skipped the step and lowered the scale; fairseq repeats the update
        gradients = GateGradients(self.parameters)
        gradients.accumulate(
            [parameter.grad for parameter in self.parameters], self.sample_size, scale
        )
        self.reset()
        self.sgd.step(gradients, gradients.all_reduce(), scales_loss(optimizer))


def scales_loss(optimizer: Any) -> bool:
    """Whether fairseq multiplies the loss before backward, and skips updates that overflow."""
    if isinstance(optimizer, AMPOptimizer):
        return bool(optimizer.scaler.is_enabled())  # off on a CPU
    return getattr(optimizer, "scaler", None) is not None


def loss_scale(optimizer: Any) -> float:
    """The factor of the loss before backward: 1, except in fp16 and with --amp."""
    if not scales_loss(optimizer):
        return 1.0
    scaler = optimizer.scaler
    return float(scaler.get_scale() if isinstance(optimizer, AMPOptimizer) else scaler.loss_scale)


@contextlib.contextmanager
def requiring_gradients(parameters: Sequence[Parameter]) -> Iterator[None]:
    """A context in which parameters that are otherwise frozen require gradients."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
