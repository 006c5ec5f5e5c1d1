"""K = E and one slot per narrow row: every token meets every expert in one ordinary GEMM without gathers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling

from moa_fairseq.layers.experts import triton
from moa_fairseq.layers.experts.twice import differentiable_gradients

_PIECE = 1024  # rows: a CPU multiplies two dtypes by copies in the wider one, which then stay small


def up(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Every expert's product with every row, slot k being expert k.

    Args:
        rows: [N, C].
        weight: [E, D, C].
        bias: [E, D] or None.

    Returns:
        [N·E, D].
    """
    num_experts, expert_dim, _ = weight.shape
    flat_bias = None if bias is None else bias.reshape(-1)
    out = F.linear(rows, weight.reshape(num_experts * expert_dim, -1), flat_bias)
    return out.view(-1, expert_dim)


class _Down(Function):
    """slots [N·E, D], gate [N·E], weight [E, D, C] → [N, C]; uses_triton: Triton's kernel may be used.

    The gated slots are computed again in the backward pass rather than kept: they are as large as the
    attention's output, which is kept already.
    """

    @staticmethod
    def forward(ctx: Any, slots: Tensor, gate: Tensor, weight: Tensor, uses_triton: bool) -> Tensor:
        ctx.save_for_backward(slots, gate, weight)
        ctx.uses_triton = uses_triton
        return _by_token(_times_gate(slots, gate), weight) @ weight.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slots, gate, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            saved = (slots, gate, weight)
            return (*differentiable_gradients(_plain, saved, ctx.needs_input_grad[:3], grad), None)
        grad_slots = grad_gate = grad_weight = gated = None
        grad = grad.contiguous()  # once here instead of in each product
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            grad_slots = (grad @ weight.flatten(0, 1).t()).view_as(slots)
            if ctx.uses_triton:
                gated, grad_gate = triton.loaded("launch_routing").gate_slots(
                    slots, gate, grad_slots
                )
            else:
                grad_gate = torch.linalg.vecdot(grad_slots, slots).to(gate.dtype)
                _times_gate(grad_slots, gate, grad_slots)
        if ctx.needs_input_grad[2]:
            if gated is None:
                gated = _times_gate(slots, gate)
            grad_weight = (_by_token(gated, weight).t() @ grad).view_as(weight)
        return grad_slots, grad_gate, grad_weight, None


def _plain(slots: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """The same of torch's operations alone."""
    gated = (slots * gate.unsqueeze(1)).to(slots.dtype)
    return _by_token(gated, weight) @ weight.flatten(0, 1)


def _times_gate(slots: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """gate · slots in the dtype of the slots, which need not be the gate's; out may be the slots."""
    out = torch.empty_like(slots) if out is None else out
    if slots.is_cuda or slots.dtype == gate.dtype:
        return torch.mul(slots, gate.unsqueeze(1), out=out)
    for piece in zip(slots.split(_PIECE), gate.split(_PIECE), out.split(_PIECE)):
        torch.mul(piece[0], piece[1].unsqueeze(1), out=piece[2])
    return out


def _by_token(slots: Tensor, weight: Tensor) -> Tensor:
    """[N·E, D] → [N, E·D]"""
    return slots.reshape(-1, weight.size(0) * weight.size(1))


def down(slots: Tensor, weight: Tensor, gate: Tensor | None, uses_triton: bool = False) -> Tensor:
    """The sum of a token's E slots, each multiplied by its gate and its expert's matrix.

    Args:
        slots: [N·E, D], slot k being expert k.
        weight: [E, D, C].
        gate: [N·E] or None for ones. A gate in another dtype stays in it.
        uses_triton: one kernel of Triton's may compute the gradients of slots and gate.

    Returns:
        [N, C].
    """
    if gate is None:
        return _by_token(slots, weight) @ weight.flatten(0, 1)
    if is_compiling():
        return _plain(slots, gate, weight)
    if not torch.is_grad_enabled():
        return _by_token(_times_gate(slots, gate), weight) @ weight.flatten(0, 1)
    out: Tensor = _Down.apply(slots, gate, weight, uses_triton)
    return out
