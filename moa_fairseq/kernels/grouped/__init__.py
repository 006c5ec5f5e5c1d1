"""Grouped backend: multiplies each expert's matrix with the rows that chose it; has its own gradients.

Three ways to go through the experts, with the same results: `sorted_rows` (torch's grouped_mm) where torch
has a kernel for the device and dtype, `every_expert` (one GEMM, then a choice) where there is little to
compute, else `expert_loop`. Beside them stands `dense`, for K = E.
"""

from typing import Any, Optional, Tuple, Type

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moa_fairseq.kernels.grouped import sorted_rows
from moa_fairseq.kernels.grouped.every_expert import EveryExpert
from moa_fairseq.kernels.grouped.expert_loop import ExpertLoop
from moa_fairseq.kernels.grouped.sorted_rows import SortedRows
from moa_fairseq.kernels.slot_order import Fan, SlotOrder

# When computing every expert beats a loop over them, from benchmarks/kernels.py on two CPU cores: the surplus
# products per expert must cost less than a step of the loop, in which gathering and calls cost as much as 24
# columns of arithmetic. A GPU's step waits for the host, and its arithmetic is cheaper.
# In bfloat16 a CPU with units for it multiplies much faster, while oneDNN compiles a kernel for each number
# of rows: measured on a Xeon with AMX.
_STEP = {"cpu": 1.0e6, "cpu bfloat16": 5.0e7, "cuda": 6.4e7}  # multiply-accumulates; the GPU's is an estimate
_STEP_COLUMNS = 24
# A loop does not read the matrices of unchosen experts, which pays once they do not fit the cache.
_CACHED_WEIGHTS = 1.5e6  # elements


def every_expert_pays(tokens: int, per_token: int, weight: Tensor) -> bool:
    """Whether one GEMM over all of weight [E, D, C] is faster than the K · tokens products asked for."""
    num_experts, dim, model_dim = weight.shape
    surplus = tokens * model_dim * max(dim - _STEP_COLUMNS, 0) * (num_experts - per_token) / num_experts
    device = weight.device.type
    if device == "cpu" and weight.dtype == torch.bfloat16:
        device = "cpu bfloat16"
    if surplus > _STEP.get(device, _STEP["cpu"]):
        return False
    reads_most = tokens * per_token > 2 * num_experts
    return reads_most or weight.is_cuda or weight.numel() <= _CACHED_WEIGHTS


def _kind(rows: Tensor, weight: Tensor, order: SlotOrder, per_wide: int) -> Type[Any]:
    """The class of the plan by which a product goes through the experts."""
    if every_expert_pays(order.slots // per_wide, per_wide, weight):
        return EveryExpert
    return SortedRows if sorted_rows.takes(rows, weight) else ExpertLoop


class _Project(Function):
    """rows, weight [E, D, C], bias [E, D] or None, gate [S] or None → sums, shapes as in kernels.project."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        gate: Optional[Tensor],
        into_experts: bool,
        plan: Any,
    ) -> Tensor:
        ctx.plan, ctx.into_experts = plan, into_experts
        ctx.save_for_backward(rows, weight, bias, gate)
        sums: Tensor = plan.forward(rows, weight, bias, gate, into_experts)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        saved = ctx.saved_tensors  # once: checkpointing recomputes at each access
        return (*ctx.plan.backward(grad, *saved, ctx.into_experts, ctx.needs_input_grad[:4]), None, None)


def project(
    rows: Tensor, weight: Tensor, bias: Optional[Tensor], gate: Optional[Tensor], order: SlotOrder, fan: Fan
) -> Tensor:
    """As reference.project."""
    into_experts, per_row, per_sum = fan
    per_wide, per_narrow = (per_row, per_sum) if into_experts else (per_sum, per_row)
    plan = order.plan(_kind(rows, weight, order, per_wide), per_wide, per_narrow)
    if torch.is_grad_enabled():
        sums: Tensor = _Project.apply(rows, weight, bias, gate, into_experts, plan)
    else:  # generation: a Function costs as much as a small product
        sums = plan.forward(rows, weight, bias, gate, into_experts)
    return sums
