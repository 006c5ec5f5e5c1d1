"""The part of `validate` that checks the kernels of routing and of sorting."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moa_fairseq.layers.experts import ExpertPermutation, routing, triton


class _Sizes(NamedTuple):
    tokens: int
    width: int
    experts: int
    per_token: int


_SIZES = (_Sizes(1, 8, 5, 2), _Sizes(67, 37, 33, 8), _Sizes(50, 24, 4, 4))
_LARGE = _Sizes(8192, 512, 32, 8)  # takes Triton's interpreter too long


def _route_by_kernel(
    x: Tensor, weight: Tensor, per_token: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits [N, E], gates [N, K] and the selected experts [N, K] (None if K = E)."""
    outputs = routing.top_k_routing(x, weight, per_token, "detached", None, "triton")
    if outputs is None:
        raise RuntimeError("the routing kernel does not take float32")
    logits, _, gate, index = outputs
    return logits, gate, index


def _route_by_torch(x: Tensor, weight: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits [N, E] and gates [N, K] of the experts `index`; None: of all experts."""
    logits = x @ weight.t()
    gate = logits.softmax(-1)
    if index is not None:
        gate = gate.gather(1, index)
        gate = gate / gate.sum(1, keepdim=True).detach()
    return logits, gate


def _is_sorted(index: Tensor, experts: int) -> bool:
    """Whether the kernel sorts slots as torch does."""
    fast = ExpertPermutation(index, experts)
    fast.sort_by(triton.sorted_slots)
    plain = ExpertPermutation(index, experts)
    return torch.equal(fast.order, plain.order) and torch.equal(fast.offsets, plain.offsets)


def check_routing(device: str) -> Iterator[tuple[str, list[str]]]:
    """Route tokens and sort their slots with the kernels, in float32, and compare with torch in float64.

    Args:
        device: "cuda" or "cpu".

    Yields:
        The case in words, and a line for each thing that is wrong with it.
    """
    cases = [*_SIZES]
    if device == "cuda":
        cases.append(_LARGE)
    for tokens, width, experts, per_token in cases:
        g = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, width, generator=g).to(device)
        weight = torch.randn(experts, width, generator=g).to(device) / width**0.5
        upstream = torch.randn(tokens, per_token, generator=g).to(device)
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
        logits, gate, index = _route_by_kernel(leaves[0], leaves[1], per_token)
        exact_logits, exact_gate = _route_by_torch(exact_leaves[0], exact_leaves[1], index)
        results = [logits, gate, *torch.autograd.grad(gate, leaves, upstream)]
        exact = [
            exact_logits,
            exact_gate,
            *torch.autograd.grad(exact_gate, exact_leaves, upstream.double()),
        ]
        wrong = []
        for name, result, truth in zip(("logits", "gate", "x", "weight"), results, exact):
            if not torch.allclose(result.double(), truth, atol=1e-4, rtol=1e-4):
                wrong.append(f"{name} is wrong")
        if index is not None and not _is_sorted(index, experts):
            wrong.append("slots are in a wrong order")
        yield f"routing {tokens} tokens to {per_token} of {experts} experts", wrong
