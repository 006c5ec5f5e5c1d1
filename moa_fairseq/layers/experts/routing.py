"""The products of routers: float32 logits without a float32 copy of the input, and routing in one kernel."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling

from moa_fairseq.layers.experts import triton

_HAS_WIDE_MM = "dtype" in torch.ops.aten.mm.overloads()  # mm(..., out_dtype=), for GPUs
_MOST_EXPERTS = 128  # one program holds their logits for 64 tokens
# The renormalisations of the kernel: whether it divides by the sum, and whether the sum gets no gradient
FUSED = {"detached": (True, True), "full": (True, False), "none": (False, False)}


class _WideProduct(Function):
    """x [N, C], weight [E, C] → x · weightᵀ in float32; the backward pass keeps x and weight, without copies.

    The product of two half-precision numbers is exact in float32, so the forward pass loses nothing. The
    gradient of the logits is rounded to the dtype of x, as every gradient of a model in half precision is; it
    is not rounded if the weights are float32 (autocast).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if _HAS_WIDE_MM and x.is_cuda and x.dtype == weight.dtype and torch.version.hip is None:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return F.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return _product_grads(ctx, grad.to(x.dtype) if x.dtype == weight.dtype else grad, x, weight)


def _product_grads(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and weight, from the gradient of the logits, `grad` [N, E]."""
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype)
    grad_weight = None
    if ctx.needs_input_grad[1]:
        grad_weight = (grad.t() @ x.to(grad.dtype)).to(weight.dtype)
    return grad_x, grad_weight


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ in float32, without keeping float32 copies of inputs in half precision.

    Args:
        x: [N, C].
        weight: [E, C].

    Returns:
        The product, [N, E] float32.
    """
    logits: Tensor = _WideProduct.apply(x, weight)
    return logits


class _Route(Function):
    """x, weight → (logits, probs, gate, index) of `top_k_routing`; gate is None if it is probs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        per_token: int,
        renormalize: str,
        padding: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        normalizes, detached = FUSED[renormalize]
        outputs = triton.loaded("launch_routing").route(x, weight, per_token, normalizes, padding)
        logits, probs, gate, index = outputs
        ctx.save_for_backward(x, weight, probs, index, padding)
        ctx.options = per_token, normalizes, detached
        ctx.set_materialize_grads(False)
        if index is not None:
            ctx.mark_non_differentiable(index)
        return logits, probs, gate if gate is not probs else None, index

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "The fused router's gradient cannot be differentiated again: build the layer with "
                'expert_backend="reference".'
            )
        grad_logits, grad_probs, grad_gate, _ = grads
        if grad_logits is None and grad_probs is None and grad_gate is None:
            return (None,) * 5
        x, weight, probs, index, padding = ctx.saved_tensors
        per_token, normalizes, detached = ctx.options
        grad = triton.loaded("launch_routing").route_grad(
            probs,
            grad_logits,
            grad_probs,
            grad_gate,
            index,
            padding,
            per_token,
            normalizes,
            detached,
            x.dtype,
        )
        return (*_product_grads(ctx, grad, x, weight), None, None, None)


def top_k_routing(
    x: Tensor,
    weight: Tensor,
    per_token: int,
    renormalize: str,
    padding: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """Compute MoA Eq. 7-9 in one kernel. Of equal logits, the expert with the lower number is selected.

    Args:
        x: inputs, [N, C].
        weight: the router's matrix, [E, C].
        per_token: K.
        renormalize: "detached", "full" or "none", as in `routers.RENORMALIZATIONS`.
        padding: [N] bool, True = padding, whose gates become zero; or None.
        backend: a name that `resolve_backend` returned.

    Returns:
        Logits [N, E], probabilities [N, E] and gates [N, K] in float32, and the selected experts [N, K]
        int64, the most probable first (None if K = E). None alone if the backend is not Triton or its kernel
        does not support x; the caller must then compute them.
    """
    if unsupported_reason(x, weight, renormalize, backend):
        return None
    logits, probs, gate, index = _Route.apply(x, weight, per_token, renormalize, padding)
    return logits, probs, probs if gate is None else gate, index


def unsupported_reason(x: Tensor, weight: Tensor, renormalize: str, backend: str) -> str:
    """Why `top_k_routing` returns None, or "".

    Args:
        x, weight, renormalize, backend: those of `top_k_routing`.
    """
    if backend not in ("auto", "triton") or not triton.takes(x, weight):
        return "the backend, the device or the dtype is not Triton's"
    if is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.compile and torch.func do not enter it"
    if renormalize not in FUSED:
        return f"its renormalisations are {', '.join(FUSED)}, not {renormalize}"
    if weight.size(0) > _MOST_EXPERTS:
        return f"{weight.size(0)} experts are more than {_MOST_EXPERTS}"
    return ""
