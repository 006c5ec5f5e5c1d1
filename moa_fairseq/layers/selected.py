"""Attention for the (token, head) pairs that were chosen, and for no others."""

import torch
from torch import Tensor

from moa_fairseq.layers.experts import ExpertPermutation
from moa_fairseq.layers.sdpa import NO_MASKS, Masks, fused_attention, merge_masks


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
    (batch, heads, _, dim) = k.shape
    (_, columns, tgt_len, _) = q.shape
    per_token = order.per_token
    slots = order.expert.numel()
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
    # Rows without a slot point to token 0
    owner = token.new_zeros(rows).index_copy_(0, place, token)
    column = order.order % per_token + (columns - per_token)
    source = token.new_zeros(rows).index_copy_(0, place, token * columns + column)
    # [B, A, T, D] → [N·A, D] → [rows, D]
    blocks = q.transpose(1, 2).reshape(-1, dim).index_select(0, source)

    mask, fully_masked = merge_masks(masks.mask, masks.padding, q.dtype)
    mask_rows = None
    if mask is not None and mask.size(2) > 1:  # a row of the mask for each row of the blocks
        if mask.size(0) <= 1:
            owner = owner % tgt_len
        mask_rows = mask.reshape(-1, mask.size(-1))
    parts = []
    start = 0
    for head, width in enumerate(widths):
        if width:
            end = start + batch * width
            block_mask = mask
            if mask_rows is not None:
                block_mask = mask_rows.index_select(0, owner[start:end]).view(batch, 1, width, -1)
            block = blocks[start:end].view(batch, 1, width, dim)  # [B·M, D] → [B, 1, M, D]
            keys = k[:, head : head + 1]
            values = v[:, head : head + 1]
            out = fused_attention(block, keys, values, block_mask, dropout)
            parts.append(out.reshape(-1, dim))
            start = end
    place_of_slot = torch.empty_like(place).index_copy_(0, order.order, place)
    out = torch.cat(parts).index_select(0, place_of_slot)
    if fully_masked is None:
        return out
    fully_masked = (
        fully_masked.expand(batch, 1, tgt_len, 1).reshape(-1, 1).repeat_interleave(per_token, 0)
    )
    return out.masked_fill(fully_masked, 0.0)


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

    Its `position` [B·E, M] is of which token the slot in a place is, `empty` [B·E, M] whether there is none.

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
        tokens = torch.arange(length, device=index.device).view(1, length, 1)
        place = tokens.expand_as(index)
        width = length
        if compact and index.numel():
            chosen = torch.zeros(batch, length, heads, dtype=torch.bool, device=index.device)
            rank = chosen.scatter_(2, index, real.expand_as(index)).cumsum(1)
            place = rank.gather(2, index) - 1
            width = max(1, int(rank[:, -1].max()))
        first = torch.arange(batch, device=index.device).view(batch, 1, 1) * heads + index
        self._rows = batch * heads * width
        self._slots = index.shape
        self._shape = (batch * heads, width)
        # of each slot, token by token; those of padding share one that is left out
        self._place = torch.where(real, first * width + place, self._rows).flatten()
        self.position = self._placed(tokens.expand_as(index).reshape(-1, 1)).view(self._shape)
        self.empty = ~self._placed(torch.ones_like(self._place, dtype=torch.bool)[:, None]).view(
            self._shape
        )

    def _placed(self, rows: Tensor) -> Tensor:
        """rows [B·T·K, D] → [B·E·M, D]; zeros where no slot stands."""
        return rows.new_zeros(self._rows + 1, rows.size(1)).index_copy(0, self._place, rows)[:-1]

    def gather(self, x: Tensor) -> Tensor:
        """x [B, K, T, D] → [B·E, 1, M, D]"""
        rows = x.transpose(1, 2).reshape(self._place.numel(), x.size(3))
        return self._placed(rows).view(*self._shape, x.size(3)).unsqueeze(1)

    def scatter(self, x: Tensor) -> Tensor:
        """x [B·E, 1, M, D] → [B, K, T, D]; zeros for padding"""
        rows = x.reshape(self._rows, x.size(3))
        rows = torch.cat([rows, rows.new_zeros(1, x.size(3))]).index_select(0, self._place)
        return rows.view(*self._slots, x.size(3)).transpose(1, 2)

    def spread(self, weights: Tensor) -> Tensor:
        """Weights of these slots as keys, moved to the positions of their tokens.

        Args:
            weights: [B·E, 1, M', M], M' queries of a head.

        Returns:
            [B·E, 1, M', T]; zeros for tokens that did not choose the head.
        """
        length = self._slots[1]
        place = self.position.masked_fill(self.empty, length)[:, None, None].expand_as(weights)
        return weights.new_zeros(*weights.shape[:3], length + 1).scatter(3, place, weights)[
            ..., :-1
        ]
