"""Scaled-dot-product attention with fairseq's masks, and the incremental key/value cache."""

import math
from typing import Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

Cache = Dict[str, Optional[Tensor]]


def merge_masks(
    attn_mask: Optional[Tensor], key_padding_mask: Optional[Tensor], dtype: torch.dtype
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """fairseq's two masks as one additive mask, and the rows that may attend to nothing.

    attn_mask [T, S], additive float or bool (True = blocked); key_padding_mask [B, S], True = padding.
    Returns (mask [1 or B, 1, T or 1, S] of `dtype` or None, blind [1 or B, 1, T or 1, 1] bool or None).
    A blind row (a sentence of padding only) would be 0/0 in the softmax: it is opened here, and the
    caller writes zeros over it.
    """
    if attn_mask is None and key_padding_mask is None:
        return None, None
    additive = blocked = None
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            blocked = attn_mask[None, None]
        else:
            additive = attn_mask.to(dtype)[None, None]
            blocked = torch.isneginf(additive)
    if key_padding_mask is None:
        return additive if additive is not None else _additive(blocked, dtype), None
    padding = key_padding_mask.to(torch.bool)[:, None, None, :]
    blocked = padding if blocked is None else blocked | padding
    blind = blocked.all(-1, keepdim=True)
    mask = _additive(blocked & ~blind, dtype)
    if additive is not None:
        mask = mask + additive.masked_fill(torch.isneginf(additive), 0.0)
    return mask, blind


def _additive(blocked: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(blocked.shape, dtype=dtype, device=blocked.device).masked_fill_(blocked, -math.inf)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Optional[Tensor] = None,
    key_padding_mask: Optional[Tensor] = None,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Softmax(q·kᵀ/√D)·v for H query heads over H or 1 key/value heads (MoA Eq. 10-11).

    q [B, H, T, D], k and v [B, H or 1, S, D] → ([B, H, T, D], weights [B, H, T, S] float32 if
    need_weights else None). A single key/value head is broadcast, not copied. dropout: probability
    with which attention weights are zeroed (0 outside training); the returned weights are from
    before the dropout. Masks as in `merge_masks`; a query without any key gets zeros.
    """
    mask, blind = merge_masks(attn_mask, key_padding_mask, q.dtype)
    weights = None
    if need_weights:
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(
            scores, dim=-1, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32
        )
        if blind is not None:
            weights = weights.masked_fill(blind, 0.0)
        out = torch.matmul(F.dropout(weights.to(q.dtype), dropout, dropout > 0), v)
    else:
        k, v = (t.expand(-1, q.size(1), -1, -1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        if blind is not None:
            out = out.masked_fill(blind, 0.0)
    return out, weights


def extend_cache(
    cache: Cache, k: Optional[Tensor], v: Optional[Tensor], static: bool
) -> Tuple[Tensor, Tensor]:
    """The keys and values of all steps so far, [B, H, S, D]; the cache is updated in place.

    static: keys and values that were cached once (of the encoder) are returned as they are.
    """
    if cache.get("prev_key") is not None:
        if static:
            return cache["prev_key"], cache["prev_value"]
        k = torch.cat([cache["prev_key"], k], dim=2)
        v = torch.cat([cache["prev_value"], v], dim=2)
    cache["prev_key"], cache["prev_value"] = k, v
    return k, v


def extend_padding(
    cache: Cache, key_padding_mask: Optional[Tensor], batch: int, length: int, static: bool
) -> Optional[Tensor]:
    """The key padding mask [B, S] of all steps so far, S = length; None while nothing is padded.

    A step may come without a mask before or after one with it: missing steps are unpadded.
    """
    previous = cache.get("prev_key_padding_mask")
    if static and previous is not None:
        return previous
    if previous is not None or key_padding_mask is not None:
        known = previous if previous is not None else key_padding_mask
        if previous is None:
            before = known.new_zeros(batch, length - key_padding_mask.size(1), dtype=torch.bool)
            parts = [before, key_padding_mask.bool()]
        else:
            step = length - previous.size(1)
            new = known.new_zeros(batch, step, dtype=torch.bool)
            parts = [previous.bool(), new if key_padding_mask is None else key_padding_mask.bool()[:, -step:]]
            if step == 0:
                parts = parts[:1]
        key_padding_mask = torch.cat(parts, dim=1)
    cache["prev_key_padding_mask"] = key_padding_mask
    return key_padding_mask
