"""Means of an attention module's inputs, for MAE's gate: of a sequence, or up to each position."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling


def sequence_mean(x: Tensor, padding: Tensor | None) -> Tensor:
    """Mean over the real positions of each sequence (the average of MAE §2.3).

    Args:
        x: [B, T, C].
        padding: [B, T] bool, True = padding; None: there is none.

    Returns:
        [B, C], in float32 or wider; zeros for a sequence of padding only.
    """
    return _divide(_rows(x, padding).sum(1))


def running_mean(
    x: Tensor,
    padding: Tensor | None,
    window: int | None = None,
    held: dict[str, Tensor] | None = None,
) -> Tensor:
    """Mean, at each position, of the latest `window` real inputs up to and including it.

    A mean is made of the window's inputs and of no others: what has left the window leaves no trace, however
    large it was.

    Args:
        x: [B, T, C].
        padding: [B, T] bool, True = padding: takes no part, but occupies its place in the window.
        window: how many positions; None: all so far.
        held: what earlier steps of a generation left (entry gate_total [B, C + 1], or gate_rows
            [B, < window, C + 1]); updated in place. None: x is the whole sequence.

    Returns:
        [B, T, C], in float32 or wider; zeros where a window has padding only.
    """
    rows = _rows(x, padding)
    if window is None:
        totals = rows.cumsum(1)
        if held is not None:
            before = held.get("gate_total")
            if before is not None:
                totals = totals + before.unsqueeze(1)
            if totals.size(1):
                held["gate_total"] = totals[:, -1]
        return _divide(totals)
    if held is not None:
        before = held.get("gate_rows")
        if before is not None:
            rows = torch.cat([before, rows], dim=1)
        held["gate_rows"] = rows[:, max(0, rows.size(1) - window + 1) :]
    length = rows.size(1)
    if is_compiling():  # a graph must not depend on lengths
        sums = F.pad(rows, (0, 0, window - 1, 0)).unfold(1, window, 1).sum(-1)
    elif length > window:
        # Pieces as long as the window: one reaches from a piece's end into the next one's beginning.
        # [B, n, window, C + 1]
        pieces = F.pad(rows, (0, 0, 0, -length % window)).unflatten(1, (-1, window))
        ends = pieces[:, :-1, 1:].flip(2).cumsum(2).flip(2)
        sums = (pieces.cumsum(2) + F.pad(ends, (0, 0, 0, 1, 1, 0))).flatten(1, 2)[:, :length]
    else:
        sums = rows.cumsum(1)
    return _divide(sums[:, length - x.size(1) :])


def _rows(x: Tensor, padding: Tensor | None) -> Tensor:
    """[B, T, C + 1]: the inputs, zero at padding, and a last column of 1 for real inputs, 0 for padding."""
    x = x if x.dtype == torch.float64 else x.float()
    if padding is None:
        real = x.new_ones(x.shape[:2])
    else:
        real = (~padding).to(x.dtype)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0)
    return torch.cat([x, real.unsqueeze(-1)], dim=-1)


def _divide(sums: Tensor) -> Tensor:
    return sums[..., :-1] / sums[..., -1:].clamp_min(1.0)
