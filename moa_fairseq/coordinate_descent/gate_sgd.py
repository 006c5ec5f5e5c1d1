"""Plain SGD for MAE's gates: no momentum, no weight decay, no schedule, hence no state (MAE Appendix A).

The paper keeps gates away from momentum-based optimisers, which let the rich get richer. So only the
parameters have to be stored in a checkpoint and agreed upon between workers.
"""

from typing import List, Optional, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter


class GateGradients:
    """Gradients of the gates, summed over micro-batches and workers: Σ ∂loss/∂φ, not yet a mean.

    fairseq's losses are sums over sample_size tokens; the total is divided at the end.
    """

    def __init__(self, parameters: Sequence[Parameter]):
        self.parameters = list(parameters)
        count = sum(parameter.numel() for parameter in self.parameters)
        # the gradients, then loss and sample size
        self.flat = torch.zeros(count + 2, dtype=torch.float32, device=self.parameters[0].device)

    def add(self, loss: Tensor, sample_size: float, scale: float = 1.0) -> None:
        """Differentiate one micro-batch's loss by the gates only; experts get no gradient at all.

        scale: a loss scale against underflow in half precision, undone in the sum.
        """
        loss = loss.sum()  # adaptive_loss has a vector of one
        gradients = torch.autograd.grad(loss * scale, self.parameters, allow_unused=True)
        self._add(gradients, sample_size, scale)
        self.flat[-2] += loss.detach()

    def take(self, sample_size: float, scale: float = 1.0) -> None:
        """Add what backward passes of losses times scale have left in the parameters' `.grad`."""
        self._add([parameter.grad for parameter in self.parameters], sample_size, scale)

    def _add(self, gradients: Sequence[Optional[Tensor]], sample_size: float, scale: float) -> None:
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, gradients)]
        self.flat[:-2] += torch.cat([g.reshape(-1).to(self.flat.dtype) for g in flat]) / scale
        self.flat[-1] += sample_size

    @property
    def loss(self) -> Tensor:
        """Σ loss over what was added."""
        return self.flat[-2]

    @property
    def sample_size(self) -> Tensor:
        """Σ sample_size over what was added."""
        return self.flat[-1]

    def mean(self) -> List[Tensor]:
        """The gradient of the mean loss, one tensor per parameter."""
        flat = self.flat[:-2] / self.sample_size.clamp_min(1e-8)
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters)]


@torch.no_grad()
def sgd_step(
    parameters: Sequence[Parameter], gradients: Sequence[Tensor], lr: float, clip_norm: Optional[float] = None
) -> Tensor:
    """φ ← φ − lr · ∇φ, with the gradients' norm over all gates clipped to clip_norm if that is positive.

    Returns the norm before clipping.
    """
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    factor = (clip_norm / (norm + 1e-6)).clamp_max(1.0) if clip_norm else 1.0
    for parameter, gradient in zip(parameters, gradients):
        parameter.sub_(lr * factor * gradient)
    return norm
