"""Attention for the selected (token, head) pairs alone."""

from typing import NamedTuple

import torch
from torch import Tensor

from moa_fairseq.layers.experts import ExpertPermutation
from moa_fairseq.layers.sdpa import NO_MASKS, Masks, fused_attention, merge_masks


class _Blocks(NamedTuple):
    """The rows of the selected queries: a block of B·M rows for each head, with M rows for each sequence.

    Example: B = 2 sequences of two tokens, H = 2, K = 1. The slots 0 and 1 of the first sequence select heads
    0 and 1; the slots 2 and 3 of the second select head 0. Head 0 has M = 2 and the slots 0, –, 2, 3 in its
    rows; head 1 has M = 1 and the slots 1, –. A row marked – has no slot.

    Args:
        widths: M of each of the H heads, its largest number of slots in one sequence; here [2, 1].
        slot_of_row: the slot in each of the R = B·ΣM rows, [R]; 0 in a row without a slot; here
            [0, 0, 2, 3, 1, 0].
        row_of_slot: the row of each slot, [N·K]; here [0, 4, 2, 3].
    """

    widths: list[int]
    slot_of_row: Tensor
    row_of_slot: Tensor


def _blocks_of_heads(order: ExpertPermutation, batch: int, heads: int) -> _Blocks:
    """Give each slot a row in its head's block; comments have the values of `_Blocks`'s example."""
    slot = order.order  # [N·K], sorted by head and then by token: [0, 2, 3, 1]
    sequence = slot // (slot.numel() // batch)  # [0, 1, 1, 0]
    head_and_sequence = order.expert.index_select(0, slot) * batch + sequence  # [0, 1, 1, 2]
    counts = torch.bincount(head_and_sequence, minlength=heads * batch)  # [H·B]: [1, 2, 1, 0]
    widths = counts.view(heads, batch).amax(1)
    # The first row of each sequence in each head's block, [H·B]: [0, 2, 4, 5]
    block_start = batch * (widths.cumsum(0) - widths)  # [H]: [0, 4]
    sequences = torch.arange(batch, device=widths.device)
    first_row = (block_start.unsqueeze(1) + sequences * widths.unsqueeze(1)).view(-1)
    # A slot's row: the first row of its head and sequence, and the number of slots before it there
    slots_before = counts.cumsum(0) - counts  # [H·B]: [0, 1, 3, 4]
    rank = torch.arange(slot.numel(), device=slot.device)
    row = (first_row - slots_before).index_select(0, head_and_sequence) + rank
    row_of_slot = torch.empty_like(row).index_copy_(0, slot, row)  # row, as slot, is sorted by head
    width_list = widths.tolist()  # the only line that waits for a GPU
    slot_of_row = slot.new_zeros(batch * sum(width_list)).index_copy_(0, row, slot)
    return _Blocks(width_list, slot_of_row, row_of_slot)


def attend_selected(
    q: Tensor,
    order: ExpertPermutation,
    k: Tensor,
    v: Tensor,
    masks: Masks = NO_MASKS,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax(q·kᵀ/√D)·v for the K slots of each token, each slot with the keys of its own head.

    Heads are computed one after the other. The queries that select a head form a block [B, M, D], where M is
    the largest number of them in one sequence; the rows of the other sequences are filled up. Little is
    wasted if all sequences have about the same number.

    Args:
        q: queries, [B, A, T, D], of which the last K of the A are the slots.
        order: the heads of the N·K slots of N = B·T tokens (batch first); the K heads of a token differ.
        k, v: keys and values, [B, H, S, D].
        masks: the keys that queries may not see, as in `sdpa.attend`. A query that sees no key gets zeros.
        dropout: the probability with which an attention weight is zeroed (0 outside training).

    Returns:
        The results of the slots, token by token, [N·K, D].
    """
    batch, heads, _, dim = k.shape
    _, columns, tgt_len, _ = q.shape
    per_token = order.per_token
    blocks = _blocks_of_heads(order, batch, heads)
    token = blocks.slot_of_row // per_token  # [R]
    column = blocks.slot_of_row % per_token + (columns - per_token)
    # [B, A, T, D] → [N·A, D] → [R, D]
    queries = q.transpose(1, 2).reshape(-1, dim).index_select(0, token * columns + column)
    mask, fully_masked = merge_masks(masks.mask, masks.padding, q.dtype)
    out = _attend_blocks(queries, token, blocks.widths, k, v, mask, dropout)
    out = out.index_select(0, blocks.row_of_slot)
    if fully_masked is None:
        return out
    fully_masked = fully_masked.expand(batch, 1, tgt_len, 1).reshape(-1, 1)
    return out.masked_fill(fully_masked.repeat_interleave(per_token, 0), 0.0)


def _attend_blocks(
    queries: Tensor,
    token: Tensor,
    widths: list[int],
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention of each head's block with the keys of this head.

    Args:
        queries: the queries of all blocks, [R, D].
        token: the token of each query, [R].
        widths: M of each head.
        k, v: keys and values, [B, H, S, D].
        mask: additive, [B or 1, 1, T or 1, S].
        dropout: as in `attend_selected`.

    Returns:
        The results of all blocks, [R, D].
    """
    batch, _, _, dim = k.shape
    mask_rows = None
    if mask is not None and mask.size(2) > 1:  # each query has a row of the mask
        if mask.size(0) <= 1:
            token = token % mask.size(2)
        mask_rows = mask.reshape(-1, mask.size(-1))
    parts = []
    start = 0
    for head, width in enumerate(widths):
        if width:
            end = start + batch * width
            block_mask = mask
            if mask_rows is not None:
                block_mask = mask_rows.index_select(0, token[start:end]).view(batch, 1, width, -1)
            block = queries[start:end].view(batch, 1, width, dim)
            keys = k[:, head : head + 1]
            values = v[:, head : head + 1]
            out = fused_attention(block, keys, values, block_mask, dropout)
            parts.append(out.reshape(-1, dim))
            start = end
    return torch.cat(parts)


# Leaving out an unchosen head saves its scores; gathering the queries of a chosen head costs time. Thresholds
# measured by benchmarks/moh.py on a CPU (results/benchmarks/moh-cpu.json); a GPU's numbers are an estimate.
# Keys whose scores are saved, for each chosen head
_LEAST_SAVED_KEYS = {"cpu": 1000, "cuda": 3000}
# Unchosen heads for each chosen head, in the projections
_LEAST_SAVED_HEADS = {"cpu": 1.0, "cuda": 3.0}


class Skips(NamedTuple):
    """Where the unchosen heads are left out."""

    in_attention: bool
    in_projections: bool


NO_SKIPS = Skips(False, False)


def skipping_pays(keys: int, unchosen: float, causal: bool, device: str) -> Skips:
    """Where it saves time to leave unchosen heads out; in the projections only if also in the attention.

    Args:
        keys: the number of keys of a sequence.
        unchosen: the number of unchosen routed heads, divided by the number of chosen ones.
        causal: whether masks differ between queries. Then a row of the mask is gathered for each chosen head,
            which costs as much as an unchosen head saves.
        device: "cpu" or "cuda"; others count as "cpu".
    """
    if device not in _LEAST_SAVED_KEYS:
        device = "cpu"
    pays = keys * unchosen > _LEAST_SAVED_KEYS[device] and (unchosen > 1 or not causal)
    return Skips(pays, pays and unchosen > _LEAST_SAVED_HEADS[device])
