"""Launches of the routing kernels: output tensors, grids and tile sizes. Nothing here is tuned."""

import torch
from torch import Tensor

from moa_fairseq.layers.experts.triton import routing
from moa_fairseq.layers.experts.triton.launch import experts_pow2, on_its_device

_TILE = 4096  # tokens × experts that a program holds
_ROUTE_TILE = (64, 64)  # tokens × columns of a product
_SCAN_BLOCKS = 64
_GATE_TILE = (32, 128)  # slots × columns


def _tokens_per_block(num_experts: int) -> int:
    return max(16, min(128, _TILE // experts_pow2(num_experts)))


@on_its_device
def route(
    x: Tensor, weight: Tensor, per_token: int, normalizes: bool, padding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Softmax, choice and gates of N tokens, as `route_kernel` (MoA Eq. 7-9).

    Args:
        x: [N, C].
        weight: [E, C].
        per_token: K.
        normalizes: divide the chosen probabilities by their sum, unless K = E.
        padding: [N] bool, True = padding, whose gates are zero; or None.

    Returns:
        Logits [N, E], probabilities [N, E] and gates [N, K] in float32, and the chosen experts [N, K] int64
        or None if K = E. The gates are the probabilities themselves where K = E and there is no padding.
    """
    x = x.contiguous()
    weight = weight.contiguous()
    tokens = x.size(0)
    experts = weight.size(0)
    logits = x.new_empty(tokens, experts, dtype=torch.float32)
    probs = torch.empty_like(logits)
    chooses = per_token < experts
    if chooses:
        index = x.new_empty(tokens, per_token, dtype=torch.int64)
    else:
        index = None
    writes_gate = chooses or padding is not None
    if writes_gate:
        gate = probs.new_empty(tokens, per_token)
    else:
        gate = probs
    if tokens == 0:
        return logits, probs, gate, index
    block, columns = _ROUTE_TILE
    routing.route_kernel[(-(-tokens // block),)](
        x,
        weight,
        None if padding is None else padding.view(torch.uint8),
        logits,
        probs,
        gate if writes_gate else None,
        index,
        num_tokens=tokens,
        MODEL_DIM=x.size(1),
        EXPERTS=experts,
        PER_TOKEN=per_token,
        NORMALIZES=normalizes and chooses,
        EXPERTS_POW2=experts_pow2(experts),
        BLOCK_M=block,
        BLOCK_K=columns,
        num_warps=4,
        num_stages=3,
    )
    return logits, probs, gate, index


@on_its_device
def route_grad(
    probs: Tensor,
    grad_logits: Tensor | None,
    grad_probs: Tensor | None,
    grad_gate: Tensor | None,
    index: Tensor | None,
    padding: Tensor | None,
    per_token: int,
    normalizes: bool,
    detached: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits that `route` computed.

    Args:
        probs: [N, E] float32, as `route` returned them, like index.
        grad_logits, grad_probs: [N, E] float32, or None for zeros.
        grad_gate: [N, K] float32, or None for zeros.
        index: [N, K] int64, or None if K = E.
        padding, per_token, normalizes: those of `route`.
        detached: no gradient flows through the sum that gates are divided by.
        dtype: of the result.

    Returns:
        [N, E].
    """
    tokens, experts = probs.shape
    out = torch.empty_like(probs, dtype=dtype)
    if tokens == 0:
        return out
    block = _tokens_per_block(experts)
    routing.route_grad_kernel[(-(-tokens // block),)](
        None if grad_logits is None else grad_logits.contiguous(),
        None if grad_probs is None else grad_probs.contiguous(),
        None if grad_gate is None else grad_gate.contiguous(),
        probs,
        index,
        None if padding is None else padding.view(torch.uint8),
        out,
        num_tokens=tokens,
        EXPERTS=experts,
        PER_TOKEN=per_token,
        NORMALIZES=normalizes and index is not None,
        DETACHED=detached,
        EXPERTS_POW2=experts_pow2(experts),
        BLOCK_M=block,
    )
    return out


@on_its_device
def sort(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The slots in the order of their experts, as `ExpertPermutation` has them.

    Args:
        index: [N, K] int64, different experts in a row.
        num_experts: E.

    Returns:
        order [N·K] int64; offsets [E] int32.
    """
    index = index.contiguous()
    tokens, per_token = index.shape
    block = _tokens_per_block(num_experts)
    blocks = -(-tokens // block)
    order = index.new_empty(tokens * per_token)
    counts = index.new_empty(blocks, num_experts, dtype=torch.int32)
    offsets = index.new_empty(num_experts, dtype=torch.int32)
    sizes = {"EXPERTS": num_experts, "EXPERTS_POW2": experts_pow2(num_experts)}
    tiles = {**sizes, "PER_TOKEN": per_token, "BLOCK_T": block, "num_tokens": tokens}
    if blocks:
        routing.count_kernel[(blocks,)](index, counts, **tiles)
    routing.scan_kernel[(1,)](counts, offsets, num_blocks=blocks, BLOCK_B=_SCAN_BLOCKS, **sizes)
    if blocks:
        routing.place_kernel[(blocks,)](index, counts, order, **tiles)
    return order, offsets


@on_its_device
def gate_slots(slots: Tensor, gate: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
    """The elementwise part of the gradient of gated slots, as `gate_slots_kernel`.

    Args:
        slots: [S, D].
        gate: [S].
        product: [S, D], contiguous, the gradient of gate · slots; it becomes the gradient of the slots.

    Returns:
        gate · slots [S, D]; the gates' gradient [S] in their dtype.
    """
    slots = slots.contiguous()
    gate = gate.contiguous()
    gated = torch.empty_like(slots)
    grad_gate = torch.empty_like(gate, dtype=torch.float32)
    rows, columns = _GATE_TILE
    if slots.numel():
        routing.gate_slots_kernel[(-(-slots.size(0) // rows),)](
            slots,
            gate,
            product,
            gated,
            grad_gate,
            num_slots=slots.size(0),
            WIDTH=slots.size(1),
            BLOCK_S=rows,
            BLOCK_C=columns,
        )
    return gated, grad_gate.to(gate.dtype)
