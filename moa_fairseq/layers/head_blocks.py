"""The slots of each head side by side, for attention among the tokens that selected a head (NAMOH)."""

import torch
from torch import Tensor


class HeadBlocks:
    """A grid of cells: a row for each sequence and head, B·E in all, with M cells for the slots of the head.

    The slots of a row are in the order of their tokens. `position` [B·E, M] has the position of the token
    whose slot is in a cell, and `empty` [B·E, M] is True where a cell has no slot. Example: in one sequence,
    three tokens select the heads 1, 0, 1 of E = 2. If `compact`, M is 2, `position` is [[1, 0], [0, 2]] and
    `empty` is [[False, True], [False, False]].

    Args:
        index: the head of each slot, [B, T, K] int64.
        padding: [B, T] or [B·T] bool, True = padding, whose slots get no cell.
        heads: E.
        compact: whether M is the largest number of slots that a head has in a sequence, which waits for a
            GPU. Otherwise M = T, and the cell of a slot is the position of its token.
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
        # [B·T·K], token by token; the slots of padding share an extra cell at the end
        self._cell_of_slot = torch.where(real, row * width + column, self._cells).flatten()
        self.position = self._placed(positions.reshape(-1, 1)).view(self._shape)
        occupied = torch.ones_like(self._cell_of_slot, dtype=torch.bool)[:, None]
        self.empty = ~self._placed(occupied).view(self._shape)

    def _placed(self, rows: Tensor) -> Tensor:
        """Rows of slots [B·T·K, D] → rows of cells [B·E·M, D]; zeros in empty cells."""
        cells = rows.new_zeros(self._cells + 1, rows.size(1))
        return cells.index_copy(0, self._cell_of_slot, rows)[:-1]

    def gather(self, x: Tensor) -> Tensor:
        """The slots x [B, K, T, D] in their cells, [B·E, 1, M, D]; zeros in empty cells."""
        rows = x.transpose(1, 2).reshape(self._cell_of_slot.numel(), x.size(3))
        return self._placed(rows).view(*self._shape, x.size(3)).unsqueeze(1)

    def scatter(self, x: Tensor) -> Tensor:
        """The reverse of `gather`: cells x [B·E, 1, M, D] → slots [B, K, T, D]; zeros for padding."""
        cells = x.reshape(self._cells, x.size(3))
        cells = torch.cat([cells, cells.new_zeros(1, x.size(3))])
        rows = cells.index_select(0, self._cell_of_slot)
        return rows.view(*self._slots, x.size(3)).transpose(1, 2)

    def spread(self, weights: Tensor) -> Tensor:
        """Move attention weights from the cells of the keys to the positions of their tokens.

        Args:
            weights: [B·E, 1, M', M], for the M' queries of each head and these cells as keys.

        Returns:
            [B·E, 1, M', T]; zeros for tokens that did not select the head.
        """
        length = self._slots[1]
        position = self.position.masked_fill(self.empty, length)[:, None, None].expand_as(weights)
        spread = weights.new_zeros(*weights.shape[:3], length + 1).scatter(3, position, weights)
        return spread[..., :-1]
