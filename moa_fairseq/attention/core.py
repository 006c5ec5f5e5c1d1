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
    need_weights else None). A single key/value head is shared, not copied; so are keys that stand once
    for the n hypotheses of a beam, k and v [B / n, 1, S, D] with masks of B / n rows. dropout: probability
    with which attention weights are zeroed (0 outside training); the returned weights are from
    before the dropout. Masks as in `merge_masks`; a query without any key gets zeros.
    """
    if k.size(0) != q.size(0):  # the beam's hypotheses become more heads
        batch, heads, tgt_len, dim = q.shape
        grouped = q.reshape(k.size(0), -1, tgt_len, dim)
        out, weights = attend(grouped, k, v, attn_mask, key_padding_mask, dropout, need_weights)
        out = out.reshape(batch, heads, tgt_len, dim)
        return out, None if weights is None else weights.reshape(batch, heads, tgt_len, -1)
    causal = is_causal(attn_mask) and key_padding_mask is None and q.is_cuda and not need_weights
    if causal:  # the flash kernels of GPUs take this flag, and no mask
        k, v = (t.expand(-1, q.size(1), -1, -1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True), None
    mask, blind = merge_masks(attn_mask, key_padding_mask, q.dtype)
    if need_weights:
        out, weights = _attend_with_weights(q, k, v, mask, blind, dropout)
    else:
        out, weights = _shared_head_attention(q, k, v, mask, dropout), None
    return (out if blind is None else out.masked_fill(blind, 0.0)), weights


def _shared_head_attention(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout: float) -> Tensor:
    """torch's attention; where one key/value head serves all, the heads become more queries of it.

    The keys are then read once instead of H times, and their gradient is one product instead of a sum
    over H copies. Only a mask that differs between queries must be repeated per head.
    """
    batch, heads, tgt_len, dim = q.shape
    per_query = mask is not None and mask.size(2) > 1
    shared = k.size(1) == 1 and heads > 1
    if not shared or (per_query and mask.numel() * heads > q.numel()):
        k, v = (t.expand(-1, heads, -1, -1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    if per_query:
        mask = mask.repeat_interleave(heads, dim=2)
    q = q.transpose(1, 2).reshape(batch, 1, tgt_len * heads, dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return out.reshape(batch, tgt_len, heads, dim).transpose(1, 2)


def _attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], blind: Optional[Tensor], dropout: float
) -> Tuple[Tensor, Tensor]:
    """The same, written out, since torch's attention keeps the weights to itself."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores + mask
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores, dim=-1, dtype=dtype)
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
    return torch.matmul(F.dropout(weights.to(q.dtype), dropout, dropout > 0), v), weights


_CAUSAL = "_moa_fairseq_causal"


def mark_causal(mask: Tensor) -> Tensor:
    """Say of an attn_mask [T, T] that it blocks the future and nothing else: fast kernels want to know.

    The mark is a hint on this tensor object; where it gets lost, the mask itself still holds.
    """
    setattr(mask, _CAUSAL, True)
    return mask


def is_causal(mask: Optional[Tensor]) -> bool:
    """Whether `mark_causal` was said of this mask."""
    return getattr(mask, _CAUSAL, False)


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
    if static and "prev_key_padding_mask" in cache:  # of the same keys
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
