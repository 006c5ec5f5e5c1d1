"""Attention of the (token, head) pairs that were chosen, and of no other."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from moa_fairseq.attention.core import merge_masks
from moa_fairseq.kernels import SlotOrder


def attend_selected(
    q: Tensor,
    order: SlotOrder,
    k: Tensor,
    v: Tensor,
    attn_mask: Optional[Tensor] = None,
    key_padding_mask: Optional[Tensor] = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax(q·kᵀ/√D)·v for the N·K slots of N = B·T tokens, each with the keys of its own head.

    q [N·K, D], the slots of a token side by side and tokens batch first; order: the head of each slot, all K
    of a token different; k and v [B, H, S, D]; masks as in `core.attend`, [T, S] and [B, S]
    → [N·K, D]. A query without any key gets zeros.

    Heads are taken one after the other. Those queries of a head that are there stand in a block
    [B, M, D], M being the most that a sequence has, so that a head whose work is even over the batch
    computes little else.
    """
    batch, heads, _, dim = k.shape
    slots, per_token = q.size(0), order.per_token
    tgt_len = slots // per_token // batch
    sequence = order.order // (per_token * tgt_len)  # of each sorted slot
    token = order.order // per_token
    cell = order.expert.index_select(0, order.order) * batch + sequence
    counts = torch.bincount(cell, minlength=heads * batch)
    longest = counts.view(heads, batch).amax(1)  # M of each head
    first = torch.arange(batch, device=q.device) * longest.unsqueeze(1)
    first = (first + ((longest.cumsum(0) - longest) * batch).unsqueeze(1)).view(-1)
    rank = torch.arange(slots, device=q.device) - (counts.cumsum(0) - counts).index_select(0, cell)
    place = first.index_select(0, cell) + rank  # of each sorted slot among the blocks' rows
    widths = longest.tolist()  # the one place that waits for a GPU
    rows = batch * sum(widths)
    blocks = q.new_zeros(rows, dim).index_copy(0, place, q.index_select(0, order.order))

    mask, blind = merge_masks(attn_mask, key_padding_mask, q.dtype)
    per_query = mask is not None and mask.size(2) > 1
    if per_query:  # a row of the mask for each row of the blocks
        owner = token if mask.size(0) > 1 else token % tgt_len
        owner = owner.new_zeros(rows).index_copy(0, place, owner)
        mask_rows = mask.reshape(-1, mask.size(-1))
    parts, start = [], 0
    for head, width in enumerate(widths):
        if width:
            end = start + batch * width
            own = mask
            if per_query:
                own = mask_rows.index_select(0, owner[start:end]).view(batch, 1, width, -1)
            block = blocks[start:end].view(batch, 1, width, dim)
            keys, values = k[:, head : head + 1], v[:, head : head + 1]
            out = F.scaled_dot_product_attention(block, keys, values, attn_mask=own, dropout_p=dropout)
            parts.append(out.reshape(-1, dim))
            start = end
    place_of_slot = torch.empty_like(place).index_copy(0, order.order, place)
    out = torch.cat(parts).index_select(0, place_of_slot)
    if blind is None:
        return out
    blind = blind.expand(batch, 1, tgt_len, 1).reshape(-1, 1).repeat_interleave(per_token, 0)
    return out.masked_fill(blind, 0.0)


# When leaving heads out beats computing them all, fitted to benchmarks/moh.py on two CPU cores. Per pair of
# token and head that is left out, C columns of two projections and T keys (of two products) are saved. A pair
# that is computed one by one costs _PAIR more than in one large product, and each head _HEAD more.
# All in multiply-accumulates, those of training with the gradients. The GPU's numbers are estimates.
_PAIR = {"cpu": 4.0e4, "cuda": 4.0e4}
_HEAD = {"cpu": 2.0e6, "cuda": 6.4e7}


def skipping_pays(
    batch: int,
    tgt_len: int,
    model_dim: int,
    choosable: int,
    per_token: int,
    head_dim: int,
    device: str,
    training: bool,
) -> bool:
    """Whether attention over B sequences of T tokens is faster without the heads that were not chosen.

    choosable: routed heads, of which each token takes per_token. A sequence's keys are taken to be as many as
    its queries.
    """
    tokens = batch * tgt_len
    saved = tokens * (choosable - per_token) * head_dim * 2 * (model_dim + tgt_len)
    pair, head = (cost.get(device, cost["cpu"]) for cost in (_PAIR, _HEAD))
    return saved > tokens * per_token * pair + choosable * head
