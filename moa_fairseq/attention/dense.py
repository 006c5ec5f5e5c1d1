"""Dense multi-head attention, which every mixture is compared with: fairseq's, with a few settings more."""

import math
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from moa_fairseq.attention.base import Decision, FamilySettings, MixtureAttention, flag
from moa_fairseq.attention.cache import Cache
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.errors import UserError


@dataclass
class DenseSettings(FamilySettings):
    """The flags of `DenseAttention`."""

    attention_head_dim: Optional[int] = flag(
        None,
        "width of a head (default: the model's width over its heads): a dense model with the "
        "multiply-accumulates, or the parameters, of a mixture",
    )
    key_heads: Optional[int] = flag(
        None,
        "heads of keys and values that the query heads share (default: each has its own): 1 is multi-query "
        "attention (arXiv 1911.02150), fewer than the query heads grouped-query attention (arXiv 2305.13245)",
    )
    dropped_heads: int = flag(
        0,
        "DropHead: in training each sequence does without N random heads in every attention, and the others "
        "are multiplied by h/(h - N); all heads work in evaluation",
    )

    def build(self, embed_dim: int, num_heads: int, causal: bool, **role: Any) -> "DenseAttention":
        """causal is unused: masks hide the future."""
        return DenseAttention(embed_dim, num_heads, **self.arguments(attention_head_dim="head_dim"), **role)


class DenseHeadsAttention(MixtureAttention[Decision]):
    """The heads of fairseq's attention, with its parameters and their names: for MAE, MoH, dense attention.

    head_dim: D, if it is not embed_dim / num_heads. A subclass calls `reset_parameters` after it has built
    its router, and may let `key_heads` be fewer than the heads. Raises UserError for heads that cannot share
    the width, and for key heads where each head has its own.
    """

    shares_keys = False

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
        if not self.shares_keys and role.get("key_heads") not in (None, num_heads):
            raise UserError(
                f"key_heads={role['key_heads']}: here each of the {num_heads} heads has keys of its own."
            )
        if num_heads < 1 or (head_dim is None and embed_dim % num_heads):
            raise UserError(
                f"{num_heads} attention heads cannot share a width of {embed_dim}: the width must be a "
                "multiple of the heads. (--attention-head-dim says how wide a head of dense attention is.)"
            )
        super().__init__(embed_dim, num_heads, head_dim or embed_dim // num_heads, **role)
        width, key_width = num_heads * self.head_dim, self.key_heads * self.head_dim
        self.k_proj = nn.Linear(kdim or embed_dim, key_width, bias=bias)
        self.v_proj = nn.Linear(vdim or embed_dim, key_width, bias=bias)
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

    def project_queries(self, x: Tensor, decision: Decision) -> Tensor:
        return self._split(self.q_proj(x))

    def project_keys_values(
        self, key: Tensor, value: Tensor, source: Optional[RoutingDecision]
    ) -> Tuple[Tensor, Tensor]:
        return self._split(self.k_proj(key)), self._split(self.v_proj(value))

    def projection_macs(self, queries: int, keys: int) -> Dict[str, int]:
        of_queries = 2 * queries * self.embed_dim * self.num_heads
        of_keys = keys * (self.k_proj.in_features + self.v_proj.in_features) * self.key_heads
        return {"router": 0, "projections": (of_queries + of_keys) * self.head_dim}

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H·D] → [B, H, T, D]; of keys and values G for H."""
        return x.view(*x.shape[:2], x.size(2) // self.head_dim, self.head_dim).transpose(1, 2)


class DenseAttention(DenseHeadsAttention[None]):
    """fairseq's attention: its parameters, their names and their first values; nothing is decided.

    head_dim: D, if it is not embed_dim / num_heads. key_heads: G heads of keys and values, which the H query
    heads share: 1 for multi-query, H / n for grouped-query attention. Query head h reads key head h mod G, as
    `core.attend` has it. Others, LLaMA among them, let h read key head h // (H / G): weights from there need
    their query heads reordered, rows of `q_proj` and columns of `out_proj`, so that theirs g·H/G + j becomes
    ours j·G + g. dropped_heads: in training t of the h heads, drawn for
    each sequence, are left out and the others multiplied by h/(h−t), as in an F step of MAE with a uniform
    gate (DropHead, arXiv 2004.13342, with a fixed number of heads). Raises UserError for impossible sizes.
    """

    shares_keys = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: Optional[int] = None,
        key_heads: Optional[int] = None,
        dropped_heads: int = 0,
        **role: Any,
    ):
        if key_heads is not None and (key_heads < 1 or num_heads % key_heads):
            raise UserError(
                f"--key-heads {key_heads} must divide the {num_heads} attention heads, which share them "
                "evenly."
            )
        if head_dim is not None and head_dim < 1:
            raise UserError(f"--attention-head-dim must be a positive number, not {head_dim}.")
        if not 0 <= dropped_heads < num_heads:
            raise UserError(
                f"--dropped-heads {dropped_heads} must lie between 0 and {num_heads - 1}: "
                f"one of the {num_heads} attention heads must be left."
            )
        super().__init__(embed_dim, num_heads, head_dim=head_dim, key_heads=key_heads, **role)
        self.dropped_heads = dropped_heads
        self.reset_parameters()

    def route(self, x: Tensor, padding: Optional[Tensor], cache: Optional[Cache]) -> None:
        return None

    def project_output(self, heads: Tensor, decision: None) -> Tensor:
        batch, num_heads = heads.shape[:2]
        if self.training and self.dropped_heads:
            dropped = torch.rand(batch, num_heads, device=heads.device).topk(self.dropped_heads).indices
            scale = heads.new_full((batch, num_heads), num_heads / (num_heads - self.dropped_heads))
            heads = heads * scale.scatter(1, dropped, 0.0)[:, :, None, None]
        rows = heads.transpose(1, 2).flatten(2)  # [B, H, T, D] → [B, T, H·D]
        out: Tensor = self.out_proj(rows)
        return out
