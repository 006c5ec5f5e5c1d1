"""Every expert on every token in one product, then those that were chosen: the backend `reference`.

E / K times the arithmetic, but no step per expert, no sorting and no wait for the host. It is made of plain
differentiable operations, so it can be compiled, exported and mapped, and keeps what torch keeps for them.
For few tokens and small experts the other backends do the same with gradients of their own
(`grouped.placed_rows`).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from moa_fairseq.layers.experts.projection import Product

# When this beats a loop over the experts, from benchmarks/kernels.py on two CPU cores: the surplus products
# per expert must cost less than a step of the loop, in which gathering and calls cost as much as 24 columns
# of arithmetic. A GPU's step waits for the host, and its arithmetic is cheaper.
# In bfloat16 a CPU with units for it multiplies much faster, while oneDNN compiles a kernel for each number
# of rows: measured on a Xeon with AMX.
# Multiply-accumulates; the GPU's is an estimate
_STEP = {
    "cpu": 1.0e6,
    "cpu bfloat16": 5.0e7,
    "cuda": 6.4e7,
}
_STEP_COLUMNS = 24
# A loop does not read the matrices of unchosen experts, which pays once they do not fit the cache.
_CACHED_WEIGHTS = 1.5e6  # elements


def unsupported_reason(product: "Product") -> str:
    """Why one product over all of weight [E, D, C] is not faster than those that are asked for, or ""."""
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
    """As `experts.up` and `experts.down` of kernels: the product of all rows and experts, then a choice."""
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
