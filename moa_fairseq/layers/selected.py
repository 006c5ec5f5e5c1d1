"""Attention for the (token, head) pairs that were chosen, and for no others."""

from typing import NamedTuple

import torch
from torch import Tensor

from moa_fairseq.layers.experts import ExpertPermutation
from moa_fairseq.layers.sdpa import NO_MASKS, Masks, fused_attention, merge_masks


class _Blocks(NamedTuple):
    """Where the chosen queries stand: a block of B·M rows for each head, M rows for each sequence.

    Example: two sequences of two tokens, K = 1. The four slots choose heads 0, 1 and 0, 0. Head 0 has M = 2
    and the slots 0, –, 2, 3 in its rows; head 1 has M = 1 and the slots 1, –. A row marked – has no slot.

    Args:
        widths: M of each of the H heads, its largest number of slots in one sequence; here [2, 1].
        slot_of_row: [R] with R = B·ΣM; 0 in a row without a slot; here [0, 0, 2, 3, 1, 0].
        row_of_slot: [N·K]; here [0, 4, 2, 3].
    """

    widths: list[int]
    slot_of_row: Tensor
    row_of_slot: Tensor


def _blocks_of_heads(order: ExpertPermutation, batch: int, heads: int) -> _Blocks:
    slot = order.order  # [N·K]: sorted by head, and then by token
    ranks = torch.arange(slot.numel(), device=slot.device)
    sequence = slot // (slot.numel() // batch)
    head_and_sequence = order.expert.index_select(0, slot) * batch + sequence
    counts = torch.bincount(head_and_sequence, minlength=heads * batch)  # [H·B]
    widths = counts.view(heads, batch).amax(1)  # [H]
    block_start = batch * (widths.cumsum(0) - widths)  # [H], a row
    sequences = torch.arange(batch, device=slot.device)
    sequence_start = block_start.unsqueeze(1) + sequences * widths.unsqueeze(1)  # [H, B], a row
    slots_before = counts.cumsum(0) - counts  # [H·B]
    row = sequence_start.view(-1).index_select(0, head_and_sequence)
    row = row + ranks - slots_before.index_select(0, head_and_sequence)  # [N·K], as `slot`
    row_of_slot = torch.empty_like(row).index_copy_(0, slot, row)
    width_list = widths.tolist()  # the one place that waits for a GPU
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

    Heads are computed one after the other. The queries that chose a head form a block [B, M, D], M being
    the largest number of them in one sequence; shorter rows are filled up. Little is wasted if all sequences
    have about equally many.

    Args:
        q: [B, A, T, D], whose last K ≤ A are the slots.
        order: the head of each of the N·K slots of N = B·T tokens (batch first), all K of a token different.
        k, v: [B, H, S, D].
        masks: what queries may not see, as in `sdpa.attend`. A query without any key gets zeros.
        dropout: probability with which attention weights are zeroed (0 outside training).

    Returns:
        [N·K, D], token by token.
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
        queries: [R, D], block by block.
        token: [R], the token of each query.
        widths: M of each head.
        k, v: [B, H, S, D].
        mask: [B or 1, 1, T or 1, S].
        dropout: as in `attend_selected`.

    Returns:
        [R, D].
    """
    batch, _, _, dim = k.shape
    mask_rows = None
    if mask is not None and mask.size(2) > 1:  # a row of the mask for each query
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


# How many keys' scores must be saved for each head that a token chooses, whose queries have to be gathered.
# By benchmarks/moh.py on a CPU (results/benchmarks/moh-cpu.json); a GPU's number is an estimate.
_LEAST_SAVED_KEYS = {"cpu": 1000, "cuda": 3000}


def skipping_pays(keys: int, unchosen: float, causal: bool, device: str) -> tuple[bool, bool]:
    """Whether to leave unchosen heads out of the attention, and then also out of the projections.

    Args:
        keys: how many a sequence has.
        unchosen: routed heads that a token does without, for each that it chooses.
        causal: masks differ between queries, so a row of the mask is gathered for each chosen head; like the
            rows of a projection, these cost as much as an unchosen head saves.
        device: "cpu" or "cuda"; others count as "cpu".

    Returns:
        Whether it pays in the attention; whether it pays in the projections, too.
    """
    least = _LEAST_SAVED_KEYS.get(device, _LEAST_SAVED_KEYS["cpu"])
    saves_rows = unchosen > least / _LEAST_SAVED_KEYS["cpu"]
    pays = keys * unchosen > least and (unchosen > 1 or not causal)
    return pays, pays and saves_rows


class HeadBlocks:
    """The slots of each head side by side: B·E rows of M slots, in the order of their tokens.

    Its `position` [B·E, M] is the position of the token whose slot stands there, `empty` [B·E, M] is True
    where no slot stands. Example: in one sequence, three tokens choose heads 1, 0, 1 of E = 2. If `compact`,
    M is 2, `position` is [[1, 0], [0, 2]] and `empty` is [[False, True], [False, False]].

    Args:
        index: [B, T, K] int64, the head of each slot.
        padding: [B, T] or [B·T], True = padding, which gets no place.
        heads: E.
        compact: M is the largest number of slots that a head has in a sequence, for which a GPU is waited;
            otherwise M = T, and each slot stands at its token's position.
    """

    def __init__(self, index: Tensor, padding: Tensor | None, heads: int, compact: bool):
        batch, length, _ = index.shape
        real = index.new_ones(batch, length, 1, dtype=torch.bool)
        if padding is not None:
            real = ~padding.view(batch, length, 1).bool()
        positions = torch.arange(length, device=index.device).view(1, length, 1).expand_as(index)
        column = positions  # [B, T, K]
        width = length
        if compact and index.numel():
            chosen = torch.zeros(batch, length, heads, dtype=torch.bool, device=index.device)
            counts = chosen.scatter_(2, index, real.expand_as(index)).cumsum(1)  # [B, T, E], so far
            column = counts.gather(2, index) - 1
            width = max(1, int(counts[:, -1].max()))
        row = torch.arange(batch, device=index.device).view(batch, 1, 1) * heads + index
        self._shape = (batch * heads, width)
        self._cells = batch * heads * width
        self._slots = index.shape
        # [B·T·K], token by token; the slots of padding share one cell that is left out
        self._cell_of_slot = torch.where(real, row * width + column, self._cells).flatten()
        self.position = self._placed(positions.reshape(-1, 1)).view(self._shape)
        occupied = torch.ones_like(self._cell_of_slot, dtype=torch.bool)[:, None]
        self.empty = ~self._placed(occupied).view(self._shape)

    def _placed(self, rows: Tensor) -> Tensor:
        """rows [B·T·K, D] → [B·E·M, D]; zeros where no slot stands."""
        cells = rows.new_zeros(self._cells + 1, rows.size(1))
        return cells.index_copy(0, self._cell_of_slot, rows)[:-1]

    def gather(self, x: Tensor) -> Tensor:
        """x [B, K, T, D] → [B·E, 1, M, D]"""
        rows = x.transpose(1, 2).reshape(self._cell_of_slot.numel(), x.size(3))
        return self._placed(rows).view(*self._shape, x.size(3)).unsqueeze(1)

    def scatter(self, x: Tensor) -> Tensor:
        """x [B·E, 1, M, D] → [B, K, T, D]; zeros for padding"""
        cells = x.reshape(self._cells, x.size(3))
        cells = torch.cat([cells, cells.new_zeros(1, x.size(3))])
        rows = cells.index_select(0, self._cell_of_slot)
        return rows.view(*self._slots, x.size(3)).transpose(1, 2)

    def spread(self, weights: Tensor) -> Tensor:
        """Weights of these slots as keys, moved to the positions of their tokens.

        Args:
            weights: [B·E, 1, M', M], M' queries of a head.

        Returns:
            [B·E, 1, M', T]; zeros for tokens that did not choose the head.
        """
        length = self._slots[1]
        position = self.position.masked_fill(self.empty, length)[:, None, None].expand_as(weights)
        spread = weights.new_zeros(*weights.shape[:3], length + 1).scatter(3, position, weights)
        return spread[..., :-1]
