"""The gates' part of a joint update (MAE's NOBCD): plain SGD beside fairseq's optimizer (Appendix A)."""

import contextlib
from typing import Any, Iterator

import torch
from fairseq.logging import metrics
from fairseq.optim.amp_optimizer import AMPOptimizer
from torch import nn

from moa_fairseq.attention.sequence_gate import gates_of
from moa_fairseq.coordinate_descent.g_step import loss_scale, requiring_gradients
from moa_fairseq.coordinate_descent.gate_sgd import GateGradients, sgd_step
from moa_fairseq.transformer.model import sum_over_workers


class JointStep:
    """Takes one plain SGD step on the gates per update, along the gradient of the update's own backward.

    To fairseq the gates are frozen: its optimizer, gradient all-reduce, clipping and schedule never see
    them. They require gradients only inside `passing`, which surrounds the forward and backward pass of a
    micro-batch; the pass leaves its share in their `.grad`, scaled as fairseq scales the loss. After
    fairseq's own step `stepping` adds up all workers' shares, divides by the update's sample size, and
    updates the gates, without a second pass. If fairseq skips an update for an overflow, the gates skip it,
    too. Between updates nothing is kept.

    model: one with gates. lr, clip_norm: as in GStep (no clipping if clip_norm is 0).
    """

    def __init__(self, model: nn.Module, lr: float, clip_norm: float):
        self.parameters = [parameter for gate in gates_of(model) for parameter in gate.parameters()]
        self.lr = lr
        self.clip_norm = clip_norm
        self.sample_size = 0.0

    def begin(self) -> None:
        """Drop what an incomplete update has left."""
        self.sample_size = 0.0
        for parameter in self.parameters:
            parameter.grad = None

    def passing(self) -> contextlib.AbstractContextManager:
        """A block in which the gates take part in a backward pass."""
        return requiring_gradients(self.parameters)

    @contextlib.contextmanager
    def stepping(self, optimizer: Any) -> Iterator[None]:
        """Around the step of fairseq's optimizer. All workers meet here."""
        scale = loss_scale(optimizer)
        yield
        if isinstance(optimizer, AMPOptimizer) and loss_scale(optimizer) < scale:
            return  # torch's scaler skipped the step and lowered the scale; fairseq tries again
        gradients = GateGradients(self.parameters)
        gradients.take(self.sample_size, scale)
        all_reduce = sum_over_workers()
        if all_reduce is not None:
            all_reduce(gradients.flat)
        self.begin()
        finite = bool(torch.isfinite(gradients.flat).all())
        metrics.log_scalar("g_skipped", int(not finite), round=3)
        if finite:
            norm = sgd_step(self.parameters, gradients.mean(), self.lr, self.clip_norm)
            metrics.log_scalar("gate_gnorm", float(norm), round=4)
