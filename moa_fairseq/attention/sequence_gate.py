"""MAE's gate: how responsible each expert is for an input (arXiv 2005.06537, §2.3 and Appendix A)."""

import contextlib
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EarlierBatchNorm(nn.BatchNorm1d):
    """Batch normalisation by the statistics of earlier updates, in training as in evaluation.

    A batch's own statistics are means over all of its positions: dividing by them would tell a causal
    gate about later positions and other sentences. Here a forward pass normalises by the running
    statistics as they stand, and only adds up what it sees (`pending`); `absorb` lets those sums in
    after the update, so that a batch acts on later updates alone. Further: an output depends neither on
    who else is in the batch nor on how the batch is spread over workers and accumulation steps, and F
    steps, G steps and evaluation apply one and the same function. In a G step nothing below the gate
    moves, so no gradient is lost by holding the statistics constant.

    Until the first `absorb` they are 0 and 1. That prior keeps the weight of one update in their mean,
    which becomes a moving average (weight `momentum`) once updates are many.
    """

    def __init__(self, num_features: int):
        super().__init__(num_features)
        # Σ x̂ [C], Σ x̂² [C] and the count, x̂ being normalised already: sums of unit size lose no digits
        self.register_buffer("pending", torch.zeros(2 * num_features + 1), persistent=False)
        self.has_pending = False

    def forward(self, x: Tensor, real: Optional[Tensor] = None, observe: bool = False) -> Tensor:
        """Normalise x [N, C]. observe: count the rows in, or those where real [N] bool is true."""
        if observe:
            self._add_up(x.detach(), real)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)

    @torch.no_grad()
    def _add_up(self, x: Tensor, real: Optional[Tensor]) -> None:
        unit = (x - self.running_mean) / (self.running_var + self.eps).sqrt()
        count = unit.new_full((1,), unit.size(0))
        if real is not None:
            unit = unit * real.unsqueeze(-1)
            count = real.sum().to(unit.dtype).reshape(1)
        self.pending += torch.cat([unit.sum(0), unit.square().sum(0), count])
        self.has_pending = True

    @torch.no_grad()
    def absorb(self, sums: Tensor) -> None:
        """Let sums (as `pending`, over all workers) into the running statistics; forget what is pending.

        Sums that overflowed, of a batch in half precision, are passed over.
        """
        sums = torch.where(sums.isfinite().all(), sums, torch.zeros_like(sums))
        count = sums[-1]
        mean, square = (sums[:-1] / count.clamp_min(1.0)).chunk(2)
        spread = (self.running_var + self.eps).sqrt()
        self.num_batches_tracked += (count > 0).long()
        weight = (1.0 / (self.num_batches_tracked + 1)).clamp_min(self.momentum) * (count > 0)
        variance = (square - mean.square()).clamp_min(0.0) * spread.square()
        self.running_mean += weight * mean * spread
        self.running_var += weight * (variance - self.running_var)
        self.pending.zero_()
        self.has_pending = False


class SequenceGate(nn.Module):
    """g(x̄; φ): batch norm → linear → tanh → dropout → linear → softmax over the experts.

    While it is frozen (its parameters do not require gradients: an F step) it neither drops anything
    out nor observes statistics: it is the function that evaluation uses. It stays in float32 whatever
    the model is cast to, its parameters too: steps of plain SGD are lost in half precision.
    """

    def __init__(self, model_dim: int, num_experts: int, hidden_dim: int = 256, dropout: float = 0.1):
        super().__init__()
        self.norm = EarlierBatchNorm(model_dim)
        self.fc1 = nn.Linear(model_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, num_experts)
        self.dropout = dropout

    @property
    def learns(self) -> bool:
        """Whether this forward pass trains the gate."""
        return self.training and self.fc1.weight.requires_grad

    def forward(self, mean: Tensor, real: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        """mean [N, C] of the inputs → (probabilities [N, E], logits [N, E]); real [N]: rows that count."""
        with torch.autocast(mean.device.type, enabled=False):
            x = self.norm(mean.to(self.fc1.weight.dtype), real, observe=self.learns)
            hidden = F.dropout(torch.tanh(self.fc1(x)), self.dropout, self.learns)
            logits = self.fc2(hidden)
            return torch.softmax(logits, dim=-1), logits

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: object, **kwargs: object) -> "SequenceGate":
        def keeping_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(moved.device)
            return moved

        return super()._apply(keeping_precision, *args, **kwargs)


def gates_of(model: nn.Module) -> List[SequenceGate]:
    """Every learned gate of a model, in order."""
    return [module for module in model.modules() if isinstance(module, SequenceGate)]


@contextlib.contextmanager
def forgetting_statistics(gates: Sequence[SequenceGate]) -> Iterator[None]:
    """What the gates observe inside the block does not count (but has been pending: workers still meet)."""
    before = [gate.norm.pending.clone() for gate in gates]
    yield
    for gate, pending in zip(gates, before):
        gate.norm.pending.copy_(pending)


def absorb_statistics(
    gates: Sequence[SequenceGate], all_reduce: Optional[Callable[[Tensor], object]] = None
) -> None:
    """Let what the gates have observed since the last call into their running statistics.

    all_reduce: sums a tensor over all workers in place; every worker must call at the same time.
    """
    if not gates:
        return
    flat = torch.cat([gate.norm.pending for gate in gates])
    if all_reduce is not None:
        all_reduce(flat)
    for gate, sums in zip(gates, flat.split([gate.norm.pending.numel() for gate in gates])):
        gate.norm.absorb(sums)
