"""Multiply all tokens with all experts, and keep the selected results: the backend `reference`.

This takes E / K times the arithmetic, but has no step for each expert, no sorting and no wait for the host.
It consists of plain differentiable operations, so it can be compiled, exported and mapped, and keeps for the
backward pass what torch keeps for them. For few tokens and small experts the other backends do the same with
our own gradients (`grouped.placed_rows`).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from moa_fairseq.layers.experts.projection import Product

# The cost of a step of a loop over experts, in multiply-accumulates. This way is faster than the loop if the
# surplus products for each expert cost less than a step. Measured by benchmarks/kernels.py on two CPU cores,
# where gathering and calls cost as much as 24 columns of arithmetic. On a GPU a step waits for the host, and
# arithmetic is cheaper; its number is an estimate. In bfloat16 a CPU with units for it (measured on a Xeon
# with AMX) multiplies much faster, while in the loop oneDNN compiles a kernel for each number of rows.
_STEP = {
    "cpu": 1.0e6,
    "cpu bfloat16": 5.0e7,
    "cuda": 6.4e7,
}
_STEP_COLUMNS = 24
# What fits the cache. A loop reads the weights of selected experts only, so beyond this it is faster.
_CACHED_WEIGHTS = 1.5e6  # elements


def unsupported_reason(product: "Product") -> str:
    """Why one product with all of weight [E, D, C] is not faster than the selected products; "" if it is."""
    if is_compiling():
        return "a graph must not depend on numbers of tokens"
    weight = product.weight
    tokens = product.order.tokens
    per_token = product.order.per_token
    num_experts, dim, model_dim = weight.shape
    surplus = (
        tokens * model_dim * max(dim - _STEP_COLUMNS, 0) * (num_experts - per_token) / num_experts
    )
    device = weight.device.type
    if device == "cpu" and weight.dtype == torch.bfloat16:
        device = "cpu bfloat16"
    if surplus > _STEP.get(device, _STEP["cpu"]):
        return "too many products that nobody asked for"
    reads_most = tokens * per_token > 2 * num_experts
    if reads_most or weight.is_cuda or weight.numel() <= _CACHED_WEIGHTS:
        return ""
    return "most of the experts need not be read"


def run(product: "Product") -> Tensor:
    """Compute a `Product` by the product of all rows with all experts."""
    weight = product.weight
    order = product.order
    num_experts, dim, _ = weight.shape
    gates = None
    if product.gates is not None:
        gates = product.gates.to(product.rows.dtype).unsqueeze(1)
    if product.is_up:
        matrix = weight.flatten(0, 1).t()  # [E, D, C] → [C, E·D]
        if product.bias is None:
            every = product.rows @ matrix
        else:
            every = torch.addmm(product.bias.flatten(), product.rows, matrix)
        slots = every.view(-1, dim).index_select(0, order.cell)  # [N·E, D] → [N·K, D]
        slots = slots if gates is None else slots * gates
        if product.fan == 1:
            return slots
        return slots.view(-1, product.fan, dim).sum(1)
    slots = product.rows.unsqueeze(1).expand(-1, product.fan, -1)  # a view
    if gates is not None:
        slots = slots * gates.view(-1, product.fan, 1)
    slots = slots.reshape(-1, dim)
    every = slots.new_zeros(order.tokens * num_experts, dim).index_copy(0, order.cell, slots)
    return every.view(order.tokens, num_experts * dim) @ weight.flatten(0, 1)  # [N, E·D] · [E·D, C]
