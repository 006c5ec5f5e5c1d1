"""Triton code of the weight and bias gradients: kernels only, launched by `triton_launch.outer`."""

import triton
import triton.language as tl

from moa_fairseq.kernels import triton_tuning as tuning
from moa_fairseq.kernels.triton_kernels import dot, expert_block


@tuning.autotune(
    tuning.outer_configs, tuning.prune_outer, key=["EXPERT_DIM", "MODEL_DIM", "rows_per_chunk", "TF32"]
)
@triton.jit(do_not_specialize=["num_experts", "rows_per_chunk"])
def outer_kernel(
    left,  # [N·K, EXPERT_DIM]
    gate,  # [N·K] or None for ones
    right,  # [N, MODEL_DIM]
    out,  # [E, EXPERT_DIM, MODEL_DIM]
    partial,  # [blocks, EXPERT_DIM, MODEL_DIM] float32
    sums,  # [E, width] float32 or None
    partial_sums,  # [blocks, width] float32 or None
    order,
    offsets,
    chunk,
    num_experts,
    rows_per_chunk,
    PER_TOKEN: tl.constexpr,
    EXPERT_DIM: tl.constexpr,
    MODEL_DIM: tl.constexpr,
    SUM_RIGHT: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[e] = Σ_{slots of e} gate·left[slot]ᵀ · right[slot // K], and the bias gradient beside it.

    sums[e] = Σ left[slot] (width EXPERT_DIM), or Σ gate·right[slot // K] (SUM_RIGHT, width MODEL_DIM).
    The positions of an expert are cut into chunks. A program sums one tile over one chunk; where the
    chunk is its expert's only one it writes the result, zero for an expert without rows, else a part
    that `sum_chunks_kernel` adds in a fixed order: many rows on one expert still fill the machine, and
    the result does not depend on timing, as it would with atomic additions.
    """
    column_tiles: tl.constexpr = (MODEL_DIM + BLOCK_C - 1) // BLOCK_C
    tiles: tl.constexpr = column_tiles * ((EXPERT_DIM + BLOCK_D - 1) // BLOCK_D)
    number = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    expert, block, start, end = expert_block(offsets, number, num_experts, chunk, EXPERTS_POW2)
    first = start + block * chunk
    if (block > 0) & (first >= end):
        return
    last = tl.minimum(first + chunk, end)
    d = (tile // column_tiles) * BLOCK_D + tl.arange(0, BLOCK_D)
    c = (tile % column_tiles) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros((BLOCK_D, BLOCK_C), dtype=tl.float32)
    if SUM_RIGHT:
        total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    else:
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for r in range(first, last, BLOCK_R):
        position = r + tl.arange(0, BLOCK_R)
        live = position < last
        slot = tl.load(order + position, mask=live, other=0)
        a = tl.load(
            left + slot[:, None] * EXPERT_DIM + d[None, :],
            mask=live[:, None] & (d < EXPERT_DIM)[None, :],
            other=0.0,
        )
        b = tl.load(
            right + (slot // PER_TOKEN)[:, None] * MODEL_DIM + c[None, :],
            mask=live[:, None] & (c < MODEL_DIM)[None, :],
            other=0.0,
        )
        if gate is not None:
            slot_gate = tl.load(gate + slot, mask=live, other=0.0).to(tl.float32)[:, None]
            a = (a.to(tl.float32) * slot_gate).to(a.dtype)
        acc += dot(tl.trans(a), b, TF32)
        if sums is not None:
            if SUM_RIGHT:
                total += tl.sum(b.to(tl.float32) * slot_gate, axis=0)
            else:
                total += tl.sum(a.to(tl.float32), axis=0)

    place = d[:, None] * MODEL_DIM + c[None, :]
    mask = (d < EXPERT_DIM)[:, None] & (c < MODEL_DIM)[None, :]
    is_whole = end - start <= chunk
    if is_whole:
        out += expert.to(tl.int64) * (EXPERT_DIM * MODEL_DIM)
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)
    else:
        partial += number.to(tl.int64) * (EXPERT_DIM * MODEL_DIM)
        tl.store(partial + place, acc, mask=mask)
    if sums is not None:
        # every tile of a row (or column) of tiles has the same sums: the first one writes them
        if SUM_RIGHT:
            sum_owner = tile // column_tiles
            sum_place = c
            width: tl.constexpr = MODEL_DIM
        else:
            sum_owner = tile % column_tiles
            sum_place = d
            width: tl.constexpr = EXPERT_DIM
        if sum_owner == 0:
            if is_whole:
                tl.store(sums + expert * width + sum_place, total, mask=sum_place < width)
            else:
                tl.store(partial_sums + number * width + sum_place, total, mask=sum_place < width)


@triton.jit
def sum_chunks_kernel(
    partial,  # [blocks, SIZE] float32
    out,  # [E, SIZE]
    offsets,
    chunk,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[e] = the sum of expert e's chunks, in their order; leaves experts of a single chunk alone."""
    expert = tl.program_id(1)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    if end - start <= chunk:
        return
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < SIZE
    partial += (start // chunk + expert).to(tl.int64) * SIZE
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(0, end - start, chunk):
        acc += tl.load(partial + place, mask=mask, other=0.0)
        partial += SIZE
    tl.store(out + expert.to(tl.int64) * SIZE + place, acc.to(out.dtype.element_ty), mask=mask)
