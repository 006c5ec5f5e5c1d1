"""Plain SGD for MAE's gates: no momentum, no weight decay, no schedule, hence no state (MAE Appendix A).

The paper keeps gates away from momentum-based optimisers, which let the rich get richer. So a checkpoint
contains the gates' parameters alone, and workers need to agree on these alone.
"""

import logging
from collections.abc import Sequence

import torch
from fairseq.logging import metrics
from torch import Tensor
from torch.nn import Parameter

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.model import sum_over_workers

logger = logging.getLogger(__name__)


class GateGradients:
    """Gradients of the gates, summed over micro-batches and workers: Σ ∂loss/∂φ, not yet a mean.

    fairseq's losses are sums over sample_size tokens; the total is divided at the end.

    Args:
        parameters: the parameters of the gates, all on one device.

    Attributes:
        flat: the gradients, then the loss and the sample size, in float32, [numbers + 2].
    """

    def __init__(self, parameters: Sequence[Parameter]):
        self.parameters = list(parameters)
        count = sum(map(torch.numel, self.parameters))
        self.flat = torch.zeros(count + 2, dtype=torch.float32, device=self.parameters[0].device)

    def add(self, loss: Tensor, sample_size: float, scale: float = 1.0) -> None:
        """Differentiate one micro-batch's loss by the gates only; experts get no gradient.

        Args:
            loss: the loss summed over the micro-batch's tokens, a scalar or [1].
            sample_size: the number of these tokens.
            scale: a loss scale against underflow in half precision, by which the sum is divided again.
        """
        loss = loss.sum()  # adaptive_loss returns a vector of one number
        self.accumulate(
            torch.autograd.grad(loss * scale, self.parameters, allow_unused=True),
            sample_size,
            scale,
        )
        self.flat[-2] += loss.detach()

    def accumulate(
        self, gradients: Sequence[Tensor | None], sample_size: float, scale: float = 1.0
    ) -> None:
        """Add gradients that have been computed.

        Args:
            gradients: the gradients of the losses times `scale`, one for each parameter, or None.
            sample_size: the number of tokens over which the losses are sums.
            scale: the loss scale, by which the sum is divided again.
        """
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, gradients)]
        self.flat[:-2] += torch.cat([g.reshape(-1).to(self.flat.dtype) for g in flat]) / scale
        self.flat[-1] += sample_size

    def all_reduce(self) -> bool:
        """Add up the sums of all workers, which must all call this together.

        Returns:
            Whether gradients, loss and sample size are finite.
        """
        all_reduce = sum_over_workers()
        if all_reduce is not None:
            all_reduce(self.flat)
        return bool(torch.isfinite(self.flat).all())

    def mean(self) -> list[Tensor]:
        """The gradient of the mean loss, one tensor per parameter."""
        flat = self.flat[:-2] / self.flat[-1].clamp_min(1e-8)
        parts = flat.split(list(map(torch.numel, self.parameters)))
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters)]


class GateSGD:
    """Takes the steps of a training's gates, and logs the norm of the gradients and the skipped steps.

    A step is skipped if its gradients are not finite and the training scales its loss: in half precision a
    batch may overflow.

    Args:
        lr, clip_norm: the learning rate and the largest norm of the gradients, as in `sgd_step`.
    """

    # Steps skipped in a row. After as many, fairseq's own scaler (fp16) has come from 128 to its minimum.
    MOST_SKIPPED = 20

    def __init__(self, lr: float, clip_norm: float):
        self.lr = lr
        self.clip_norm = clip_norm
        self.skipped = 0

    def step(self, gradients: GateGradients, finite: bool, may_overflow: bool) -> None:
        """Update the gates, or skip the step.

        Args:
            gradients: the gradients of all workers together.
            finite: whether the gradients are finite.
            may_overflow: whether the training scales its loss.

        Raises:
            UserError: if the gates have diverged: their weights are not finite, or no step can be taken.
        """
        self.skipped = 0 if finite else self.skipped + 1
        metrics.log_scalar("g_skipped", int(not finite), round=3)
        if finite:
            norm = sgd_step(gradients.parameters, gradients.mean(), self.lr, self.clip_norm)
            metrics.log_scalar("gate_gnorm", float(norm), round=4)
        may_go_on = finite or (may_overflow and self.skipped < self.MOST_SKIPPED)
        if not may_go_on or not all_finite(gradients.parameters):
            raise UserError(
                "The gates have diverged: their gradients or weights are NaN or infinite. The checkpoints of "
                "this training hold earlier gates. Continue from one of them in another --save-dir "
                "(--finetune-from-model FILE; in a recipe train.flags.finetune-from-model), with a lower "
                f"--gate-lr (now {self.lr:g}) or with --gate-clip-norm (now {self.clip_norm:g}; 0: no "
                "clipping). If the gates diverge again, use an older checkpoint."
            )
        if not finite:
            logger.warning("the gradients of the gates overflowed: their step is skipped")


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no number in the tensors is NaN or infinite. The host waits for the device once."""
    return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())


@torch.no_grad()
def sgd_step(
    parameters: Sequence[Parameter],
    gradients: Sequence[Tensor],
    lr: float,
    clip_norm: float | None = None,
) -> Tensor:
    """φ ← φ − lr · ∇φ, with the norm of all gradients together clipped to clip_norm.

    Args:
        parameters: the parameters of the gates, which are updated in place.
        gradients: one for each parameter.
        lr: the learning rate.
        clip_norm: the largest norm of all gradients together; 0 or None: no clipping.

    Returns:
        The norm before clipping.
    """
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    factor = (clip_norm / (norm + 1e-6)).clamp_max(1.0) if clip_norm else 1.0
    for parameter, gradient in zip(parameters, gradients):
        parameter.sub_(lr * factor * gradient)
    return norm
