"""Triton code of the products of rows: kernels only, launched by `launch`.

An expert owns consecutive positions of the sorted order; `order` leads from a position to its flat slot,
and a slot divided by PER_ROW, the number of slots that share a row, is its row. Each kernel reads the rows
it needs that way and writes its results in flat slot order, so nothing is copied into sorted order and
back. Sums run in float32.

Two rules keep the pipelined loops (those with a `dot`) free of hazards on Hopper, where a matrix
instruction reads its operands from shared memory while the program goes on: a tile that is loaded there is
used by the dot alone (nothing is summed beside it), and it is loaded as it is (a gate is multiplied into a
result, or into a tensor that an earlier kernel writes).

Sizes of the weights are compile-time constants (a model has one or two pairs); the number of rows is not.
Offsets that grow with the number of rows are 64-bit, because `order` is.
"""

import triton
import triton.language as tl

from moa_fairseq.layers.experts.triton import tuning

# the interpreter multiplies the bit patterns of bfloat16; in float32 the products are the GPU's
_UPCASTS = tl.constexpr(tuning.INTERPRETED)


@triton.jit
def dot(a, b, TF32: tl.constexpr):
    if _UPCASTS:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, allow_tf32=TF32)


@triton.jit
def expert_block(offsets, block, num_experts, BLOCK, EXPERTS_POW2: tl.constexpr):
    """Number of a block → (expert, number within the expert, the expert's first position, its end).

    Expert e is given the numbers start // BLOCK + e … end // BLOCK + e: never fewer than the blocks it
    needs, at most one more, and the next expert's numbers begin right after. So rows // BLOCK + E blocks
    are enough for every distribution of the rows, and each finds its expert without a prefix sum.
    """
    expert_ids = tl.arange(0, EXPERTS_POW2)
    exists = expert_ids < num_experts
    ends = tl.load(offsets + expert_ids, mask=exists, other=0)
    is_before = exists & (ends // BLOCK + expert_ids + 1 <= block)
    expert = tl.sum(is_before.to(tl.int32), axis=0)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    return expert, block - start // BLOCK - expert, start, end


@triton.jit
def _product(
    rows,
    row,
    weight,
    column,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    OUTER_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TF32: tl.constexpr,
):
    """rows[row] · weight[:, column] in float32: rows [·, INNER], weight [INNER, OUTER] with these strides.

    `row` must hold valid rows even where the result is thrown away: the loads of rows have no row mask.
    """
    inner = tl.arange(0, BLOCK_K)
    row_ptr = rows + row[:, None] * INNER + inner[None, :]
    weight_ptr = weight + inner[:, None] * INNER_STRIDE + column[None, :] * OUTER_STRIDE
    column_exists = (column < OUTER)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, INNER, BLOCK_K):
        if INNER % BLOCK_K == 0:
            a = tl.load(row_ptr)
        else:
            a = tl.load(row_ptr, mask=(inner < INNER - k)[None, :], other=0.0)
        if INNER % BLOCK_K == 0 and OUTER % BLOCK_N == 0:
            b = tl.load(weight_ptr)
        else:
            b = tl.load(weight_ptr, mask=(inner < INNER - k)[:, None] & column_exists, other=0.0)
        acc += dot(a, b, TF32)
        row_ptr += BLOCK_K
        weight_ptr += BLOCK_K * INNER_STRIDE
    return acc


@tuning.autotune(
    tuning.rows_configs,
    tuning.prune_rows,
    key=["EXPERT_DIM", "MODEL_DIM", "INTO_EXPERTS", "OUTER", "rows_per_expert", "TF32"],
)
@triton.jit(do_not_specialize=["num_experts", "rows_per_expert"])
def product_kernel(
    rows,  # [S / PER_ROW, INNER]
    weight,  # [E, EXPERT_DIM, MODEL_DIM]
    bias,  # [E, the product's width] or None
    gate,  # [S] or None for ones
    out,  # [S, OUTER]: columns first_column … first_column + OUTER of the product
    order,
    offsets,
    first_column,
    num_experts,
    rows_per_expert,
    PER_ROW: tl.constexpr,
    INTO_EXPERTS: tl.constexpr,
    EXPERT_DIM: tl.constexpr,
    MODEL_DIM: tl.constexpr,
    OUTER: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[slot] = gate[slot] · (A_e · rows[slot // PER_ROW] + bias[e]); a program owns one tile of `out`.

    A_e is weight[e] into the experts (INNER = MODEL_DIM), its transpose into the model (INNER = EXPERT_DIM).
    Column tiles are the fastest index, so those that share rows run side by side, and consecutive row
    tiles share an expert's matrix: both come from the second-level cache.
    """
    if INTO_EXPERTS:
        inner: tl.constexpr = MODEL_DIM
        outer_size: tl.constexpr = EXPERT_DIM
        inner_stride: tl.constexpr = 1
        outer_stride: tl.constexpr = MODEL_DIM
    else:
        inner: tl.constexpr = EXPERT_DIM
        outer_size: tl.constexpr = MODEL_DIM
        inner_stride: tl.constexpr = MODEL_DIM
        outer_stride: tl.constexpr = 1
    column_tiles: tl.constexpr = (OUTER + BLOCK_N - 1) // BLOCK_N
    expert, block, start, end = expert_block(
        offsets, tl.program_id(0) // column_tiles, num_experts, BLOCK_M, EXPERTS_POW2
    )
    first = start + block * BLOCK_M
    if first >= end:
        return
    position = first + tl.arange(0, BLOCK_M)
    live = position < end
    slot = tl.load(order + position, mask=live, other=0)
    row = slot // PER_ROW
    column = (tl.program_id(0) % column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight += expert.to(tl.int64) * (EXPERT_DIM * MODEL_DIM) + first_column * outer_stride
    acc = _product(
        rows, row, weight, column, inner, OUTER, inner_stride, outer_stride, BLOCK_M, BLOCK_N, BLOCK_K, TF32
    )
    if bias is not None:
        bias += expert * outer_size + first_column
        acc += tl.load(bias + column, mask=column < OUTER, other=0.0).to(tl.float32)[None, :]
    if gate is not None:
        acc *= tl.load(gate + slot, mask=live, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + slot[:, None] * OUTER + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=live[:, None] & (column < OUTER)[None, :],
    )


@tuning.autotune(
    tuning.gate_configs,
    tuning.prune_rows,
    key=["EXPERT_DIM", "MODEL_DIM", "rows_per_expert", "TF32"],
)
@triton.jit(do_not_specialize=["num_experts", "rows_per_expert"])
def gate_kernel(
    rows,  # [S / PER_WIDE, MODEL_DIM]: the wide side
    weight,  # [E, EXPERT_DIM, MODEL_DIM]
    bias,  # [E, EXPERT_DIM] or None
    narrow,  # [S / PER_NARROW, EXPERT_DIM]: the narrow side
    gate,  # [S]
    grad_gate,  # [S] float32
    gated,  # [S, EXPERT_DIM]
    gated_product,  # [S, EXPERT_DIM] or None
    order,
    offsets,
    num_experts,
    rows_per_expert,
    PER_WIDE: tl.constexpr,
    PER_NARROW: tl.constexpr,
    EXPERT_DIM: tl.constexpr,
    MODEL_DIM: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What the gradient of a gated projection needs besides products of rows, in one pass over the slots.

    With p = weight[e] · rows[slot // PER_WIDE] + bias[e] and n = narrow[slot // PER_NARROW]:
    grad_gate[slot] = p · n, gated[slot] = gate · n, gated_product[slot] = gate · p.
    A program owns all columns of its slots, so the dot products of grad_gate end where they began.
    """
    expert, block, start, end = expert_block(offsets, tl.program_id(0), num_experts, BLOCK_M, EXPERTS_POW2)
    first = start + block * BLOCK_M
    if first >= end:
        return
    position = first + tl.arange(0, BLOCK_M)
    live = position < end
    slot = tl.load(order + position, mask=live, other=0)
    slot_gate = tl.load(gate + slot, mask=live, other=0.0).to(tl.float32)[:, None]
    weight += expert.to(tl.int64) * (EXPERT_DIM * MODEL_DIM)
    gate_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for n in range(0, EXPERT_DIM, BLOCK_N):
        column = n + tl.arange(0, BLOCK_N)
        acc = _product(
            rows,
            slot // PER_WIDE,
            weight,
            column,
            MODEL_DIM,
            EXPERT_DIM,
            1,
            MODEL_DIM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            TF32,
        )
        if bias is not None:
            column_bias = tl.load(bias + expert * EXPERT_DIM + column, mask=column < EXPERT_DIM, other=0.0)
            acc += column_bias.to(tl.float32)[None, :]
        mask = live[:, None] & (column < EXPERT_DIM)[None, :]
        own = (slot // PER_NARROW)[:, None] * EXPERT_DIM + column[None, :]
        own = tl.load(narrow + own, mask=mask, other=0.0).to(tl.float32)
        gate_sum += tl.sum(acc * own, axis=1)
        place = slot[:, None] * EXPERT_DIM + column[None, :]
        tl.store(gated + place, (own * slot_gate).to(gated.dtype.element_ty), mask=mask)
        if gated_product is not None:
            tl.store(gated_product + place, (acc * slot_gate).to(gated_product.dtype.element_ty), mask=mask)
    tl.store(grad_gate + slot, gate_sum, mask=live)


@triton.jit(do_not_specialize=["num_sums"])
def sum_slots_kernel(
    slots,  # [S, WIDTH]
    out,  # [S / PER_SUM, FULL_WIDTH]
    num_sums,
    first_column,
    PER_SUM: tl.constexpr,
    WIDTH: tl.constexpr,
    FULL_WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out[m, first_column + c] = Σ_j slots[m · PER_SUM + j, c]."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (row < num_sums)[:, None] & (column < WIDTH)[None, :]
    row = row.to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for j in range(PER_SUM):
        place = (row * PER_SUM + j) * WIDTH + column[None, :]
        acc += tl.load(slots + place, mask=mask, other=0.0).to(tl.float32)
    place = row * FULL_WIDTH + first_column + column[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)
