"""Means of an attention module's inputs, for MAE's gate: of a sequence, or up to each position."""

from typing import Optional

import torch
from torch import Tensor

from moa_fairseq.attention.cache import Cache


def sequence_mean(x: Tensor, padding: Optional[Tensor]) -> Tensor:
    """Mean over the real positions of x [B, T, C] → [B, C]; padding [B, T], True = padding.

    float32 or wider; zeros for a sequence of padding only.
    """
    return _divide(_rows(x, padding).sum(1))


def running_mean(
    x: Tensor, padding: Optional[Tensor], window: Optional[int] = None, cache: Optional[Cache] = None
) -> Tensor:
    """Mean, at each position, of the latest `window` real inputs up to and including it.

    x [B, T, C] → [B, T, C], float32 or wider; window None: of all inputs so far. padding [B, T], True =
    padding: takes no part, but occupies its place in the window. cache: what earlier steps of a generation
    left (entry gate_total [B, C + 1], or gate_rows [B, ≤ window, C + 1]); updated in place.
    """
    rows = _rows(x, padding)
    if window is None:
        totals = rows.cumsum(1)
        if cache is not None:
            before = cache.get("gate_total")
            if before is not None:
                totals = totals + before.unsqueeze(1)
            cache["gate_total"] = totals[:, -1]
        return _divide(totals)
    if cache is not None:
        before = cache.get("gate_rows")
        if before is not None:
            rows = torch.cat([before, rows], dim=1)
        cache["gate_rows"] = rows[:, -window:]
    sums = rows.cumsum(1)
    if sums.size(1) > window:
        sums = torch.cat([sums[:, :window], sums[:, window:] - sums[:, :-window]], dim=1)
    return _divide(sums[:, -x.size(1) :])


def _rows(x: Tensor, padding: Optional[Tensor]) -> Tensor:
    """[B, T, C + 1]: the inputs, zero at padding, and a last column of 1 for real inputs, 0 for padding."""
    x = x if x.dtype == torch.float64 else x.float()
    real = x.new_ones(x.shape[:2]) if padding is None else (~padding).to(x.dtype)
    real = real.unsqueeze(-1)
    return torch.cat([x * real, real], dim=-1)


def _divide(sums: Tensor) -> Tensor:
    return sums[..., :-1] / sums[..., -1:].clamp_min(1.0)
