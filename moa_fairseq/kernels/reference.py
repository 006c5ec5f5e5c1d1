"""The obvious backend: every expert on every token, then pick. Slow, differentiable twice, unmistakable."""

import torch
from torch import Tensor


def dispatch(x: Tensor, expert_index: Tensor, weight: Tensor) -> Tensor:
    """slots[t, k] = W_e · x[t] with e = expert_index[t, k].

    x [N, C], expert_index [N, K], weight [E, D, C] → [N, K, D].
    """
    every_expert = torch.einsum("nc,edc->ned", x, weight)
    index = expert_index.unsqueeze(-1).expand(-1, -1, weight.size(1))
    return every_expert.gather(1, index)


def combine(slots: Tensor, expert_index: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """y[t] = Σ_k gate[t, k] · slots[t, k] · W_e with e = expert_index[t, k].

    slots [N, K, D], expert_index and gate [N, K], weight [E, D, C] → [N, C].
    """
    weighted = slots * gate.unsqueeze(-1)
    index = expert_index.unsqueeze(-1).expand_as(weighted)
    every_expert = weighted.new_zeros(slots.size(0), weight.size(0), slots.size(2))
    every_expert = every_expert.scatter(1, index, weighted)
    return torch.einsum("ned,edc->nc", every_expert, weight)
