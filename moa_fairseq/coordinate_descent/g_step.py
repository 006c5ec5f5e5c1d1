"""One G step: all gates are updated by the gradient of one whole update's batch (MAE Algorithm 1)."""

import contextlib
import math
from typing import Any, Dict, Iterator, List, Optional, Sequence

import torch
from fairseq.logging import metrics
from fairseq.optim.amp_optimizer import AMPOptimizer
from torch.nn import Parameter

from moa_fairseq.attention.observers import observers_of, update_observers
from moa_fairseq.attention.sequence_gate import gates_of
from moa_fairseq.coordinate_descent.gate_sgd import GateGradients, sgd_step
from moa_fairseq.transformer.model import sum_over_workers


class GStep:
    """Takes G steps with a fairseq trainer's model and criterion, whose optimizer it leaves alone.

    trainer: fairseq's. lr, clip_norm: of the gates' SGD (no clipping if clip_norm is 0). In fp16 the
    loss is scaled as fairseq scales it in that update; if the gates' gradients still overflow, the step is
    tried again at half the scale. That scale is not kept, so that a restart from a checkpoint takes the same
    steps. The gates and their gradients are always in float32.
    """

    def __init__(self, trainer: Any, lr: float, clip_norm: float):
        self.trainer = trainer
        self.lr = lr
        self.clip_norm = clip_norm
        self._done: Optional[List[Dict[str, Any]]] = None

    def __call__(self, samples: List[Dict[str, Any]]) -> None:
        """Update the gates once with the micro-batches `samples` of this worker and those of the others."""
        if samples is self._done:  # with --amp fairseq tries the F step again after an overflow
            return
        self._done = samples
        model = self.trainer.get_model()
        gates = gates_of(model)
        parameters = [parameter for gate in gates for parameter in gate.parameters()]
        scale = loss_scale(self.trainer.optimizer)
        while True:
            gradients = self._gradients(samples, parameters, scale)
            finite = bool(torch.isfinite(gradients.flat).all())
            if finite or scale <= 1.0:
                break
            scale /= 2
        update_observers(observers_of(model), sum_over_workers())
        metrics.log_scalar("g_skipped", int(not finite), round=3)
        if finite:
            norm = sgd_step(parameters, gradients.mean(), self.lr, self.clip_norm)
            sample_size = float(gradients.sample_size)
            loss = float(gradients.loss) / max(sample_size, 1.0) / math.log(2)
            metrics.log_scalar("g_loss", loss, sample_size, round=3)
            metrics.log_scalar("gate_gnorm", float(norm), round=4)

    def _gradients(
        self, samples: Sequence[Dict[str, Any]], parameters: Sequence[Parameter], scale: float
    ) -> GateGradients:
        """Forward and backward passes of all micro-batches, all with the same state of the gates."""
        trainer = self.trainer
        model, criterion = trainer.get_model(), trainer.get_criterion()
        trainer._set_seed()
        model.train()
        criterion.train()
        model.set_num_updates(trainer.get_num_updates())
        for observer in observers_of(model):
            observer.forget()
        with requiring_gradients(parameters):
            sums = GateGradients(parameters)
            for sample in samples:
                sample, is_dummy = trainer._prepare_sample(sample)
                if is_dummy:  # a worker that has no micro-batch left
                    continue
                with torch.autocast(trainer.device.type, enabled=bool(trainer.cfg.common.amp)):
                    loss, sample_size, _ = criterion(model, sample)
                sums.add(loss, float(sample_size), scale)
        all_reduce = sum_over_workers()
        if all_reduce is not None:
            all_reduce(sums.flat)
        return sums


def loss_scale(optimizer: Any) -> float:
    """What a fairseq optimizer multiplies the loss by before backward: 1 but in fp16 and --amp."""
    scaler = getattr(optimizer, "scaler", None)
    if scaler is None:
        return 1.0
    return float(scaler.get_scale() if isinstance(optimizer, AMPOptimizer) else scaler.loss_scale)


@contextlib.contextmanager
def requiring_gradients(parameters: Sequence[Parameter]) -> Iterator[None]:
    """A block in which these parameters, frozen elsewhere, require gradients."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
