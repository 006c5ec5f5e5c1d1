"""K = E: every token meets every expert, so each projection is one ordinary GEMM without copies."""

import torch.nn.functional as F
from torch import Tensor


def dispatch(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, C], weight [E, D, C] → [N, E, D], slot k being expert k."""
    num_experts, expert_dim, _ = weight.shape
    return F.linear(x, weight.reshape(num_experts * expert_dim, -1)).view(-1, num_experts, expert_dim)


def combine(slots: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """slots [N, E, D], gate [N, E], weight [E, D, C] → [N, C]."""
    num_experts, expert_dim, model_dim = weight.shape
    weighted = (slots * gate.unsqueeze(-1)).reshape(-1, num_experts * expert_dim)
    return weighted @ weight.reshape(num_experts * expert_dim, model_dim)
