"""Scaled-dot-product attention with masks, an additive bias, and heads that share keys."""

import math
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from moa_fairseq.layers.torch_compat import without_cudnn_attention

_BLOCKED = -1e30  # a score whose weight is 0, far from overflowing
_KEY_BLOCK = 128  # the keys of one program in the backward pass of a flash kernel
# cuDNN's attention is torch's first choice on Hopper since 2.11. It gives NaN gradients with some masks,
# makes a new plan for each batch shape, of which a corpus has many, and is not deterministic: it is left out.
CUDNN_VARIABLE = "MOA_FAIRSEQ_CUDNN_ATTENTION"
_KEEPS_CUDNN = os.environ.get(CUDNN_VARIABLE, "0") == "1"


class Masks(NamedTuple):
    """The keys that the queries of a call may not see.

    Args:
        mask: [T, S] or [B, T, S]; additive float, or bool, True = blocked.
        padding: padding of the keys, [B, S] bool, True = padding.
        is_causal: whether the mask blocks the future and nothing else, so a kernel's flag may replace it.
        right_padded: whether padding only follows real tokens.
    """

    mask: Tensor | None = None
    padding: Tensor | None = None
    is_causal: bool = False
    right_padded: bool = False


NO_MASKS = Masks()


def switch_off_cudnn() -> None:
    """Leave cuDNN's attention out in the whole process, so that no call needs to do so."""
    if not _KEEPS_CUDNN:
        torch.backends.cuda.enable_cudnn_sdp(False)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool = False
) -> Tensor:
    """torch's `scaled_dot_product_attention` by any kernel but cuDNN's.

    Args:
        q: queries, [B, H, T, D].
        k, v: keys and values, [B, H, S, D].
        mask: additive, in the dtype of q, [B or 1, H or 1, T or 1, S]; None: every query sees every key.
        dropout: the probability with which an attention weight is zeroed, in evaluation as in training.
        is_causal: query t sees keys 0 … t; mask must then be None.

    Returns:
        The weighted means of the values, [B, H, T, D].
    """
    if not q.is_cuda or _KEEPS_CUDNN:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    with without_cudnn_attention():
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)


def merge_masks(
    mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Merge a mask and padding into one additive mask, and find the fully masked queries.

    The softmax of a fully masked query would be 0/0. So the additive mask blocks nothing for it, and the
    caller writes zeros over its result.

    Args:
        mask, padding: those of `Masks`.
        dtype: the dtype of the additive mask.

    Returns:
        The additive mask [1 or B, 1, T or 1, S], or None if nothing is blocked. Which queries are fully
        masked, [1 or B, 1, T or 1, 1] bool; None without padding.
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


def add_blocked(mask: Tensor | None, blocked: Tensor) -> Tensor:
    """Block more keys in a mask.

    Args:
        mask: [T, S] or [B, T, S], additive or bool; None: it blocks nothing.
        blocked: which keys to block, [T, S] bool.

    Returns:
        The mask, additive if `mask` is, else bool.
    """
    if mask is None:
        return blocked
    if mask.is_floating_point():
        return mask.masked_fill(blocked, -torch.inf)
    return mask | blocked


def in_window(masks: Masks, q: Tensor, k: Tensor, window: int, first_query: int | Tensor) -> Masks:
    """Also hide the keys before each query's window.

    Args:
        masks: the masks of the call.
        q: queries, [B, H, T, D].
        k: keys, with those of the cache, [B, G, S, D].
        window: the number of latest positions that a query sees, its own included.
        first_query: the index of the first query's own key among the S keys.

    Returns:
        The masks of the S keys, with the window.
    """
    keys = k.size(2)
    mask = masks.mask
    # The mask may still have columns for positions that a cache has dropped
    if mask is not None and mask.size(-1) != keys:
        mask = mask[..., mask.size(-1) - keys :]
    if not is_compiling() and keys <= window:  # a graph must serve any length
        return masks._replace(mask=mask)
    query = first_query + torch.arange(q.size(2), device=q.device)
    before = torch.arange(keys, device=q.device) <= query[:, None] - window  # [T, S]
    return masks._replace(mask=add_blocked(mask, before), is_causal=False)


def _padding_bias(padding: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Padding as an additive mask [B, 1, 1, S], and the values [B, G, S, D] with zeros at padding.

    Blocked scores are very small instead of −inf, so the softmax is defined even in a sentence that is all
    padding, where it weights zeros. This takes two passes over small tensors; `merge_masks` takes ten.
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

    Keys that several heads share are not copied; nor are keys that the n hypotheses of a beam share.

    Args:
        q: queries, [B, H, T, D].
        k, v: keys and values, [B, G, S, D], or [B / n, G, S, D] with masks of B / n rows. G divides H: query
            head i reads key head i mod G.
        masks: the keys that queries may not see. A query that sees no key gets zeros.
        dropout: the probability with which an attention weight is zeroed (0 outside training).
        bias: added to the scaled scores, [B or 1, H or 1, T, S].

    Returns:
        The weighted means of the values, [B, H, T, D].
    """
    if k.size(0) != q.size(0):
        beams, beam_bias = _fold_beams(q, k, bias)
        return attend(beams, k, v, masks, dropout, beam_bias).reshape(q.shape)
    # Causality hides padding at the ends of sentences from every real query. The results of padded queries
    # are then unspecified instead of zero; nothing may depend on them.
    causality_hides_padding = masks.padding is None or masks.right_padded
    if masks.is_causal and causality_hides_padding and bias is None and q.is_cuda:
        return fused_attention(q, *repeat_kv(q, k, v), None, dropout, is_causal=True)
    mask: Tensor | None = None
    fully_masked: Tensor | None = None
    if masks.mask is not None:
        mask, fully_masked = merge_masks(masks.mask, masks.padding, q.dtype)
    elif masks.padding is not None:
        mask, v = _padding_bias(masks.padding, v)
    if bias is not None:
        mask = _add_bias(mask, bias, q.dtype)
    if q.size(1) == k.size(1):
        out = fused_attention(q, k, v, mask, dropout)
    else:
        out = _shared_head_attention(q, k, v, mask, dropout)
    if fully_masked is None:
        return out
    return out.masked_fill(fully_masked, 0.0)


def _add_bias(mask: Tensor | None, bias: Tensor, dtype: torch.dtype) -> Tensor:
    bias = bias.to(dtype)
    return bias if mask is None else mask + bias


def attend_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks = NO_MASKS,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `attend` returns, and the attention weights before dropout.

    Args:
        q, k, v, masks, dropout, bias: those of `attend`.

    Returns:
        The weighted means [B, H, T, D]; the weights [B, H, T, S] in float32 (float64 if q is), zeros for a
        query that sees no key.
    """
    if k.size(0) != q.size(0):
        beams, beam_bias = _fold_beams(q, k, bias)
        out, weights = attend_with_weights(beams, k, v, masks, dropout, beam_bias)
        return out.reshape(q.shape), weights.reshape(*q.shape[:3], k.size(2))
    mask, fully_masked = merge_masks(masks.mask, masks.padding, q.dtype)
    if bias is not None:
        mask = _add_bias(mask, bias, q.dtype)
    if fully_masked is None and mask is not None:  # a mask or bias alone may block a whole row
        fully_masked = torch.isneginf(mask).all(-1, keepdim=True)
        mask = mask.masked_fill(fully_masked, 0.0)
    k, v = repeat_kv(q, k, v)
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))  # [B, H, T, S]
    if mask is not None:
        scores = scores + mask
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide)
    if fully_masked is not None:
        weights = weights.masked_fill(fully_masked, 0.0)
    out = torch.matmul(F.dropout(weights.to(q.dtype), dropout, dropout > 0), v)
    return (out if fully_masked is None else out.masked_fill(fully_masked, 0.0)), weights


def _fold_beams(q: Tensor, k: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The n hypotheses of a beam as heads: q [B, H, T, D] → [B / n, n·H, T, D]; likewise the bias."""
    batch, heads, tgt_len, dim = q.shape
    if bias is not None:
        bias = bias.expand(batch, heads, -1, -1).reshape(k.size(0), -1, tgt_len, k.size(2))
    return q.reshape(k.size(0), -1, tgt_len, dim), bias


def repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for each query head; a single key head is expanded without a copy.

    Args:
        q: queries, [B, H, T, D], of which only H is read.
        k, v: keys and values, [B, G, S, D], where G divides H.

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
    """The number of multiprocessors of the GPU."""
    return torch.cuda.get_device_properties(q.device).multi_processor_count


def _shared_head_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """Attention of H query heads over G key heads: the H / G heads that share keys become more queries.

    The keys are then read once instead of H / G times, and their gradient is one product instead of a sum
    over copies. Copies of the keys are better where the mask has a head axis, where repeating a mask that
    differs between queries would take more memory than the queries, and on a GPU with few long sentences: its
    backward pass runs one program per block of keys, so few blocks leave multiprocessors idle.
    """
    batch, heads, tgt_len, dim = q.shape
    groups = k.size(1)
    sharing = heads // groups
    mask_by_head = mask_is_large = too_few_programs = False
    if mask is not None:
        mask_by_head = mask.size(1) > 1
        # A graph must not depend on sizes
        mask_is_large = mask.size(2) > 1 and (is_compiling() or mask.numel() * sharing > q.numel())
    if q.is_cuda and not is_compiling():
        programs = batch * groups * -(-k.size(2) // _KEY_BLOCK)
        too_few_programs = tgt_len >= _KEY_BLOCK and programs < _processors(q)
    if mask_by_head or mask_is_large or too_few_programs:
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
