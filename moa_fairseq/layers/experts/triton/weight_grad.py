"""Triton code of the weight and bias gradients: kernels only, launched by `launch`.

Both sum over an expert's positions, which are cut into chunks. A program sums one tile over one chunk;
where the chunk is its expert's only one it writes the result, zero for an expert without rows, else a part
that `sum_chunks_kernel` adds in a fixed order: many rows on one expert still fill the machine, and the
result does not depend on timing, as it would with atomic additions.
"""

import triton
import triton.language as tl

from moa_fairseq.layers.experts.triton import tuning
from moa_fairseq.layers.experts.triton.kernels import dot, expert_block


@triton.jit
def _first_part(offsets, expert, chunk, EXPERTS_POW2: tl.constexpr):
    """Number of an expert's first part: those before it that are cut leave one for each of their chunks."""
    other = tl.arange(0, EXPERTS_POW2)
    is_before = other < expert
    start = tl.load(offsets + other - 1, mask=is_before & (other > 0), other=0)
    rows = tl.load(offsets + other, mask=is_before, other=0) - start
    return tl.sum(tl.where(rows > chunk, (rows + chunk - 1) // chunk, 0), axis=0)


@triton.jit
def _store(
    tile,
    place,
    mask,
    out,
    partial,
    offsets,
    expert,
    block,
    rows,
    chunk,
    SIZE: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
):
    """The tile as expert `expert`'s result, or as its chunk `block`'s part of it."""
    if rows <= chunk:
        tl.store(out + expert.to(tl.int64) * SIZE + place, tile.to(out.dtype.element_ty), mask=mask)
    else:
        number = _first_part(offsets, expert, chunk, EXPERTS_POW2) + block
        tl.store(partial + number.to(tl.int64) * SIZE + place, tile, mask=mask)


@tuning.autotune(
    tuning.outer_configs, tuning.prune_outer, key=["EXPERT_DIM", "MODEL_DIM", "rows_per_chunk", "TF32"]
)
@triton.jit(do_not_specialize=["num_experts", "rows_per_chunk"])
def outer_kernel(
    left,  # [S / PER_LEFT, EXPERT_DIM]
    right,  # [S / PER_RIGHT, MODEL_DIM]
    out,  # [E, EXPERT_DIM, MODEL_DIM]
    partial,  # [parts, EXPERT_DIM, MODEL_DIM] float32
    order,
    offsets,
    chunk,
    num_experts,
    rows_per_chunk,
    PER_LEFT: tl.constexpr,
    PER_RIGHT: tl.constexpr,
    EXPERT_DIM: tl.constexpr,
    MODEL_DIM: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[e] = Σ_{slots of e} left[slot // PER_LEFT]ᵀ · right[slot // PER_RIGHT]."""
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
    for r in range(first, last, BLOCK_R):
        position = r + tl.arange(0, BLOCK_R)
        live = position < last
        slot = tl.load(order + position, mask=live, other=0)
        a = tl.load(
            left + (slot // PER_LEFT)[:, None] * EXPERT_DIM + d[None, :],
            mask=live[:, None] & (d < EXPERT_DIM)[None, :],
            other=0.0,
        )
        b = tl.load(
            right + (slot // PER_RIGHT)[:, None] * MODEL_DIM + c[None, :],
            mask=live[:, None] & (c < MODEL_DIM)[None, :],
            other=0.0,
        )
        acc += dot(tl.trans(a), b, TF32)
    place = d[:, None] * MODEL_DIM + c[None, :]
    mask = (d < EXPERT_DIM)[:, None] & (c < MODEL_DIM)[None, :]
    size: tl.constexpr = EXPERT_DIM * MODEL_DIM
    _store(acc, place, mask, out, partial, offsets, expert, block, end - start, chunk, size, EXPERTS_POW2)


@triton.jit(do_not_specialize=["num_experts"])
def sum_rows_kernel(
    rows,  # [S / PER_ROW, WIDTH]
    gate,  # [S] or None for ones
    out,  # [E, WIDTH]
    partial,  # [parts, WIDTH] float32
    order,
    offsets,
    chunk,
    num_experts,
    PER_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[e] = Σ_{slots of e} gate · rows[slot // PER_ROW]: the gradient of the biases."""
    column_tiles: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
    number = tl.program_id(0) // column_tiles
    expert, block, start, end = expert_block(offsets, number, num_experts, chunk, EXPERTS_POW2)
    first = start + block * chunk
    if (block > 0) & (first >= end):
        return
    last = tl.minimum(first + chunk, end)
    column = (tl.program_id(0) % column_tiles) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for r in range(first, last, BLOCK_R):
        position = r + tl.arange(0, BLOCK_R)
        live = position < last
        slot = tl.load(order + position, mask=live, other=0)
        tile = tl.load(
            rows + (slot // PER_ROW)[:, None] * WIDTH + column[None, :],
            mask=live[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        ).to(tl.float32)
        if gate is not None:
            tile *= tl.load(gate + slot, mask=live, other=0.0).to(tl.float32)[:, None]
        acc += tile
    total = tl.sum(acc, axis=0)
    mask = column < WIDTH
    _store(total, column, mask, out, partial, offsets, expert, block, end - start, chunk, WIDTH, EXPERTS_POW2)


@triton.jit
def sum_chunks_kernel(
    partial,  # [parts, SIZE] float32
    out,  # [E, SIZE]
    offsets,
    chunk,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
):
    """out[e] = the sum of expert e's chunks, in their order; leaves experts of a single chunk alone."""
    expert = tl.program_id(1)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    if end - start <= chunk:
        return
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < SIZE
    partial += _first_part(offsets, expert, chunk, EXPERTS_POW2).to(tl.int64) * SIZE
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(0, end - start, chunk):
        acc += tl.load(partial + place, mask=mask, other=0.0)
        partial += SIZE
    tl.store(out + expert.to(tl.int64) * SIZE + place, acc.to(out.dtype.element_ty), mask=mask)
