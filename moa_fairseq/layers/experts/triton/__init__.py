"""The Triton backend: the expert projection with its gradients, and what routing it needs.

The projection is an autograd Function; where `torch.compile` is at work it and the parts of its backward pass
are custom operators (`torch.ops.moa_fairseq`), which stay whole in its graph and whose shapes it knows.
Elsewhere they would cost the host more than the kernels take. It can be differentiated once. This module
imports without Triton, which is loaded when the first product runs.
"""

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling

from moa_fairseq.layers.experts.expert_permutation import ExpertPermutation, Fan

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton's own switch, read when it loads


@cache
def loaded(name: str) -> Any:
    """A module of this package that needs Triton; kept, since an import in a function costs 5 µs a call."""
    return importlib.import_module(f"{__name__}.{name}")


def why_not() -> str:
    """Why this machine cannot run the backend, or "" if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton; CUDA builds of torch for Linux bring it)"
    if INTERPRETED:
        return ""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is not None:
        return ""
    import triton

    capability = torch.cuda.get_device_capability()
    return unfit(capability, triton.__version__) or (wrong_product() if capability < (7, 5) else "")


@cache
def wrong_product() -> str:
    """What is wrong with a 64 × 64 product in float16, or "": old compilers silently err on old GPUs."""
    device = "cpu" if INTERPRETED else "cuda"
    g = torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randn(size, generator=g).to(device, torch.float16) for size in ((64, 64), (1, 64, 64))
    )
    order = torch.arange(64, device=device)
    offsets = torch.tensor([64], device=device, dtype=torch.int32)
    try:
        got = loaded("launch").products(rows, weight, None, None, order, offsets, True, 1, 1)
    except Exception as error:  # whatever the compiler has to say
        return f"a product of 64 × 64 numbers failed with {type(error).__name__}: {error}"
    exact = rows.double() @ weight[0].double().t()
    if torch.allclose(got.double(), exact, atol=0.05, rtol=0.01):
        return ""
    return "a product of 64 × 64 numbers comes out wrong: this Triton does not serve this GPU"


def unfit(capability: tuple[int, int], triton_version: str) -> str:
    """Why this Triton does not serve an NVIDIA GPU, or "".

    Args:
        capability: the GPU's compute capability, (major, minor).
        triton_version: such as "3.6.0".
    """
    major, minor = (int(part) for part in triton_version.split(".")[:2])
    if capability < (7, 0):
        return "the GPU's compute capability is below 7.0"
    if capability < (8, 0):
        if capability < (7, 5):
            last = (3, 1)
            brought_by = "2.5"
        else:
            last = (3, 2)
            brought_by = "2.6"
        if (major, minor) > last:
            return (
                f"Triton {triton_version} has no matrix instructions for compute capability "
                f"{capability[0]}.{capability[1]}; {last[0]}.{last[1]} was the last, with torch {brought_by}"
            )
    return ""


def takes(rows: Tensor, weight: Tensor) -> bool:
    """Whether the kernels compute this product: float16, bfloat16 (Ampere and newer) or float32, on a GPU.

    Args:
        rows, weight: the factors, of which dtypes and device are read. Under the interpreter a CPU will do.
    """
    if rows.dtype != weight.dtype or rows.dtype not in _DTYPES:
        return False
    if not rows.is_cuda:
        return INTERPRETED
    if rows.dtype == torch.bfloat16 and torch.version.hip is None:
        # torch.compile knows the properties of a device, but not get_device_capability
        return torch.cuda.get_device_properties(rows.device).major >= 8
    return True


def project(
    rows: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, order: ExpertPermutation, fan: Fan
) -> Tensor:
    """A `Product` by the kernels, which can be differentiated once; biases of a product down included.

    Args:
        rows: up: [N, C]; down: [S / fan, D].
        weight: [E, D, C].
        bias: [E, D] into the experts or [E, C] into the model.
        gate: [S] or None for ones.
        order: the experts of the S slots.
        fan: whether it leads up, slots per row, slots per sum.

    Returns:
        Up: [S / fan, D]; down: [N, C].
    """
    sums: Tensor
    if is_compiling():
        sums = expert_project(rows, weight, bias, gate, order.expert, order.order, order.offsets, *fan)
        return sums
    order.sort_by(sorted_slots)
    slots, offsets = order.sorted
    sums = _Project.apply(rows, weight, bias, gate, order.expert, slots, offsets, *fan)
    return sums


_MOST_EXPERTS = 512  # that the routing kernels hold at once


def sorted_slots(order: ExpertPermutation) -> tuple[Tensor, Tensor] | None:
    """What `ExpertPermutation.order` and `offsets` are, in three launches; None where torch has to sort."""
    if order.num_experts > _MOST_EXPERTS:
        return None
    # [S] → [N, K]
    found: tuple[Tensor, Tensor] = loaded("launch_routing").sort(
        order.expert.view(-1, order.per_token), order.num_experts
    )
    return found


_Function = Callable[..., Any]
_EXPERTS = "Tensor order, Tensor offsets"
_FAN = "bool into_experts, int per_row, int per_sum"


def _sums(rows: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """The result of `products` and `project`, uncomputed."""
    *_, into_experts, per_row, per_sum = rest
    return rows.new_empty(rows.size(0) * per_row // per_sum, weight.size(1 if into_experts else 2))


# Function of `launch`, without gradients of its own → its schema as an operator, and its outputs uncomputed
_LAUNCHES: dict[str, tuple[str, _Function]] = {
    "products": (
        f"(Tensor rows, Tensor weight, Tensor? bias, Tensor? gate, {_EXPERTS}, {_FAN}) -> Tensor",
        _sums,
    ),
    "gate_grads": (
        f"(Tensor wide, Tensor narrow, Tensor weight, Tensor? bias, Tensor gate, {_EXPERTS}, int per_wide, "
        "int per_narrow, bool adds_products) -> (Tensor, Tensor, Tensor)",
        lambda wide, narrow, weight, bias, gate, order, offsets, per_wide, per_narrow, adds_products: (
            gate.new_empty(gate.shape),
            narrow.new_empty(narrow.size(0) * per_narrow, narrow.size(1)),
            narrow.new_empty(narrow.size(0) if adds_products else 0, narrow.size(1)),
        ),
    ),
    "outer": (
        f"(Tensor left, Tensor right, {_EXPERTS}, int per_left, int per_right) -> Tensor",
        lambda left, right, order, offsets, *_: left.new_empty(offsets.size(0), left.size(1), right.size(1)),
    ),
    "sum_rows": (
        f"(Tensor rows, Tensor? gate, {_EXPERTS}, int per_row) -> Tensor",
        lambda rows, gate, order, offsets, _: rows.new_empty(
            offsets.size(0), rows.size(1), dtype=torch.float32
        ),
    ),
}


def _launcher(name: str) -> _Function:
    """For an operator, which is made before Triton is loaded."""
    return lambda *arguments: getattr(loaded("launch"), name)(*arguments)


def _operator(name: str, run: _Function, schema: str, uncomputed: _Function) -> Any:
    operator = torch.library.custom_op(f"moa_fairseq::expert_{name}", run, mutates_args=(), schema=schema)
    operator.register_fake(uncomputed)
    return operator


# What the backward pass is made of for `torch.compile`; eager code calls the same functions of `launch`
_OPERATORS = SimpleNamespace(
    **{name: _operator(name, _launcher(name), *row) for name, row in _LAUNCHES.items()}
)


def _project(
    rows: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, expert: Tensor, *rest: Any
) -> Tensor:
    """rest: order, offsets, into_experts, slots per row and per sum. `expert` is for the gradient."""
    sums: Tensor = loaded("launch").products(rows, weight, bias, gate, *rest)
    return sums


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, into_experts, per_row, per_sum = inputs
    ctx.save_for_backward(*tensors)
    ctx.fan = into_experts, per_row, per_sum


def _gradients(ctx: Any, grad: Tensor, parts: Any) -> tuple[Tensor | None, ...]:
    # once: checkpointing recomputes at each access
    rows, weight, bias, gate, expert, order, offsets = ctx.saved_tensors
    into_experts, per_row, per_sum = ctx.fan
    needs_rows, needs_weight, needs_bias, needs_gate = ctx.needs_input_grad[:4]
    grad = grad.contiguous()
    if into_experts:
        narrow = grad
        wide = rows
        per_narrow = per_sum
        per_wide = per_row
    else:
        narrow = rows
        wide = grad
        per_narrow = per_row
        per_wide = per_sum
    grad_rows = grad_weight = grad_bias = grad_gate = None
    left = narrow
    per_left = per_narrow
    if gate is not None and (needs_weight or needs_gate):
        adds_products = needs_rows and not into_experts
        own_bias = bias if into_experts else None
        grad_gate, left, products = parts.gate_grads(
            wide, narrow, weight, own_bias, gate, order, offsets, per_wide, per_narrow, adds_products
        )
        per_left = 1
        grad_rows = products if adds_products else None
        if needs_gate and bias is not None and not into_experts:
            by_expert = grad @ bias.to(grad.dtype).t()  # [M, C] · [C, E], then [M, E] → [S]
            grad_gate = grad_gate + by_expert.gather(1, expert.view(-1, per_sum)).view(-1)
    if needs_rows and grad_rows is None:
        fan = (not into_experts, per_sum, per_row)
        grad_rows = parts.products(grad, weight, None, gate, order, offsets, *fan)
    if needs_weight:
        grad_weight = parts.outer(left, wide, order, offsets, per_left, per_wide)
    if needs_bias and bias is not None:
        grad_bias = parts.sum_rows(grad, gate, order, offsets, per_sum).to(bias.dtype)
    return grad_rows, grad_weight, grad_bias, grad_gate, *[None] * 6


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        # with a setup_context, torch would inspect the signature of `forward` at every call
        sums = _project(*inputs)
        _keep_inputs(ctx, inputs, sums)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # once_differentiable says it later, and costs every pass ten calls
            raise RuntimeError(
                "The gradient of Triton's kernels cannot be differentiated twice: build the layer with "
                'expert_backend="reference".'
            )
        return _gradients(ctx, grad, loaded("launch"))


expert_project = _operator(
    "project",
    _project,
    f"(Tensor rows, Tensor weight, Tensor? bias, Tensor? gate, Tensor expert, {_EXPERTS}, {_FAN}) -> Tensor",
    _sums,
)
expert_project.register_autograd(
    lambda ctx, grad: _gradients(ctx, grad, _OPERATORS), setup_context=_keep_inputs
)
