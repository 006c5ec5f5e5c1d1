"""Positions inside of attention: how far apart a query and a key stand, for any family to take."""

from typing import Optional, Tuple

import torch
from torch import Tensor, nn

from moa_fairseq.errors import UserError


class Positions(nn.Module):
    """What a self-attention asks about positions; this one knows none.

    Queries stand at first_query, first_query + 1, …; keys at 0, 1, …, counted from the first cached or
    carried one.
    """

    def rotate(self, q: Tensor, k: Tensor, first_query: int) -> Tuple[Tensor, Tensor]:
        """Queries [B, H, T, D] and their own positions' keys [B, H or 1, T, D], before keys are cached."""
        return q, k

    def bias(self, q: Tensor, key_length: int, first_query: int) -> Optional[Tensor]:
        """Added to the scaled scores: [B or 1, H or 1, T, S], S = key_length, or None; q is as projected."""
        return None


class RotaryPositions(Positions):
    """RoPE (Su et al., arXiv 2104.09864, Eq. 34): scores then depend on distances only.

    The pair (x_j, x_{j + D/2}) of a head's D numbers turns by the angle p · base^(−2j/D) at position p.
    Raises UserError for an odd D.
    """

    def __init__(self, head_dim: int, base: float = 10000.0):
        super().__init__()
        if head_dim % 2:
            raise UserError(
                f"--positions rope turns pairs of numbers, and heads of dimension {head_dim} have an odd "
                "one: choose an even head dimension."
            )
        speed = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self.register_buffer("speed", speed, persistent=False)  # [D / 2]

    def rotate(self, q: Tensor, k: Tensor, first_query: int) -> Tuple[Tensor, Tensor]:
        position = torch.arange(first_query, first_query + q.size(2), device=q.device, dtype=torch.float64)
        angle = position[:, None] * self.speed.to(torch.float64)
        cos, sin = angle.cos(), angle.sin()
        return _turned(q, cos, sin), _turned(k, cos, sin)

    def _apply(self, fn, *args, **kwargs):
        speed = self.speed
        super()._apply(fn, *args, **kwargs)
        self.speed = speed.to(self.speed.device)  # a cast of the model must not round the angles
        return self


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, D]; cos and sin [T, D / 2]. In float32 or wider: half precision loses far positions."""
    wide = x if x.dtype == torch.float64 else x.float()
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    first, second = wide.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


POSITIONS_IN_ATTENTION = {"rope": RotaryPositions}
