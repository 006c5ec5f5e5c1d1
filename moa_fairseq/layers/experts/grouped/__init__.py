"""The backend `grouped`: each expert's matrix times the rows that selected it, with our own gradients.

There are three ways to go through the experts, with the same results: `placed_rows` (one product with all
experts) if there is little to compute, `sorted_rows` (torch's grouped_mm) if torch has a kernel for the
device and dtype, else `expert_loop`. A fourth, `dense`, is for K = E.
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
    """Compute a product by a plan of the class `kind`.

    Args:
        product: a `projection.Product`.
        kind: PlacedRows, SortedRows or ExpertLoop; the product's `order` caches its object.

    Returns:
        The result; up: [S / fan, D]; down: [N, C], without biases.
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
    else:  # in generation, an autograd Function costs as much as a small product
        out = plan.forward(rows, weight, bias, gates, product.is_up)
    return out
