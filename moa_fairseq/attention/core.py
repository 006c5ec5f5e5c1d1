"""Scaled-dot-product attention with fairseq's masks, an additive bias, and heads that share keys."""

import math
import os
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from moa_fairseq.torch_compat import without_cudnn_attention

_BLOCKED = -1e30  # a score that gets no weight, far from overflowing
_KEY_BLOCK = 128  # keys of one program in a flash kernel's backward pass
# cuDNN's attention, torch's first choice on Hopper since 2.11, gives NaN gradients with some masks, plans
# anew for each of a corpus's many batch shapes, and is not deterministic: it is left out.
CUDNN_VARIABLE = "MOA_FAIRSEQ_CUDNN_ATTENTION"
_KEEPS_CUDNN = os.environ.get(CUDNN_VARIABLE, "0") == "1"


def switch_off_cudnn() -> None:
    """Leave cuDNN's attention out in the whole process, which saves doing so at each call."""
    if not _KEEPS_CUDNN:
        torch.backends.cuda.enable_cudnn_sdp(False)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout: float, is_causal: bool = False
) -> Tensor:
    """torch's `scaled_dot_product_attention` by any kernel but cuDNN's."""
    if not q.is_cuda or _KEEPS_CUDNN:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    with without_cudnn_attention():
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)


def merge_masks(
    attn_mask: Optional[Tensor], key_padding_mask: Optional[Tensor], dtype: torch.dtype
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """fairseq's two masks as one additive mask, and the rows that may attend to nothing.

    attn_mask [T, S] or [B, T, S], additive float, or bool or integers (True, 1 = blocked); key_padding_mask
    [B, S], True = padding.
    Returns (mask [1 or B, 1, T or 1, S] of `dtype` or None, blind [1 or B, 1, T or 1, 1] bool or None).
    A blind row (a sentence of padding only) would be 0/0 in the softmax: it is unblocked here, and the caller
    writes zeros over it.
    """
    additive = blocked = None
    if attn_mask is not None:
        attn_mask = attn_mask.unsqueeze(-3) if attn_mask.dim() == 3 else attn_mask[None, None]
        if not attn_mask.is_floating_point():
            blocked = attn_mask.bool()
        else:
            additive = attn_mask.to(dtype)
            blocked = torch.isneginf(additive)
    if key_padding_mask is None:
        if additive is None and blocked is not None:
            additive = _additive(blocked, dtype)
        return additive, None
    padding = key_padding_mask.to(torch.bool)[:, None, None, :]
    blocked = padding if blocked is None else blocked | padding
    blind = blocked.all(-1, keepdim=True)
    mask = _additive(blocked & ~blind, dtype)
    if additive is not None:
        mask = mask + additive.masked_fill(torch.isneginf(additive), 0.0)
    return mask, blind


def _additive(blocked: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(blocked.shape, dtype=dtype, device=blocked.device).masked_fill_(blocked, -math.inf)


def only_padding(key_padding_mask: Tensor, v: Tensor) -> Tuple[Tensor, Tensor]:
    """Padding as an additive mask [B, 1, 1, S], and the values [B, G, S, D] with zeros at padding.

    Blocked scores are very small instead of −inf, so that the softmax of a sentence of padding only is
    defined; it weights zeros. This takes two passes over small tensors, `merge_masks` ten.
    """
    padding = key_padding_mask.to(torch.bool)[:, None, None, :]
    mask = torch.empty(padding.shape, dtype=v.dtype, device=v.device)
    torch.mul(padding, max(_BLOCKED, torch.finfo(v.dtype).min / 2), out=mask)
    return mask, torch.where(padding.transpose(-1, -2), 0.0, v)


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
    else None). G divides H: query head i reads key head i mod G. Shared heads are not copied; nor are keys
    that the n hypotheses of a beam share: k and v [B / n, G, S, D] with masks of B / n rows. dropout:
    probability with which attention weights are zeroed (0 outside training); the returned weights are from
    before the dropout. Masks as in `merge_masks`; a query without any key gets zeros. bias [B or 1, H or 1,
    T, S] is added to the scaled scores.
    """
    if k.size(0) != q.size(0):  # the beam's hypotheses become more heads
        batch, heads, tgt_len, dim = q.shape
        if bias is not None:
            bias = bias.expand(batch, heads, -1, -1).reshape(k.size(0), -1, tgt_len, k.size(2))
        grouped = q.reshape(k.size(0), -1, tgt_len, dim)  # [B, H, T, D] → [B / n, n·H, T, D]
        out, weights = attend(grouped, k, v, attn_mask, key_padding_mask, dropout, need_weights, bias)
        out = out.reshape(batch, heads, tgt_len, dim)
        return out, None if weights is None else weights.reshape(batch, heads, tgt_len, -1)
    if bias is None and not need_weights and _is_causal_only(q, attn_mask, key_padding_mask):
        return fused_attention(q, *_copied(q, k, v), None, dropout, is_causal=True), None
    mask: Optional[Tensor]
    blind: Optional[Tensor] = None
    if attn_mask is None and key_padding_mask is not None and not need_weights:
        mask, v = only_padding(key_padding_mask, v)
    else:
        mask, blind = merge_masks(attn_mask, key_padding_mask, q.dtype)
    if bias is not None:
        mask = bias.to(q.dtype) if mask is None else mask + bias.to(q.dtype)
    if need_weights and blind is None and mask is not None:  # attn_mask or bias alone may block a whole row
        blind = torch.isneginf(mask).all(-1, keepdim=True)
        mask = mask.masked_fill(blind, 0.0)
    weights = None
    if need_weights:
        k, v = _copied(q, k, v)  # torch's attention does not return weights: the same, written out
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))  # [B, H, T, S]
        if mask is not None:
            scores = scores + mask
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        weights = torch.softmax(scores, dim=-1, dtype=wide)
        if blind is not None:
            weights = weights.masked_fill(blind, 0.0)
        out = torch.matmul(F.dropout(weights.to(q.dtype), dropout, dropout > 0), v)
    else:
        out = _shared_head_attention(q, k, v, mask, dropout)
    return (out if blind is None else out.masked_fill(blind, 0.0)), weights


def _copied(q: Tensor, k: Tensor, v: Tensor) -> Tuple[Tensor, Tensor]:
    """Keys and values repeated for each query head; views where there is one key head."""
    heads, groups = q.size(1), k.size(1)
    if groups == heads:
        return k, v
    if groups == 1:
        return k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
    return k.repeat(1, heads // groups, 1, 1), v.repeat(1, heads // groups, 1, 1)


def _processors(q: Tensor) -> int:
    """How many multiprocessors a GPU has to keep busy; 0 on a CPU."""
    return torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 0


def _shared_head_attention(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout: float) -> Tensor:
    """torch's attention; heads that share keys become more queries of them.

    The keys are then read once instead of H / G times, and their gradient is one product instead of a sum
    over copies. Only a mask that differs between queries must be repeated per head. A GPU's backward pass
    runs one program per block of keys: with few blocks (few long sentences) copying is faster.
    """
    batch, heads, tgt_len, dim = q.shape
    groups = k.size(1)
    sharing = heads // groups
    copies = heads == groups
    if mask is not None and not copies:
        copies = mask.size(1) > 1 or (mask.size(2) > 1 and mask.numel() * sharing > q.numel())
    few = tgt_len >= _KEY_BLOCK and batch * groups * -(-k.size(2) // _KEY_BLOCK) < _processors(q)
    if copies or few:
        k, v = _copied(q, k, v)
        return fused_attention(q, k, v, mask, dropout)
    if mask is not None and mask.size(2) > 1:
        mask = mask.repeat_interleave(sharing, dim=2)
    # [B, H, T, D] → [B, H / G, G, T, D] → [B, G, T·H / G, D], and back
    q = q.view(batch, sharing, groups, tgt_len, dim) if groups > 1 else q.unsqueeze(2)
    q = q.permute(0, 2, 3, 1, 4).reshape(batch, groups, tgt_len * sharing, dim)
    out = fused_attention(q, k, v, mask, dropout)
    out = out.reshape(batch, groups, tgt_len, sharing, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, heads, tgt_len, dim)


_CAUSAL = "_moa_fairseq_causal"
_RIGHT_PADDED = "_moa_fairseq_right_padded"


def mark_causal(mask: Tensor) -> Tensor:
    """Mark an attn_mask [T, T] that blocks the future and nothing else: fast kernels make use of it.

    The mark is a hint on this tensor object; if it gets lost, the mask itself still works.
    """
    setattr(mask, _CAUSAL, True)
    return mask


def is_causal(mask: Optional[Tensor]) -> bool:
    """Whether this mask has the mark of `mark_causal`."""
    return bool(getattr(mask, _CAUSAL, False))


def _is_causal_only(q: Tensor, attn_mask: Optional[Tensor], key_padding_mask: Optional[Tensor]) -> bool:
    """Whether torch's flag `is_causal` can replace the masks: flash kernels of GPUs take it, but no mask.

    Padding that stands only at the ends of sentences is hidden from every real query by causality. The
    results of padded queries are then unspecified instead of zero; nothing may depend on them.
    """
    if not is_causal(attn_mask) or not q.is_cuda:
        return False
    return key_padding_mask is None or is_right_padded(key_padding_mask)


def is_right_padded(key_padding_mask: Tensor) -> bool:
    """Whether padding [B, S] only follows real tokens. Waits for a GPU, once for each mask object."""
    if is_compiling():
        return False
    if not hasattr(key_padding_mask, _RIGHT_PADDED):
        padding = key_padding_mask.to(torch.bool)
        other = (padding[:, :-1] & ~padding[:, 1:]).any() | padding[:, :1].any()
        setattr(key_padding_mask, _RIGHT_PADDED, not bool(other))
    return bool(getattr(key_padding_mask, _RIGHT_PADDED))
