"""Means of an attention's inputs for MAE's gate, over a sequence or up to each position."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

# Entries of `KVCache.sums`, which a beam search reorders by rows
_TOTAL = "gate_total"  # the sum over all positions so far, [B, C + 1]
_LATEST_ROWS = "gate_rows"  # the rows that the next window can reach, [B, < window, C + 1]


def sequence_mean(x: Tensor, padding: Tensor | None) -> Tensor:
    """Mean over the real positions of each sequence (the average of MAE §2.3).

    Args:
        x: inputs, [B, T, C].
        padding: [B, T] bool, True = padding; None: there is no padding.

    Returns:
        [B, C], in float32 or wider; zeros for a sequence that is all padding.
    """
    return _divide(_rows(x, padding).sum(1))


def running_mean(
    x: Tensor,
    padding: Tensor | None,
    window: int | None = None,
    sums: dict[str, Tensor] | None = None,
) -> Tensor:
    """Mean, at each position, over the real inputs among the latest `window` positions, its own included.

    A mean depends only on the inputs in its window: an input that has left the window leaves no rounding
    error, however large it was.

    Args:
        x: inputs, [B, T, C].
        padding: [B, T] bool, True = padding, which takes a position of the window but no part in the mean;
            None: there is no padding.
        window: the number of positions; None: all positions so far.
        sums: `KVCache.sums` of a generation, with what its earlier steps stored; updated in place. None: x is
            the whole sequence.

    Returns:
        [B, T, C], in float32 or wider; zeros where the window is all padding.
    """
    rows = _rows(x, padding)
    if window is None:
        totals = rows.cumsum(1)
        if sums is not None:
            before = sums.get(_TOTAL)
            if before is not None:
                totals = totals + before.unsqueeze(1)
            if totals.size(1):
                sums[_TOTAL] = totals[:, -1]
        return _divide(totals)
    if sums is not None:
        before = sums.get(_LATEST_ROWS)
        if before is not None:
            rows = torch.cat([before, rows], dim=1)
        sums[_LATEST_ROWS] = rows[:, max(0, rows.size(1) - window + 1) :]
    return _divide(_window_sums(rows, window)[:, rows.size(1) - x.size(1) :])


def _window_sums(rows: Tensor, window: int) -> Tensor:
    """The sum of the latest `window` rows at each position, [B, S, C + 1]."""
    length = rows.size(1)
    if is_compiling():  # a graph must not depend on the length
        return F.pad(rows, (0, 0, window - 1, 0)).unfold(1, window, 1).sum(-1)
    if length <= window:
        return rows.cumsum(1)
    # A window is the end of one piece of `window` rows and the beginning of the next piece. With window = 3
    # and pieces [a b c] [d e f], the beginnings of the second piece are d, d+e, d+e+f; the ends of the first
    # piece that belong to them are b+c, c, 0. Their sums are the windows: b+c+d, c+d+e, d+e+f.
    pieces = F.pad(rows, (0, 0, 0, -length % window)).unflatten(1, (-1, window))
    beginnings = pieces.cumsum(2)  # [B, n, window, C + 1]
    ends = pieces[:, :-1, 1:].flip(2).cumsum(2).flip(2)  # [B, n − 1, window − 1, C + 1]
    # Zeros for what precedes the first piece, and for the last row of each piece
    sums: Tensor = (beginnings + F.pad(ends, (0, 0, 0, 1, 1, 0))).flatten(1, 2)[:, :length]
    return sums


def _rows(x: Tensor, padding: Tensor | None) -> Tensor:
    """Inputs with zeros at padding, and a last column of 1 (real) or 0 (padding), [B, T, C + 1]."""
    x = x if x.dtype == torch.float64 else x.float()
    if padding is None:
        real = x.new_ones(x.shape[:2])
    else:
        real = (~padding).to(x.dtype)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0)
    return torch.cat([x, real.unsqueeze(-1)], dim=-1)


def _divide(sums: Tensor) -> Tensor:
    """Sums of inputs, divided by the count in the last column."""
    return sums[..., :-1] / sums[..., -1:].clamp_min(1.0)
