"""Grouped backend: each expert's matrix meets the rows that chose it, with gradients of its own.

Three ways to do it, same results: `sorted_rows` (one grouped_mm) where torch has a kernel for the device
and dtype, `every_expert` (one GEMM, then a choice) where there is little to compute, else `expert_loop`.
"""

from types import ModuleType
from typing import Optional, Tuple

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moa_fairseq.kernels import every_expert, expert_loop, sorted_rows
from moa_fairseq.kernels.slot_order import SlotOrder

# When computing every expert beats walking over them, from benchmarks/kernels.py on two CPU cores: the
# surplus products per expert must cost less than the loop's step, in which gathering and calling weigh
# as much as 24 columns of arithmetic. A GPU's step waits for the host, and its arithmetic is cheaper.
_STEP = {"cpu": 1.0e6, "cuda": 6.4e7}  # multiply-accumulates; the GPU's is an estimate
_STEP_COLUMNS = 24
# A loop leaves the matrices of unchosen experts unread, which pays once they do not fit the cache.
_CACHED_WEIGHTS = 1.5e6  # elements


def every_expert_pays(tokens: int, per_token: int, weight: Tensor) -> bool:
    """Whether one GEMM over all of weight [E, D, C] is faster than the K · tokens products asked for."""
    num_experts, dim, model_dim = weight.shape
    surplus = tokens * model_dim * max(dim - _STEP_COLUMNS, 0) * (num_experts - per_token) / num_experts
    if surplus > _STEP.get(weight.device.type, _STEP["cpu"]):
        return False
    reads_most = tokens * per_token > 2 * num_experts
    return reads_most or weight.is_cuda or weight.numel() <= _CACHED_WEIGHTS


def _walk(rows: Tensor, weight: Tensor, order: SlotOrder) -> ModuleType:
    per_token = order.per_token
    if every_expert_pays(order.order.numel() // per_token, per_token, weight):
        return every_expert
    return sorted_rows if sorted_rows.takes(rows, weight) else expert_loop


class _Dispatch(Function):
    """x [N, C], weight [E, D, C], bias [E, D] or None → slots [N·K, D] in flat slot order."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Optional[Tensor], order: SlotOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(x, weight)
        return _walk(x, weight, order).dispatch(x, weight, bias, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        return (*_walk(x, weight, ctx.order).dispatch_backward(grad, x, weight, ctx.order, needs), None)


class _Combine(Function):
    """slots [N·K, D], gate [N·K], weight [E, D, C] → [N, C]."""

    @staticmethod
    def forward(ctx, slots: Tensor, gate: Tensor, weight: Tensor, order: SlotOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(slots, gate, weight)
        return _walk(slots, weight, order).combine(slots, gate, weight, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        slots, gate, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        walk = _walk(slots, weight, ctx.order)
        return (*walk.combine_backward(grad, slots, gate, weight, ctx.order, needs), None)


def dispatch(x: Tensor, weight: Tensor, order: SlotOrder, bias: Optional[Tensor] = None) -> Tensor:
    """Project each token by its K experts: x [N, C], weight [E, D, C], bias [E, D] → [N, K, D]."""
    slots = _Dispatch.apply(x, weight, bias, order)
    return slots.view(x.size(0), order.per_token, weight.size(1))


def combine(slots: Tensor, gate: Tensor, weight: Tensor, order: SlotOrder) -> Tensor:
    """Gate-weighted sum of each token's K projected slots: slots [N, K, D], gate [N, K] → [N, C]."""
    return _Combine.apply(slots.reshape(-1, slots.size(2)), gate.reshape(-1), weight, order)
