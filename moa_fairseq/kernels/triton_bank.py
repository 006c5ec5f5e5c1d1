"""The Triton backend as operators of torch, with gradients: `expert_dispatch` and `expert_combine`.

With torch ≥ 2.4 they are custom operators (`torch.ops.moa_fairseq`), so `torch.compile` keeps them whole in
its graph and knows their shapes; an older torch gets the same functions as an autograd Function. They can
be differentiated once. This module imports without Triton, which is loaded when the first product runs.
"""

import importlib.util
import os
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moa_fairseq.kernels.slot_order import SlotOrder

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton's own switch, read when it loads


def why_not() -> str:
    """Why this machine cannot run the backend, or "" if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton; CUDA builds of torch for Linux bring it)"
    if _INTERPRETED:
        return ""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is not None:
        return ""
    import triton

    return unfit(torch.cuda.get_device_capability(), triton.__version__)


def unfit(capability: Tuple[int, int], triton_version: str) -> str:
    """Why this Triton does not serve an NVIDIA GPU of this compute capability, or ""."""
    major, minor = (int(part) for part in triton_version.split(".")[:2])
    if capability < (7, 0):
        return "the GPU's compute capability is below 7.0"
    if capability < (8, 0):
        last, brought_by = ((3, 1), "2.5") if capability < (7, 5) else ((3, 2), "2.6")
        if (major, minor) > last:
            return (
                f"Triton {triton_version} has no matrix instructions for compute capability "
                f"{capability[0]}.{capability[1]}; {last[0]}.{last[1]} was the last, with torch {brought_by}"
            )
    return ""


def takes(rows: Tensor, weight: Tensor) -> bool:
    """Whether the kernels compute this product: float16, bfloat16 (Ampere and newer) or float32, on a GPU."""
    if rows.dtype != weight.dtype or rows.dtype not in _DTYPES:
        return False
    if not rows.is_cuda:
        return _INTERPRETED
    if rows.dtype == torch.bfloat16 and torch.version.hip is None:
        # torch.compile knows the properties of a device, but not get_device_capability
        return torch.cuda.get_device_properties(rows.device).major >= 8
    return True


def dispatch(x: Tensor, weight: Tensor, bias: Optional[Tensor], order: SlotOrder) -> Tensor:
    """Project each token by its K experts: x [N, C], weight [E, D, C], bias [E, D] → [N, K, D]."""
    return expert_dispatch(x, weight, bias, order.order, order.offsets, order.per_token)


def combine(slots: Tensor, gate: Tensor, weight: Tensor, bias: Optional[Tensor], order: SlotOrder) -> Tensor:
    """Gate-weighted sum of each token's K projected slots: slots [N, K, D], gate [N, K] → [N, C]."""
    return expert_combine(slots, gate, weight, bias, order.order, order.offsets)


def _operator(
    name: str,
    run: Callable,
    shapes: Callable,
    setup: Optional[Callable] = None,
    backward: Optional[Callable] = None,
) -> Callable:
    """`run` as an operator; `shapes` makes its outputs uncomputed, setup and backward are its gradient."""
    if hasattr(torch.library, "custom_op"):
        operator = torch.library.custom_op(f"moa_fairseq::{name}", run, mutates_args=())
        operator.register_fake(shapes)
        if backward is not None:
            operator.register_autograd(backward, setup_context=setup)
        return operator
    if backward is None:
        return run
    parts = {"forward": run, "setup_context": setup, "backward": once_differentiable(backward)}
    return type(name, (Function,), {key: staticmethod(part) for key, part in parts.items()}).apply


# --- the parts of the two backward passes; no gradients of their own


def _reduce(slots: Tensor, weight: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    from moa_fairseq.kernels import triton_launch

    return triton_launch.project(slots, None, weight, None, order, offsets)


def _reduce_shapes(slots: Tensor, weight: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    return slots.new_empty(slots.size(0), weight.size(2))


def _grad_slots(
    grad: Tensor,
    slots: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    order: Tensor,
    offsets: Tensor,
) -> Tuple[Tensor, Tensor]:
    from moa_fairseq.kernels import triton_launch

    return triton_launch.expand_gated(grad, slots, gate, weight, bias, order, offsets)


def _grad_slots_shapes(
    grad: Tensor,
    slots: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    order: Tensor,
    offsets: Tensor,
) -> Tuple[Tensor, Tensor]:
    return slots.new_empty(slots.shape), gate.new_empty(gate.shape)


def _grad_weight(
    left: Tensor, gate: Optional[Tensor], right: Tensor, order: Tensor, offsets: Tensor, sums_of: str
) -> List[Tensor]:
    from moa_fairseq.kernels import triton_launch

    out, sums = triton_launch.outer(left, gate, right, order, offsets, sums_of)
    return [out] if sums is None else [out, sums]


def _grad_weight_shapes(
    left: Tensor, gate: Optional[Tensor], right: Tensor, order: Tensor, offsets: Tensor, sums_of: str
) -> List[Tensor]:
    experts = offsets.size(0)
    out = left.new_empty(experts, left.size(2), right.size(1))
    if not sums_of:
        return [out]
    width = left.size(2) if sums_of == "left" else right.size(1)
    return [out, left.new_empty(experts, width, dtype=torch.float32)]


_expert_reduce = _operator("expert_reduce", _reduce, _reduce_shapes)
_expert_grad_slots = _operator("expert_grad_slots", _grad_slots, _grad_slots_shapes)
_expert_grad_weight = _operator("expert_grad_weight", _grad_weight, _grad_weight_shapes)


def _weight_and_bias_grads(
    ctx: Any, needs: List[bool], sums_of: str, *operands: Optional[Tensor]
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """One pass over the rows for both; None for what is not needed. Operands as in `_grad_weight`."""
    if not any(needs):
        return None, None
    grads = _expert_grad_weight(*operands, sums_of if needs[1] else "")
    return grads[0], grads[1].to(ctx.bias_dtype) if needs[1] else None


# --- dispatch


def _dispatch(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], order: Tensor, offsets: Tensor, per_token: int
) -> Tensor:
    from moa_fairseq.kernels import triton_launch

    return triton_launch.expand(x, weight, bias, order, offsets, per_token)


def _dispatch_shapes(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], order: Tensor, offsets: Tensor, per_token: int
) -> Tensor:
    return x.new_empty(x.size(0), per_token, weight.size(1))


def _dispatch_setup(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, order, offsets, _ = inputs
    ctx.save_for_backward(order, offsets, x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _dispatch_backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
    order, offsets, x, weight = ctx.saved_tensors  # once: checkpointing recomputes at each access
    needs_x, *needs = ctx.needs_input_grad[:3]
    grad = grad.contiguous()
    grad_x = _expert_reduce(grad, weight, order, offsets) if needs_x else None
    grad_weight, grad_bias = _weight_and_bias_grads(ctx, needs, "left", grad, None, x, order, offsets)
    return grad_x, grad_weight, grad_bias, None, None, None


expert_dispatch = _operator(
    "expert_dispatch", _dispatch, _dispatch_shapes, _dispatch_setup, _dispatch_backward
)


# --- combine


def _combine(
    slots: Tensor, gate: Tensor, weight: Tensor, bias: Optional[Tensor], order: Tensor, offsets: Tensor
) -> Tensor:
    from moa_fairseq.kernels import triton_launch

    return triton_launch.project(slots, gate, weight, bias, order, offsets)


def _combine_shapes(
    slots: Tensor, gate: Tensor, weight: Tensor, bias: Optional[Tensor], order: Tensor, offsets: Tensor
) -> Tensor:
    return slots.new_empty(slots.size(0), weight.size(2))


def _combine_setup(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    slots, gate, weight, bias, order, offsets = inputs
    ctx.save_for_backward(order, offsets, slots, gate, weight, bias)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _combine_backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
    order, offsets, slots, gate, weight, bias = ctx.saved_tensors
    needs_slots, needs_gate, *needs = ctx.needs_input_grad[:4]
    grad = grad.contiguous()
    grad_slots = grad_gate = None
    if needs_slots or needs_gate:
        grad_slots, grad_gate = _expert_grad_slots(grad, slots, gate, weight, bias, order, offsets)
    grad_weight, grad_bias = _weight_and_bias_grads(ctx, needs, "right", slots, gate, grad, order, offsets)
    return grad_slots, grad_gate, grad_weight, grad_bias, None, None


expert_combine = _operator("expert_combine", _combine, _combine_shapes, _combine_setup, _combine_backward)
