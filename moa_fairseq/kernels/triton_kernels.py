"""Triton code of the products of rows: kernels only, launched by `triton_launch`.

An expert owns consecutive positions of the sorted order; `order` leads from a position to its flat slot
(token t, choice k: t·K + k). Each kernel reads the rows it needs through `order` and writes its results in
flat slot order, so nothing is copied into sorted order and back. Sums run in float32.

Sizes of the weights are compile-time constants (a model has one or two pairs); the number of rows is not.
Offsets that grow with the number of rows are 64-bit, because `order` is.
"""

import triton
import triton.language as tl

from moa_fairseq.kernels import triton_tuning as tuning

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


@tuning.autotune(tuning.rows_configs, tuning.prune_rows, key=["INNER", "OUTER", "rows_per_expert", "TF32"])
@triton.jit(do_not_specialize=["num_experts", "rows_per_expert"])
def expand_kernel(
    rows,  # [N, INNER]
    weight,  # [E, OUTER, INNER]
    bias,  # [E, OUTER] or None
    out,  # [N·K, OUTER]
    order,
    offsets,
    num_experts,
    rows_per_expert,
    PER_TOKEN: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[slot] = rows[slot // K] · weight[e]ᵀ + bias[e]; a program owns BLOCK_M slots, all columns."""
    expert, block, start, end = expert_block(offsets, tl.program_id(0), num_experts, BLOCK_M, EXPERTS_POW2)
    first = start + block * BLOCK_M
    if first >= end:
        return
    position = first + tl.arange(0, BLOCK_M)
    slot = tl.load(order + position, mask=position < end, other=0)
    row = slot // PER_TOKEN
    weight += expert.to(tl.int64) * (OUTER * INNER)
    for n in range(0, OUTER, BLOCK_N):
        column = n + tl.arange(0, BLOCK_N)
        acc = _product(rows, row, weight, column, INNER, OUTER, 1, INNER, BLOCK_M, BLOCK_N, BLOCK_K, TF32)
        if bias is not None:
            column_bias = tl.load(bias + expert * OUTER + column, mask=column < OUTER, other=0.0)
            acc += column_bias.to(tl.float32)[None, :]
        tl.store(
            out + slot[:, None] * OUTER + column[None, :],
            acc.to(out.dtype.element_ty),
            mask=(position < end)[:, None] & (column < OUTER)[None, :],
        )


@tuning.autotune(tuning.rows_configs, tuning.prune_rows, key=["INNER", "OUTER", "rows_per_expert", "TF32"])
@triton.jit(do_not_specialize=["num_experts", "rows_per_expert"])
def grad_slots_kernel(
    rows,  # [N, INNER]: the gradient of the tokens
    weight,  # [E, OUTER, INNER]
    bias,  # [E, INNER] or None
    slots,  # [N·K, OUTER]
    gate,  # [N·K]
    grad_slots,  # [N·K, OUTER]
    grad_gate,  # [N·K] float32
    order,
    offsets,
    num_experts,
    rows_per_expert,
    PER_TOKEN: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """With p = rows[slot // K] · weight[e]ᵀ: grad_slots = gate·p, grad_gate = p·slots + rows·bias[e].

    A program owns all columns of its slots, so the dot products of grad_gate end where they began.
    """
    expert, block, start, end = expert_block(offsets, tl.program_id(0), num_experts, BLOCK_M, EXPERTS_POW2)
    first = start + block * BLOCK_M
    if first >= end:
        return
    position = first + tl.arange(0, BLOCK_M)
    live = position < end
    slot = tl.load(order + position, mask=live, other=0)
    row = slot // PER_TOKEN
    slot_gate = tl.load(gate + slot, mask=live, other=0.0).to(tl.float32)
    weight += expert.to(tl.int64) * (OUTER * INNER)
    gate_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for n in range(0, OUTER, BLOCK_N):
        column = n + tl.arange(0, BLOCK_N)
        acc = _product(rows, row, weight, column, INNER, OUTER, 1, INNER, BLOCK_M, BLOCK_N, BLOCK_K, TF32)
        mask = live[:, None] & (column < OUTER)[None, :]
        place = slot[:, None] * OUTER + column[None, :]
        gate_sum += tl.sum(acc * tl.load(slots + place, mask=mask, other=0.0).to(tl.float32), axis=1)
        tl.store(grad_slots + place, (acc * slot_gate[:, None]).to(grad_slots.dtype.element_ty), mask=mask)
    if bias is not None:
        for k in range(0, INNER, BLOCK_K):
            inner = k + tl.arange(0, BLOCK_K)
            row_bias = tl.load(bias + expert * INNER + inner, mask=inner < INNER, other=0.0).to(tl.float32)
            a = tl.load(
                rows + row[:, None] * INNER + inner[None, :], mask=(inner < INNER)[None, :], other=0.0
            )
            gate_sum += tl.sum(a.to(tl.float32) * row_bias[None, :], axis=1)
    tl.store(grad_gate + slot, gate_sum, mask=live)


@tuning.autotune(
    tuning.rows_configs, tuning.prune_rows, key=["INNER", "MODEL_DIM", "OUTER", "rows_per_expert", "TF32"]
)
@triton.jit(do_not_specialize=["num_experts", "rows_per_expert"])
def project_kernel(
    rows,  # [N·K, INNER]
    gate,  # [N·K] or None for ones
    weight,  # [E, INNER, MODEL_DIM]
    bias,  # [E, MODEL_DIM] or None
    out,  # [N·K, OUTER]: columns first_column … first_column + OUTER of the product
    order,
    offsets,
    first_column,
    num_experts,
    rows_per_expert,
    INNER: tl.constexpr,
    MODEL_DIM: tl.constexpr,
    OUTER: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[slot] = gate[slot] · (rows[slot] · weight[e] + bias[e]); a program owns one tile of `out`.

    Column tiles are the fastest index, so those that share rows run side by side, and consecutive row
    tiles share an expert's matrix: both come from the second-level cache.
    """
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
    column = (tl.program_id(0) % column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight += expert.to(tl.int64) * (INNER * MODEL_DIM) + first_column
    acc = _product(rows, slot, weight, column, INNER, OUTER, MODEL_DIM, 1, BLOCK_M, BLOCK_N, BLOCK_K, TF32)
    if bias is not None:
        bias += expert * MODEL_DIM + first_column
        acc += tl.load(bias + column, mask=column < OUTER, other=0.0).to(tl.float32)[None, :]
    if gate is not None:
        acc *= tl.load(gate + slot, mask=live, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + slot[:, None] * OUTER + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=live[:, None] & (column < OUTER)[None, :],
    )


@triton.jit(do_not_specialize=["num_tokens"])
def sum_slots_kernel(
    slots,  # [N·K, WIDTH]
    out,  # [N, MODEL_DIM]
    num_tokens,
    first_column,
    PER_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
    MODEL_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out[t, first_column + c] = Σ_k slots[t·K + k, c]."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (token < num_tokens)[:, None] & (column < WIDTH)[None, :]
    token = token.to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for k in range(PER_TOKEN):
        place = (token * PER_TOKEN + k) * WIDTH + column[None, :]
        acc += tl.load(slots + place, mask=mask, other=0.0).to(tl.float32)
    place = token * MODEL_DIM + first_column + column[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)
