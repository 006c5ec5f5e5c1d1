"""The four projections of dense attention, for itself and for mixtures of its heads."""

import math
from typing import Any, Optional, Tuple

from torch import Tensor, nn

from moa_fairseq.attention.base import Decision, MixtureAttention


class DenseHeadsAttention(MixtureAttention[Decision]):
    """The heads of fairseq's attention, with its parameters and their names: for MAE, MoH, dense attention.

    head_dim: D, if it is not embed_dim / num_heads. A subclass calls `reset_parameters` after it has built
    its router.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kdim: Optional[int] = None,
        vdim: Optional[int] = None,
        bias: bool = True,
        head_dim: Optional[int] = None,
        **role: Any,
    ):
        super().__init__(embed_dim, num_heads, head_dim or embed_dim // num_heads, **role)
        width = num_heads * self.head_dim
        self.k_proj = nn.Linear(kdim or embed_dim, width, bias=bias)
        self.v_proj = nn.Linear(vdim or embed_dim, width, bias=bias)
        self.q_proj = nn.Linear(embed_dim, width, bias=bias)
        self.out_proj = nn.Linear(width, embed_dim, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise the projections as fairseq's attention does; routers and gates initialise themselves."""
        same = self.k_proj.in_features == self.v_proj.in_features == self.embed_dim
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2) if same else 1.0)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def project_keys_values(
        self, key: Tensor, value: Tensor, decision: Decision, padding: Optional[Tensor]
    ) -> Tuple[Tensor, Tensor]:
        return self._split(self.k_proj(key)), self._split(self.v_proj(value))

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, C] → [B, H, T, D]"""
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
