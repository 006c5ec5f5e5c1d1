"""K = E and one slot for each narrow row: one ordinary GEMM of all tokens with all experts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling

from moa_fairseq.layers.experts import triton
from moa_fairseq.layers.experts.twice import differentiable_gradients

# Rows of a piece. A CPU multiplies two dtypes by copies in the wider dtype, which pieces keep small.
_PIECE = 1024


def up(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply all rows with all experts, where slot k is expert k.

    Args:
        rows: inputs, [N, C].
        weight: the experts' matrices, [E, D, C].
        bias: the experts' biases, [E, D], or None.

    Returns:
        The results by slot, [N·E, D].
    """
    num_experts, expert_dim, _ = weight.shape
    flat_bias = None if bias is None else bias.reshape(-1)
    out = F.linear(rows, weight.reshape(num_experts * expert_dim, -1), flat_bias)
    return out.view(-1, expert_dim)


class _Down(Function):
    """slots [N·E, D], gate [N·E], weight [E, D, C] → [N, C]; uses_triton: whether to use Triton's kernel.

    The backward pass computes the gated slots again instead of keeping them, because they are as large as the
    slots, which are kept.
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
        grad = grad.contiguous()  # copy once, instead of in each product
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
    """The result of `_Down`, by torch's operations alone."""
    gated = (slots * gate.unsqueeze(1)).to(slots.dtype)
    return _by_token(gated, weight) @ weight.flatten(0, 1)


def _times_gate(slots: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """gate · slots, in the dtype of the slots, whatever that of the gate; out may be the slots."""
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
    """Multiply each slot by its gate and its expert's matrix, and sum the E slots of each token.

    Args:
        slots: inputs by slot, [N·E, D], where slot k is expert k.
        weight: the experts' matrices, [E, D, C].
        gate: [N·E], in any dtype; None: all gates are 1.
        uses_triton: whether a kernel of Triton may compute the gradients of slots and gate.

    Returns:
        The sums, [N, C].
    """
    if gate is None:
        return _by_token(slots, weight) @ weight.flatten(0, 1)
    if is_compiling():
        return _plain(slots, gate, weight)
    if not torch.is_grad_enabled():
        return _by_token(_times_gate(slots, gate), weight) @ weight.flatten(0, 1)
    out: Tensor = _Down.apply(slots, gate, weight, uses_triton)
    return out
