"""MAE's gate: the responsibility of each expert for an input (arXiv 2005.06537, §2.3 and Appendix A)."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.layers.running_statistics import RunningStatistics
from moa_fairseq.layers.torch_compat import full_precision

# Choices of --gate-norm: the statistics that normalise the inputs of a gate while it learns
NORMS = ("earlier", "batch")
# The weight of an update in the running statistics, whose error is drift rather than noise (docs/mae.md)
MOMENTUM = 0.3


class GateNorm(nn.BatchNorm1d, RunningStatistics):
    """Batch normalisation of a gate's inputs (MAE Appendix A), by default not with the paper's statistics.

    Every forward pass in training is observed, also in F steps. Otherwise gates would draw experts with the
    initial statistics, 0 and 1, until the first G epoch. The initial statistics count as one update in the
    running mean, which becomes a moving average after many updates.

    Args:
        num_features: C.
        statistics: "earlier" uses the running statistics of earlier updates, in training and in evaluation.
            Statistics of the batch itself would tell a causal gate about later positions and other sentences.
            A forward pass only sums its inputs (`pending`), and `update` uses these sums. So a batch affects
            only later updates, and an output does not depend on how batches are spread over workers and
            accumulation steps. "batch" is the paper's choice (Ioffe & Szegedy 2015), for gates that see a
            whole sequence. A forward pass that trains the gate (`own`: a G step or a joint update) normalises
            by mean and variance over the real rows of its micro-batch, with gradients through them. With
            fewer than two rows, in evaluation and for the draw of an F step, it uses the running statistics.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, num_features: int, statistics: str = "earlier"):
        super().__init__(num_features, momentum=MOMENTUM)
        self.statistics = statistics
        # Σ x̂ [C], Σ x̂² [C] and the count, for x̂ = x normalised: numbers near 1 lose no digits in a sum
        self.register_buffer("pending", torch.zeros(2 * num_features + 1), persistent=False)

    def forward(
        self, x: Tensor, real: Tensor | None = None, observe: bool = False, own: bool = False
    ) -> Tensor:
        """Normalise the means of sequences, or of their beginnings.

        Args:
            x: means, [N, C].
            real: the rows that count in statistics, [N] bool; None: all.
            observe: whether to add the rows to `pending`, as in training.
            own: whether this pass trains the gate, so that "batch" uses the statistics of x.
        """
        if observe:
            self._add_up(x.detach(), real)
        if not own or self.statistics != "batch":
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        if real is None:
            no_row = x.new_zeros(x.size(0), 1, dtype=torch.bool)
        else:
            no_row = ~real.unsqueeze(-1)
        count = (~no_row).sum().to(x.dtype)
        mean = x.masked_fill(no_row, 0.0).sum(0) / count.clamp_min(1.0)
        variance = (x - mean).masked_fill(no_row, 0.0).square().sum(0) / count.clamp_min(1.0)
        mean = torch.where(count > 1, mean, self.running_mean)
        variance = torch.where(count > 1, variance, self.running_var)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias

    @torch.no_grad()
    def _add_up(self, x: Tensor, real: Tensor | None) -> None:
        unit = (x - self.running_mean) / torch.sqrt(self.running_var + self.eps)
        count = unit.new_full((1,), unit.size(0))
        if real is not None:
            unit = unit.masked_fill(~real.unsqueeze(-1), 0.0)
            count = real.sum().to(unit.dtype).reshape(1)
        self.observe(torch.cat([unit.sum(0), unit.square().sum(0), count]))

    @torch.no_grad()
    def update(self, sums: Tensor) -> None:
        """Update the running statistics.

        Args:
            sums: the sum of `pending` over all workers, [2·C + 1]. Sums that overflowed (a batch in half
                precision) are ignored.
        """
        sums = torch.where(sums.isfinite().all(), sums, torch.zeros_like(sums))
        count = sums[-1]
        mean, square = (sums[:-1] / count.clamp_min(1.0)).chunk(2)
        spread = torch.sqrt(self.running_var + self.eps)
        self.num_batches_tracked += (count > 0).long()
        weight = (1.0 / (self.num_batches_tracked + 1)).clamp_min(MOMENTUM) * (count > 0)
        variance = (square - mean.square()).clamp_min(0.0) * spread.square()
        self.running_mean += weight * mean * spread
        self.running_var += weight * (variance - self.running_var)


class SequenceGate(nn.Module):
    """g(x̄; φ): batch norm → linear → tanh → dropout → linear → softmax over the experts.

    While the gate is frozen (in an F step its parameters require no gradients) it computes what evaluation
    does: without dropout, and normalised by the running statistics. It observes its inputs in all of
    training. Its computation and parameters stay in float32 even if the model is cast to half precision,
    which would lose the steps of plain SGD.

    Args:
        model_dim: C.
        num_experts: E.
        hidden_dim: the number of hidden units.
        dropout: the probability with which a hidden unit is dropped while the gate learns.
        norm: the statistics of `GateNorm`, one of NORMS.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        hidden_dim: int = 256,
        dropout: float = 0.1,
        norm: str = "earlier",
    ):
        super().__init__()
        self.norm = GateNorm(model_dim, norm)
        self.fc1 = nn.Linear(model_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, num_experts)
        self.dropout = dropout

    def reset_parameters(self) -> None:
        """Draw the weights again; the running statistics stay."""
        nn.init.ones_(self.norm.weight)
        nn.init.zeros_(self.norm.bias)
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    @property
    def learns(self) -> bool:
        """Whether this forward pass trains the gate."""
        if not self.training or self.norm.weight.requires_grad:
            return self.training
        return any([parameter.requires_grad for parameter in self.parameters()])  # an adapter

    def forward(self, mean: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The responsibility of each expert.

        Args:
            mean: means of the inputs of a sequence, or of the inputs up to a position, [N, C].
            real: the rows that count in statistics, [N] bool; None: all.

        Returns:
            Probabilities and logits, [N, E] each, in the dtype of the gate's parameters.
        """
        learns = self.learns
        with full_precision(mean.device.type):
            x = self.norm(mean.to(self.norm.weight.dtype), real, self.training, learns)
            hidden = F.dropout(torch.tanh(self.fc1(x)), self.dropout, learns)
            logits = self.fc2(hidden)
            return torch.softmax(logits, dim=-1), logits

    def _apply(
        self, fn: Callable[[Tensor], Tensor], *args: object, **kwargs: object
    ) -> "SequenceGate":
        def keeping_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(moved.device)
            return moved

        super()._apply(keeping_precision, *args, **kwargs)
        return self


def gates_of(model: nn.Module) -> list[SequenceGate]:
    """All learned gates of a model, in order."""
    return [module for module in model.modules() if isinstance(module, SequenceGate)]


def gate_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all learned gates of a model, in order."""
    return list(itertools.chain.from_iterable(gate.parameters() for gate in gates_of(model)))
