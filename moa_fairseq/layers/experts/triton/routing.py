"""Triton code of routing: logits to gates, their gradient, and slots in the order of their experts.

Kernels only, launched by `launch_routing`. A program of `route_kernel` has all E logits of its tokens, so
softmax, choice and renormalisation need no second pass. Sorting by counting takes three launches: how many
slots each block of tokens has for each expert, where these begin, and each slot to its place. Ties keep
the slots' order, and nothing depends on timing.

The rules of `kernels` about pipelined loops hold here, too.
"""

import triton
import triton.language as tl

from moa_fairseq.layers.experts.triton.kernels import _product


@triton.jit
def _chosen_slots(
    index, token, live, expert, PER_TOKEN: tl.constexpr, BLOCK_T: tl.constexpr, EXPERTS_POW2: tl.constexpr
):
    """[BLOCK_T, EXPERTS_POW2]: which of its slots a token gave to the expert, or PER_TOKEN for none."""
    slot = tl.full((BLOCK_T, EXPERTS_POW2), PER_TOKEN, dtype=tl.int32)
    for k in range(PER_TOKEN):
        chosen = tl.load(index + token * PER_TOKEN + k, mask=live, other=-1).to(tl.int32)
        slot = tl.where(chosen[:, None] == expert[None, :], k, slot)
    return slot


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    x,  # [N, MODEL_DIM]
    weight,  # [EXPERTS, MODEL_DIM]
    padding,  # [N] uint8 or None
    logits,  # [N, EXPERTS] float32, like the next two
    probs,
    gate,  # [N, PER_TOKEN], or None: the probabilities are the gates
    index,  # [N, PER_TOKEN] int64, or None where all experts are chosen
    num_tokens,
    MODEL_DIM: tl.constexpr,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALIZES: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """MoA Eq. 7-9: softmax of x · weightᵀ, the PER_TOKEN largest in falling order, divided by their sum."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = token < num_tokens
    expert = tl.arange(0, EXPERTS_POW2)
    exists = (expert < EXPERTS)[None, :]
    row = tl.where(live, token, 0)
    acc = _product(
        x, row, weight, expert, MODEL_DIM, EXPERTS, 1, MODEL_DIM, BLOCK_M, EXPERTS_POW2, BLOCK_K, False
    )
    place = token[:, None] * EXPERTS + expert[None, :]
    mask = live[:, None] & exists
    tl.store(logits + place, acc, mask=mask)
    acc = tl.where(exists, acc, float("-inf"))
    share = tl.exp(acc - tl.max(acc, axis=1)[:, None])
    share = share / tl.sum(share, axis=1)[:, None]
    tl.store(probs + place, share, mask=mask)
    if gate is not None:
        weights = share
        slot = tl.broadcast_to(expert[None, :], (BLOCK_M, EXPERTS_POW2))
        if index is not None:
            # by logits: probabilities may underflow to ties. Not a number and -inf are chosen last, but still
            # once: every slot must have an expert of its own.
            score = tl.where(acc > -3.0e38, acc, -3.0e38)
            score = tl.where(exists, score, -3.2e38)
            slot = tl.full((BLOCK_M, EXPERTS_POW2), PER_TOKEN, dtype=tl.int32)
            for k in range(PER_TOKEN):
                best = tl.max(score, axis=1)
                first = tl.min(tl.where(score == best[:, None], expert[None, :], EXPERTS_POW2), axis=1)
                hit = expert[None, :] == first[:, None]
                slot = tl.where(hit, k, slot)
                score = tl.where(hit, -3.4e38, score)
            if NORMALIZES:
                total = tl.sum(tl.where(slot < PER_TOKEN, share, 0.0), axis=1)
                weights = share / total[:, None]
        place = token[:, None] * PER_TOKEN + slot
        mask = mask & (slot < PER_TOKEN)
        if padding is not None:
            padded = tl.load(padding + token, mask=live, other=0)
            weights = tl.where(padded[:, None] != 0, 0.0, weights)
        tl.store(gate + place, weights, mask=mask)
        if index is not None:
            experts = tl.broadcast_to(expert[None, :].to(tl.int64), (BLOCK_M, EXPERTS_POW2))
            tl.store(index + place, experts, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def route_grad_kernel(
    grad_logits,  # [N, EXPERTS] float32 or None, like the next
    grad_probs,
    grad_gate,  # [N, PER_TOKEN] float32 or None
    probs,  # [N, EXPERTS] float32
    index,  # [N, PER_TOKEN] int64, or None where all experts are chosen
    padding,  # [N] uint8 or None
    out,  # [N, EXPERTS]
    num_tokens,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALIZES: tl.constexpr,
    DETACHED: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The whole gradient of the logits. DETACHED: none flows through the sum that gates are divided by."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = token < num_tokens
    expert = tl.arange(0, EXPERTS_POW2)
    mask = live[:, None] & (expert < EXPERTS)[None, :]
    place = token[:, None] * EXPERTS + expert[None, :]
    share = tl.load(probs + place, mask=mask, other=0.0)
    grad = tl.zeros((BLOCK_M, EXPERTS_POW2), dtype=tl.float32)
    if grad_gate is not None:
        if index is not None:
            slot = _chosen_slots(index, token, live, expert, PER_TOKEN, BLOCK_M, EXPERTS_POW2)
        else:
            slot = tl.broadcast_to(expert[None, :], (BLOCK_M, EXPERTS_POW2))
        chosen = mask & (slot < PER_TOKEN)
        grad = tl.load(grad_gate + token[:, None] * PER_TOKEN + slot, mask=chosen, other=0.0)
        if padding is not None:
            padded = tl.load(padding + token, mask=live, other=0)
            grad = tl.where(padded[:, None] != 0, 0.0, grad)
        if NORMALIZES:
            total = tl.sum(tl.where(chosen, share, 0.0), axis=1)[:, None]
            total = tl.where(live[:, None], total, 1.0)
            if not DETACHED:
                grad -= tl.sum(grad * share, axis=1)[:, None] / total
            grad = tl.where(chosen, grad / total, 0.0)
    if grad_probs is not None:
        grad += tl.load(grad_probs + place, mask=mask, other=0.0)
    grad = share * (grad - tl.sum(grad * share, axis=1)[:, None])
    if grad_logits is not None:
        grad += tl.load(grad_logits + place, mask=mask, other=0.0)
    tl.store(out + place, grad.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def count_kernel(
    index,  # [N, PER_TOKEN] int64
    counts,  # [blocks, EXPERTS] int32
    num_tokens,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """How many slots each block of BLOCK_T tokens gives to each expert."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, EXPERTS_POW2)
    slot = _chosen_slots(index, token, token < num_tokens, expert, PER_TOKEN, BLOCK_T, EXPERTS_POW2)
    found = tl.sum((slot < PER_TOKEN).to(tl.int32), axis=0)
    tl.store(counts + tl.program_id(0) * EXPERTS + expert, found, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["num_blocks"])
def scan_kernel(
    counts,  # [blocks, EXPERTS] int32; becomes the position where the block's slots of the expert begin
    offsets,  # [EXPERTS] int32
    num_blocks,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """One program: where each expert ends, and where each block of tokens begins within it."""
    expert = tl.arange(0, EXPERTS_POW2)
    exists = (expert < EXPERTS)[None, :]
    total = tl.zeros((EXPERTS_POW2,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        block = first + tl.arange(0, BLOCK_B)
        mask = (block < num_blocks)[:, None] & exists
        total += tl.sum(
            tl.load(counts + block[:, None] * EXPERTS + expert[None, :], mask=mask, other=0), axis=0
        )
    end = tl.cumsum(total, axis=0)
    tl.store(offsets + expert, end, mask=expert < EXPERTS)
    begin = end - total
    for first in range(0, num_blocks, BLOCK_B):
        block = first + tl.arange(0, BLOCK_B)
        mask = (block < num_blocks)[:, None] & exists
        place = counts + block[:, None] * EXPERTS + expert[None, :]
        found = tl.load(place, mask=mask, other=0)
        tl.store(place, begin[None, :] + tl.cumsum(found, axis=0) - found, mask=mask)
        begin += tl.sum(found, axis=0)


@triton.jit(do_not_specialize=["num_tokens"])
def place_kernel(
    index,  # [N, PER_TOKEN] int64
    begins,  # [blocks, EXPERTS] int32
    order,  # [S] int64
    num_tokens,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """order[position] = slot; a token's slots have different experts, so its rank counts earlier tokens."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, EXPERTS_POW2)
    slot = _chosen_slots(index, token, token < num_tokens, expert, PER_TOKEN, BLOCK_T, EXPERTS_POW2)
    chosen = slot < PER_TOKEN
    one = chosen.to(tl.int32)
    begin = tl.load(begins + tl.program_id(0) * EXPERTS + expert, mask=expert < EXPERTS, other=0)
    position = begin[None, :] + tl.cumsum(one, axis=0) - one
    tl.store(order + position, token[:, None] * PER_TOKEN + slot, mask=chosen)


@triton.jit(do_not_specialize=["num_slots"])
def gate_slots_kernel(
    slots,  # [S, WIDTH]
    gate,  # [S]
    product,  # [S, WIDTH]; becomes gate · product
    gated,  # [S, WIDTH]
    grad_gate,  # [S] float32
    num_slots,
    WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """gated = gate · slots, grad_gate = product · slots, product = gate · product: K = E's `gate_kernel`."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    live = slot < num_slots
    share = tl.load(gate + slot, mask=live, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros((BLOCK_S,), dtype=tl.float32)
    for first in range(0, WIDTH, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)
        mask = live[:, None] & (column < WIDTH)[None, :]
        place = slot[:, None] * WIDTH + column[None, :]
        own = tl.load(slots + place, mask=mask, other=0.0).to(tl.float32)
        other = tl.load(product + place, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(own * other, axis=1)
        tl.store(gated + place, (own * share).to(gated.dtype.element_ty), mask=mask)
        tl.store(product + place, (other * share).to(product.dtype.element_ty), mask=mask)
    tl.store(grad_gate + slot, total, mask=live)
