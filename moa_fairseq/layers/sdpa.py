"""Scaled-dot-product attention with masks, an additive bias, and heads that share keys."""

import math
import os
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from moa_fairseq.layers.torch_compat import without_cudnn_attention

_BLOCKED = -1e30  # a score that gets no weight, far from overflowing
_KEY_BLOCK = 128  # keys of one program in a flash kernel's backward pass
# cuDNN's attention, torch's first choice on Hopper since 2.11, gives NaN gradients with some masks, plans
# anew for each of a corpus's many batch shapes, and is not deterministic: it is left out.
CUDNN_VARIABLE = "MOA_FAIRSEQ_CUDNN_ATTENTION"
_KEEPS_CUDNN = os.environ.get(CUDNN_VARIABLE, "0") == "1"


class Masks(NamedTuple):
    """What the queries of a call may not see."""

    mask: Tensor | None = None  # [T, S] or [B, T, S]: additive float, or bool, True = blocked
    padding: Tensor | None = None  # of the keys, [B, S] bool, True = padding
    # The mask blocks the future and nothing else, so a kernel's flag may replace it
    is_causal: bool = False
    right_padded: bool = False  # padding only follows real tokens


NO_MASKS = Masks()


def switch_off_cudnn() -> None:
    """Leave cuDNN's attention out in the whole process, which saves doing so at each call."""
    if not _KEEPS_CUDNN:
        torch.backends.cuda.enable_cudnn_sdp(False)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool = False
) -> Tensor:
    """torch's `scaled_dot_product_attention` by any kernel but cuDNN's.

    Args:
        q: [B, H, T, D].
        k, v: [B, H, S, D].
        mask: additive, in the dtype of q, [B or 1, H or 1, T or 1, S]; None: every query sees every key.
        dropout: probability with which attention weights are zeroed, in evaluation as in training.
        is_causal: query t sees keys 0 … t; mask must then be None.

    Returns:
        [B, H, T, D].
    """
    if not q.is_cuda or _KEEPS_CUDNN:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    with without_cudnn_attention():
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)


def merge_masks(
    mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Both masks as one additive mask, and the rows that are fully masked, which would be 0/0 in the softmax.

    Args:
        mask, padding: as in `Masks`.
        dtype: of the additive mask.

    Returns:
        The additive mask [1 or B, 1, T or 1, S] or None; the blind rows [1 or B, 1, T or 1, 1] bool or None:
        they are unblocked in the mask, and the caller writes zeros over them.
    """
    additive = blocked = None
    if mask is not None:
        if mask.dim() == 3:
            mask = mask.unsqueeze(-3)
        else:
            mask = mask[None, None]
        if not mask.is_floating_point():
            blocked = mask.bool()
        else:
            additive = mask.to(dtype)
            blocked = torch.isneginf(additive)
    if padding is None:
        if additive is None and blocked is not None:
            additive = _additive(blocked, dtype)
        return additive, None
    padding = padding[:, None, None, :]
    if blocked is None:
        blocked = padding
    else:
        blocked = blocked | padding
    fully_masked = blocked.all(-1, keepdim=True)
    merged = _additive(blocked & ~fully_masked, dtype)
    if additive is not None:
        merged = merged + additive.masked_fill(torch.isneginf(additive), 0.0)
    return merged, fully_masked


def _additive(blocked: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(blocked, -math.inf, torch.zeros((), dtype=dtype, device=blocked.device))


def block(mask: Tensor | None, more: Tensor) -> Tensor:
    """The mask that also blocks what is True in `more`.

    Args:
        mask: [T, S] or [B, T, S], additive or bool; None: it blocks nothing.
        more: [T, S] bool.
    """
    if mask is None:
        return more
    if mask.is_floating_point():
        return mask.masked_fill(more, -torch.inf)
    return mask | more


def in_window(masks: Masks, q: Tensor, k: Tensor, window: int, first_query: int | Tensor) -> Masks:
    """Masks that also hide the keys before a query's window.

    Args:
        masks: of the call.
        q: [B, H, T, D].
        k: with those of the cache, [B, G, S, D].
        window: how many of the latest positions a query sees, its own included.
        first_query: the place of the first query's own key among the S.
    """
    keys = k.size(2)
    mask = masks.mask
    # It also counts the positions that a cache has dropped
    if mask is not None and mask.size(-1) != keys:
        mask = mask[..., mask.size(-1) - keys :]
    if not is_compiling() and keys <= window:  # a graph is for any length
        return masks._replace(mask=mask)
    query = first_query + torch.arange(q.size(2), device=q.device)
    before = torch.arange(keys, device=q.device) <= query[:, None] - window  # [T, S]
    return masks._replace(mask=block(mask, before), is_causal=False)


def _padding_bias(padding: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Padding as an additive mask [B, 1, 1, S], and the values [B, G, S, D] with zeros at padding.

    Blocked scores are very small instead of −inf, so that the softmax of a sentence of padding only is
    defined; it weights zeros. This takes two passes over small tensors, `merge_masks` ten.
    """
    padding = padding[:, None, None, :]
    lowest = max(_BLOCKED, torch.finfo(v.dtype).min / 2)
    mask = torch.where(padding, lowest, torch.zeros((), dtype=v.dtype, device=v.device))
    return mask, torch.where(padding.transpose(-1, -2), 0.0, v)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks = NO_MASKS,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax(q·kᵀ/√D + bias)·v for H query heads over G key heads (MoA Eq. 10-11).

    Shared heads are not copied; nor are keys that the n hypotheses of a beam share.

    Args:
        q: [B, H, T, D].
        k, v: [B, G, S, D], or [B / n, G, S, D] with masks of B / n rows. G divides H: query head i reads key
            head i mod G.
        masks: what queries may not see. A query without any key gets zeros.
        dropout: probability with which attention weights are zeroed (0 outside training).
        bias: added to the scaled scores, [B or 1, H or 1, T, S].

    Returns:
        [B, H, T, D]
    """
    if k.size(0) != q.size(0):
        result: Tensor = _for_beams(q, k, v, masks, dropout, bias, attend)
        return result
    if (
        masks.is_causal
        and bias is None
        and q.is_cuda
        and (masks.padding is None or masks.right_padded)
    ):
        # Padding at the ends of sentences is hidden from every real query by causality. What padded queries
        # get is then unspecified instead of zero; nothing may depend on it.
        return fused_attention(q, *repeat_kv(q, k, v), None, dropout, is_causal=True)
    mask: Tensor | None
    fully_masked: Tensor | None = None
    if masks.mask is not None:
        mask, fully_masked = merge_masks(masks.mask, masks.padding, q.dtype)
    elif masks.padding is not None:
        mask, v = _padding_bias(masks.padding, v)
    else:
        mask = None
    if bias is not None:
        if mask is None:
            mask = bias.to(q.dtype)
        else:
            mask = mask + bias.to(q.dtype)
    if q.size(1) == k.size(1):
        out = fused_attention(q, k, v, mask, dropout)
    else:
        out = _shared_head_attention(q, k, v, mask, dropout)
    if fully_masked is None:
        return out
    return out.masked_fill(fully_masked, 0.0)


def attend_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks = NO_MASKS,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `attend`, and the weights from before the dropout, written out.

    Args:
        q, k, v, masks, dropout, bias: those of `attend`.

    Returns:
        The results [B, H, T, D]; the weights [B, H, T, S] in float32 (float64 of float64), zeros of a query
        without any key.
    """
    if k.size(0) != q.size(0):
        both: tuple[Tensor, Tensor] = _for_beams(q, k, v, masks, dropout, bias, attend_with_weights)
        return both
    mask, fully_masked = merge_masks(masks.mask, masks.padding, q.dtype)
    if bias is not None:
        if mask is None:
            mask = bias.to(q.dtype)
        else:
            mask = mask + bias.to(q.dtype)
    if fully_masked is None and mask is not None:  # a mask or bias alone may block a whole row
        fully_masked = torch.isneginf(mask).all(-1, keepdim=True)
        mask = mask.masked_fill(fully_masked, 0.0)
    k, v = repeat_kv(q, k, v)
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))  # [B, H, T, S]
    if mask is not None:
        scores = scores + mask
    wide = torch.float32
    if q.dtype == torch.float64:
        wide = torch.float64
    weights = torch.softmax(scores, dim=-1, dtype=wide)
    if fully_masked is not None:
        weights = weights.masked_fill(fully_masked, 0.0)
    out = torch.matmul(F.dropout(weights.to(q.dtype), dropout, dropout > 0), v)
    return (out if fully_masked is None else out.masked_fill(fully_masked, 0.0)), weights


def _for_beams(
    q: Tensor, k: Tensor, v: Tensor, masks: Masks, dropout: float, bias: Tensor | None, attends: Any
) -> Any:
    """The hypotheses of a beam as more heads: [B, H, T, D] → [B / n, n·H, T, D], and back."""
    batch, heads, tgt_len, dim = q.shape
    if bias is not None:
        bias = bias.expand(batch, heads, -1, -1).reshape(k.size(0), -1, tgt_len, k.size(2))
    results = attends(q.reshape(k.size(0), -1, tgt_len, dim), k, v, masks, dropout, bias)
    if isinstance(results, Tensor):
        return results.reshape(batch, heads, tgt_len, dim)
    out, weights = results
    return out.reshape(batch, heads, tgt_len, dim), weights.reshape(batch, heads, tgt_len, -1)


def repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for each query head; views where there is one key head.

    Args:
        q: [B, H, T, D], of which only the heads are counted.
        k, v: [B, G, S, D], G dividing H.

    Returns:
        Keys and values [B, H, S, D]; head i is key head i mod G.
    """
    heads = q.size(1)
    groups = k.size(1)
    if groups == heads:
        return k, v
    if groups == 1:
        return k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
    return k.repeat(1, heads // groups, 1, 1), v.repeat(1, heads // groups, 1, 1)


def _processors(q: Tensor) -> int:
    """How many multiprocessors the GPU has to keep busy."""
    return torch.cuda.get_device_properties(q.device).multi_processor_count


def _shared_head_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """torch's attention; heads that share keys become more queries of them.

    The keys are then read once instead of H / G times, and their gradient is one product instead of a sum
    over copies. Only a mask that differs between queries must be repeated per head. A GPU's backward pass
    runs one program per block of keys: with few blocks (few long sentences) copying is faster.
    """
    batch, heads, tgt_len, dim = q.shape
    groups = k.size(1)
    sharing = heads // groups
    copies = False
    if mask is not None:
        large = mask.size(2) > 1 and (is_compiling() or mask.numel() * sharing > q.numel())
        copies = mask.size(1) > 1 or large
    if q.is_cuda and not is_compiling():
        blocks = batch * groups * -(-k.size(2) // _KEY_BLOCK)
        copies = copies or (tgt_len >= _KEY_BLOCK and blocks < _processors(q))
    if copies:
        k, v = repeat_kv(q, k, v)
        return fused_attention(q, k, v, mask, dropout)
    if mask is not None and mask.size(2) > 1:
        mask = mask.repeat_interleave(sharing, dim=2)
    # [B, H, T, D] → [B, H / G, G, T, D] → [B, G, T·H / G, D], and back
    if groups > 1:
        q = q.view(batch, sharing, groups, tgt_len, dim)
    else:
        q = q.unsqueeze(2)
    q = q.permute(0, 2, 3, 1, 4).reshape(batch, groups, tgt_len * sharing, dim)
    out = fused_attention(q, k, v, mask, dropout)
    out = out.reshape(batch, groups, tgt_len, sharing, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, heads, tgt_len, dim)
