"""Attention for the (token, head) pairs that were chosen, and for no others."""

from typing import Optional, Tuple

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
    """Softmax(q·kᵀ/√D)·v for the K slots of each token, each slot with the keys of its own head.

    q [B, A, T, D], whose last K ≤ A are the slots; order: the head of each of the N·K slots of N = B·T tokens
    (batch first), all K of a token different; k and v [B, H, S, D]; masks as in `core.attend`, [T, S] and
    [B, S] → [N·K, D]. A query without any key gets zeros.

    Heads are computed one after the other. The queries that chose a head form a block [B, M, D], M being
    the largest number of them in one sequence; shorter rows are filled up. Little is wasted if all sequences
    have about equally many.
    """
    (batch, heads, _, dim), (_, columns, tgt_len, _) = k.shape, q.shape
    per_token, slots = order.per_token, order.expert.numel()
    token = order.order // per_token  # of each sorted slot
    cell = order.expert.index_select(0, order.order) * batch + token // tgt_len
    counts = torch.bincount(cell, minlength=heads * batch)
    longest = counts.view(heads, batch).amax(1)  # M of each head
    first = torch.arange(batch, device=q.device) * longest.unsqueeze(1)
    first = (first + ((longest.cumsum(0) - longest) * batch).unsqueeze(1)).view(-1)
    rank = torch.arange(slots, device=q.device) - (counts.cumsum(0) - counts).index_select(0, cell)
    place = first.index_select(0, cell) + rank  # of each sorted slot among the blocks' rows
    widths = longest.tolist()  # the one place that waits for a GPU
    rows = batch * sum(widths)
    owner = token.new_zeros(rows).index_copy_(0, place, token)  # rows without a slot point to token 0
    column = order.order % per_token + (columns - per_token)
    source = token.new_zeros(rows).index_copy_(0, place, token * columns + column)
    blocks = q.transpose(1, 2).reshape(-1, dim).index_select(0, source)

    mask, blind = merge_masks(attn_mask, key_padding_mask, q.dtype)
    mask_rows = None
    if mask is not None and mask.size(2) > 1:  # a row of the mask for each row of the blocks
        owner = owner if mask.size(0) > 1 else owner % tgt_len
        mask_rows = mask.reshape(-1, mask.size(-1))
    parts, start = [], 0
    for head, width in enumerate(widths):
        if width:
            end = start + batch * width
            own = mask
            if mask_rows is not None:
                own = mask_rows.index_select(0, owner[start:end]).view(batch, 1, width, -1)
            block = blocks[start:end].view(batch, 1, width, dim)
            keys, values = k[:, head : head + 1], v[:, head : head + 1]
            out = F.scaled_dot_product_attention(block, keys, values, attn_mask=own, dropout_p=dropout)
            parts.append(out.reshape(-1, dim))
            start = end
    place_of_slot = torch.empty_like(place).index_copy_(0, order.order, place)
    out = torch.cat(parts).index_select(0, place_of_slot)
    if blind is None:
        return out
    blind = blind.expand(batch, 1, tgt_len, 1).reshape(-1, 1).repeat_interleave(per_token, 0)
    return out.masked_fill(blind, 0.0)


# What leaving heads out costs, in multiply-accumulates: it pays where it saves more. The CPU's numbers come
# from times of one core at width 512 (8 heads of 64, 128 to 2048 tokens, forward alone and with backward;
# benchmarks/moh.py). A GPU's are estimates: its arithmetic is cheaper against its memory, and its steps wait
# for the host.
_GATHERED = {
    "cpu": 750,
    "cuda": 2000,
}  # attention: for each of the D numbers of a head that works for a token
_GATHERED_WIDE = {
    "cpu": 150,
    "cuda": 400,
}  # projections: for each of a token's C numbers and each chosen head
_GATHERED_MASK = {"cpu": 36, "cuda": 100}  # for each key and chosen head, where masks differ between queries
_STEP = {"cpu": 1.5e6, "cuda": 6.4e7}  # for each head
_LEAST_SAVING = 0.05  # of the layer's cost: less is within the error of the estimate


def skipping_pays(
    batch: int,
    tgt_len: int,
    model_dim: int,
    shared: int,
    choosable: int,
    per_token: int,
    head_dim: int,
    causal: bool,
    device: str,
) -> Tuple[bool, bool]:
    """Whether to leave unchosen heads out of the attention, and then also out of the projections.

    For B = batch sequences of T = tgt_len tokens in a layer of width C = model_dim. Each token uses per_token
    of the `choosable` heads of size D = head_dim, and the `shared` ones. causal: masks differ between
    queries. A sequence is taken to have as many keys as queries.
    """
    narrow, wide, mask, step = (
        cost.get(device, cost["cpu"]) for cost in (_GATHERED, _GATHERED_WIDE, _GATHERED_MASK, _STEP)
    )
    left_out = (choosable - per_token) * head_dim  # of a token
    attention = 2 * left_out * tgt_len - narrow * (shared + per_token) * head_dim
    attention -= mask * per_token * tgt_len if causal else 0
    attention -= step * choosable / (batch * tgt_len)
    projections = (2 * left_out - wide * per_token) * model_dim
    heads = shared + choosable
    whole = 2 * heads * head_dim * (tgt_len + 2 * model_dim)  # scores and sums, four projections
    pays = attention + max(projections, 0) > _LEAST_SAVING * whole
    return pays, pays and projections > 0
