"""Scaled-dot-product attention with fairseq's masks, an additive bias, and heads that share keys."""

import math
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor


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
    bias: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Softmax(q·kᵀ/√D + bias)·v for H query heads over G key/value heads (MoA Eq. 10-11).

    q [B, H, T, D], k and v [B, G, S, D] → ([B, H, T, D], weights [B, H, T, S] float32 if need_weights
    else None). G divides H: query head i reads key head i mod G. Shared heads are not copied; nor
    are keys that stand once for the n hypotheses of a beam, k and v [B / n, G, S, D] with masks of B / n
    rows. dropout: probability with which attention weights are zeroed (0 outside training); the returned
    weights are from before the dropout. Masks as in `merge_masks`; a query without any key gets zeros.
    bias [B or 1, H or 1, T, S] is added to the scaled scores.
    """
    if k.size(0) != q.size(0):  # the beam's hypotheses become more heads
        batch, heads, tgt_len, dim = q.shape
        if bias is not None:
            bias = bias.expand(batch, heads, -1, -1).reshape(k.size(0), -1, tgt_len, k.size(2))
        grouped = q.reshape(k.size(0), -1, tgt_len, dim)
        out, weights = attend(grouped, k, v, attn_mask, key_padding_mask, dropout, need_weights, bias)
        out = out.reshape(batch, heads, tgt_len, dim)
        return out, None if weights is None else weights.reshape(batch, heads, tgt_len, -1)
    plain = key_padding_mask is None and bias is None and not need_weights
    if plain and is_causal(attn_mask) and q.is_cuda:  # the flash kernels of GPUs take this flag, and no mask
        return F.scaled_dot_product_attention(q, *_copied(q, k, v), dropout_p=dropout, is_causal=True), None
    mask, blind = merge_masks(attn_mask, key_padding_mask, q.dtype)
    if bias is not None:
        mask = bias.to(q.dtype) if mask is None else mask + bias.to(q.dtype)
    if need_weights and blind is None and mask is not None:  # attn_mask or bias alone may block a whole row
        blind = torch.isneginf(mask).all(-1, keepdim=True)
        mask = mask.masked_fill(blind, 0.0)
    if need_weights:
        out, weights = _attend_with_weights(q, *_copied(q, k, v), mask, blind, dropout)
    else:
        out, weights = _shared_head_attention(q, k, v, mask, dropout), None
    return (out if blind is None else out.masked_fill(blind, 0.0)), weights


def _copied(q: Tensor, k: Tensor, v: Tensor) -> Tuple[Tensor, Tensor]:
    """Keys and values for each query head; of one key head it is a view."""
    heads, groups = q.size(1), k.size(1)
    if groups == heads:
        return k, v
    if groups == 1:
        return k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
    return k.repeat(1, heads // groups, 1, 1), v.repeat(1, heads // groups, 1, 1)


def _shared_head_attention(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout: float) -> Tensor:
    """torch's attention; heads that share keys become more queries of them.

    The keys are then read once instead of H / G times, and their gradient is one product instead of a sum
    over copies. Only a mask that differs between queries must be repeated per head.
    """
    batch, heads, tgt_len, dim = q.shape
    groups = k.size(1)
    per_head = mask is not None and mask.size(1) > 1
    per_query = mask is not None and mask.size(2) > 1
    if heads == groups or per_head or (per_query and mask.numel() * (heads // groups) > q.numel()):
        k, v = _copied(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    sharing = heads // groups
    if per_query:
        mask = mask.repeat_interleave(sharing, dim=2)
    q = q.view(batch, sharing, groups, tgt_len, dim) if groups > 1 else q.unsqueeze(2)
    q = q.permute(0, 2, 3, 1, 4).reshape(batch, groups, tgt_len * sharing, dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    out = out.reshape(batch, groups, tgt_len, sharing, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, heads, tgt_len, dim)


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
