"""Multiply all tokens with all experts, and keep the selected results: for few tokens or small experts.

This is `every_expert` with our own gradients, which keep only the inputs for the backward pass.
"""

import torch
from torch import Tensor

from moa_fairseq.layers.experts.expert_permutation import ExpertPermutation
from moa_fairseq.layers.experts.grouped.sorted_rows import SortedRows


class PlacedRows(SortedRows):
    """A plan as `SortedRows`, where each token has a place for each expert, [N, E·D], and zeros elsewhere."""

    def __init__(self, order: ExpertPermutation, fan: int):
        self.slots = order.slots
        self.per_wide = order.per_token
        self.per_narrow = fan
        self.tokens = order.tokens
        self.num_experts = order.num_experts
        self.cell = order.cell

    def _up(self, wide: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        matrix = weight.flatten(0, 1).t()  # [E, D, C] → [C, E·D]
        if bias is None:
            every = wide @ matrix
        else:
            every = torch.addmm(bias.flatten(), wide, matrix)
        # [N, E·D] → [N·E, D] → [S, D]
        return every.view(-1, weight.size(1)).index_select(0, self.cell)

    def _arrange(self, slots: Tensor) -> Tensor:
        dim = slots.size(1)
        cells = slots.new_zeros(self.tokens * self.num_experts, dim)
        return cells.index_copy_(0, self.cell, slots).view(self.tokens, self.num_experts * dim)

    def _down(self, arranged: Tensor, weight: Tensor) -> Tensor:
        return arranged @ weight.flatten(0, 1)  # [N, E·D] · [E·D, C]

    def _weight_grad(self, arranged: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
        return (arranged.t() @ wide).view_as(weight)  # [E·D, C] → [E, D, C]

    def _bias_grad(self, arranged: Tensor, weight: Tensor) -> Tensor:
        return arranged.sum(0).view(weight.shape[:2])  # [E·D] → [E, D]
