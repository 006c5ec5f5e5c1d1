"""K = E and one slot per narrow row: every token meets every expert in one ordinary GEMM without gathers."""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def into_experts(rows: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """rows [N, C], weight [E, D, C], bias [E, D] → [N·E, D], slot k being expert k."""
    num_experts, expert_dim, _ = weight.shape
    flat_bias = None if bias is None else bias.reshape(-1)
    out = F.linear(rows, weight.reshape(num_experts * expert_dim, -1), flat_bias)
    return out.view(-1, expert_dim)


class _IntoModel(Function):
    """slots [N·E, D], gate [N·E], weight [E, D, C] → [N, C].

    The gated slots are computed again in the backward pass rather than kept: they are as large as the
    attention's output, which is kept already.
    """

    @staticmethod
    def forward(ctx, slots: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(slots, gate, weight)
        return _beside(slots * gate.unsqueeze(1), weight) @ weight.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        slots, gate, weight = ctx.saved_tensors
        grad_slots = grad_gate = grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = (_beside(slots * gate.unsqueeze(1), weight).t() @ grad).view_as(weight)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            projected = (grad @ weight.flatten(0, 1).t()).view_as(slots)
            grad_gate = torch.linalg.vecdot(projected, slots)
            grad_slots = projected.mul_(gate.unsqueeze(1))
        return grad_slots, grad_gate, grad_weight


def _beside(slots: Tensor, weight: Tensor) -> Tensor:
    """[N·E, D] → [N, E·D]"""
    return slots.reshape(-1, weight.size(0) * weight.size(1))


def into_model(slots: Tensor, weight: Tensor, gate: Optional[Tensor]) -> Tensor:
    """slots [N·E, D], weight [E, D, C], gate [N·E] → [N, C]."""
    if gate is None:
        return _beside(slots, weight) @ weight.flatten(0, 1)
    if not torch.is_grad_enabled():
        return _beside(slots * gate.unsqueeze(1), weight) @ weight.flatten(0, 1)
    return _IntoModel.apply(slots, gate, weight)
