"""Grouped backend: multiplies each expert's matrix with the rows that chose it; has its own gradients.

Three ways to go through the experts, with the same results: `placed_rows` (one product, then a choice) where
there is little to compute, `sorted_rows` (torch's grouped_mm) where torch has a kernel for the device and
dtype, else `expert_loop`. Beside them stands `dense`, for K = E.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from moa_fairseq.layers.experts import every_expert
from moa_fairseq.layers.experts.twice import differentiable_gradients


class _Project(Function):
    """rows, weight [E, D, C], bias [E, D] or None, gates [S] or None → the result of a `Product`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gates: Tensor | None,
        product: Any,
        plan: Any,
    ) -> Tensor:
        ctx.plan = plan
        ctx.product = product._replace(rows=None, weight=None, bias=None, gates=None)  # saved below
        ctx.save_for_backward(rows, weight, bias, gates)
        out: Tensor = plan.forward(rows, weight, bias, gates, product.is_up)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing recomputes at each access
        needs = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():

            def plain(rows: Tensor, weight: Tensor, bias: Any, gates: Any) -> Tensor:
                product = ctx.product._replace(rows=rows, weight=weight, bias=bias, gates=gates)
                return every_expert.run(product)

            return (*differentiable_gradients(plain, saved, needs, grad), None, None)
        return (*ctx.plan.backward(grad, *saved, ctx.product.is_up, needs), None, None)


def run(product: Any, kind: Any) -> Tensor:
    """A product by a plan of the class `kind`.

    Args:
        product: a `projection.Product`.
        kind: PlacedRows, SortedRows or ExpertLoop; its object is kept in the product's order.

    Returns:
        Up: [S / fan, D]; down: [N, C]. The biases of a product down are not in it.
    """
    plan = product.order.plan(kind, product.fan)
    rows = product.rows
    weight = product.weight
    bias = product.bias if product.is_up else None
    gates = None
    if product.gates is not None:
        gates = product.gates.to(rows.dtype)
    out: Tensor
    if torch.is_grad_enabled():
        out = _Project.apply(rows, weight, bias, gates, product, plan)
    else:  # generation: a Function costs as much as a small product
        out = plan.forward(rows, weight, bias, gates, product.is_up)
    return out
