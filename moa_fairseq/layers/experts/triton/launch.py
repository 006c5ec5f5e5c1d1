"""Launches of the Triton kernels: output tensors, grids, and the memory that lives in between.

Everything here is sized by shapes alone. Where the experts' rows begin stays on the device: nothing waits
for it. Grids are upper bounds, and blocks beyond the last row of their expert end at once.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from moa_fairseq.layers.experts.triton import kernels, weight_grad
from moa_fairseq.layers.experts.triton.table import start
from moa_fairseq.layers.experts.triton.tuning import rows_class

_COLUMN_TILE = 128
_LEAST_CACHE = 16 * 2**20  # bytes; a buffer of this size is never cut: launches would cost more than it does
_SUM_TILE = (8, 128)  # rows × columns of a program that adds slots
_ROWS_TILE = (32, 128)  # rows × columns that a program holds while it sums an expert's rows
_CHUNK_SUM_TILE = 1024
_MIN_CHUNK = 256  # rows
_CHUNK_UNIT = 128  # rows


Launcher = TypeVar("Launcher", bound=Callable[..., Any])


def on_its_device(launcher: Launcher) -> Launcher:
    """A function that launches kernels on the device of its first argument.

    torch.cuda.device would cost the host nine calls each time; it is almost always that device already.
    """

    @functools.wraps(launcher)
    def run(tensor: Tensor, *args: Any) -> Any:
        if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():
            return launcher(tensor, *args)
        with torch.cuda.device(tensor.device):
            return launcher(tensor, *args)

    return run  # type: ignore[return-value]


def may_use_tf32(tensor: Tensor) -> bool:
    """Whether a float32 product may use TF32: what the user allows torch's own matmuls."""
    if tensor.dtype != torch.float32 or not tensor.is_cuda:
        return False
    settings = torch.backends.cuda.matmul
    # torch ≥ 2.9 refuses to read allow_tf32 once the newer setting was used; it reflects the old one
    precision = getattr(settings, "fp32_precision", None)
    return bool(settings.allow_tf32 if precision is None else precision == "tf32")


@functools.cache
def experts_pow2(experts: int) -> int:
    return max(16, 1 << (experts - 1).bit_length())  # triton.next_power_of_2 takes 10 µs


def _routing(order: Tensor, offsets: Tensor) -> dict[str, Any]:
    """Arguments that every kernel with expert blocks takes."""
    experts = offsets.numel()
    pow2 = experts_pow2(experts)
    return {"order": order, "offsets": offsets, "num_experts": experts, "EXPERTS_POW2": pow2}


def _weight(weight: Tensor, rows: Tensor, order: Tensor, offsets: Tensor) -> dict[str, Any]:
    """Arguments that every kernel takes that multiplies rows by weight [E, D, C]."""
    num_experts, expert_dim, model_dim = weight.shape
    sizes = {"EXPERT_DIM": expert_dim, "MODEL_DIM": model_dim, "TF32": may_use_tf32(rows)}
    height = rows_class(order.numel(), num_experts)
    return {"weight": weight, "rows_per_expert": height, **sizes, **_routing(order, offsets)}


def columns_at_once(count: int, expert_dim: int, width: int, element_size: int, cache: int) -> int:
    """How many of `width` columns `products` computes per step for `count` slots that are to be summed.

    All, if the buffer just about fits the second-level cache, from which it is read again; else the experts'
    own width, in whole tiles, so that the buffer is no larger than the slots. There is no width in between:
    each width is tuned separately, and batches of many sizes should not tune many times.

    Args:
        count: slots, S.
        expert_dim: D.
        width: of the whole result.
        element_size: bytes of a number.
        cache: bytes of the second-level cache.
    """
    if 4 * count * width * element_size <= 5 * cache:
        return width
    return min(width, -(-expert_dim // _COLUMN_TILE) * _COLUMN_TILE)


@on_its_device
def products(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    into_experts: bool,
    per_row: int,
    per_sum: int,
) -> Tensor:
    """A `Product` without its gradients.

    The products of one sum come from different tiles. They are written side by side and added by a second
    kernel: deterministic, and cheaper than 32-bit atomic additions, which move twice the bytes. So that S
    products of width C never exist at once, it goes through C in steps of `columns_at_once`.

    Args:
        rows: [S / per_row, C or D].
        weight: [E, D, C].
        bias: [E, D or C], of the result's width, or None.
        gate: [S] or None for ones.
        order, offsets: those of `ExpertPermutation`.
        into_experts: from C to D; else from D to C.
        per_row: neighbouring slots that read one row.
        per_sum: neighbouring slots that are added up.

    Returns:
        [S / per_sum, D or C].
    """
    rows = rows.contiguous()
    weight = weight.contiguous()
    num_experts, expert_dim, model_dim = weight.shape
    count = order.numel()
    full = expert_dim if into_experts else model_dim
    out = rows.new_empty(count // per_sum, full)
    if count == 0:
        return out
    width = full
    if per_sum > 1:
        width = columns_at_once(count, expert_dim, full, rows.element_size(), _cache_bytes(rows))
    if per_sum == 1:
        buffer = out
    else:
        buffer = rows.new_empty(count * width)
    arguments = dict(
        rows=rows,
        bias=None if bias is None else bias.contiguous(),
        gate=None if gate is None else gate.contiguous(),
        out=buffer,
        PER_ROW=per_row,
        INTO_EXPERTS=into_experts,
        **_weight(weight, rows, order, offsets),
    )
    for first in range(0, full, width):
        now = min(width, full - first)

        def grid(meta: dict[str, Any], columns: int = now) -> tuple[int, ...]:
            return ((count // meta["BLOCK_M"] + num_experts) * -(-columns // meta["BLOCK_N"]),)

        start(kernels.product_kernel, grid, first_column=first, OUTER=now, **arguments)
        if per_sum > 1:
            _sum_slots(buffer, out, first, now, per_sum)
    return out


def _sum_slots(buffer: Tensor, out: Tensor, first: int, width: int, per_sum: int) -> None:
    block_t, block_c = _SUM_TILE
    kernels.sum_slots_kernel[(-(-out.size(0) // block_t), -(-width // block_c))](
        buffer,
        out,
        num_sums=out.size(0),
        first_column=first,
        PER_SUM=per_sum,
        WIDTH=width,
        FULL_WIDTH=out.size(1),
        BLOCK_T=block_t,
        BLOCK_C=block_c,
    )


@on_its_device
def gate_grads(
    wide: Tensor,
    narrow: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor,
    order: Tensor,
    offsets: Tensor,
    per_wide: int,
    per_narrow: int,
    adds_products: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the gradient of a gated product needs besides products of rows, as `gate_kernel` has it.

    Args:
        wide: [S / per_wide, C].
        narrow: [S / per_narrow, D].
        weight: [E, D, C].
        bias: [E, D] of the products of the wide rows, or None.
        gate: [S].
        order, offsets: those of `ExpertPermutation`.
        per_wide, per_narrow: neighbouring slots that share a row.
        adds_products: whether the third result is wanted.

    Returns:
        The gates' gradient [S] in their dtype; gate · narrow of each slot [S, D]; and the gated products of
        the wide rows, added for each narrow row, [S / per_narrow, D] if adds_products, else empty [0, D].
    """
    wide = wide.contiguous()
    narrow = narrow.contiguous()
    weight = weight.contiguous()
    gate = gate.contiguous()
    num_experts, expert_dim, _ = weight.shape
    count = order.numel()
    grad_gate = torch.empty_like(gate, dtype=torch.float32)
    gated = narrow.new_empty(count, expert_dim)
    product = narrow.new_empty(count if adds_products else 0, expert_dim)
    if count == 0:
        return grad_gate.to(gate.dtype), gated, product
    start(
        kernels.gate_kernel,
        lambda meta: (count // meta["BLOCK_M"] + num_experts,),
        rows=wide,
        bias=None if bias is None else bias.contiguous(),
        narrow=narrow,
        gate=gate,
        grad_gate=grad_gate,
        gated=gated,
        gated_product=product if adds_products else None,
        PER_WIDE=per_wide,
        PER_NARROW=per_narrow,
        **_weight(weight, wide, order, offsets),
    )
    if adds_products and per_narrow > 1:
        slots = product
        product = torch.empty_like(narrow)
        _sum_slots(slots, product, 0, expert_dim, per_narrow)
    return grad_gate.to(gate.dtype), gated, product


def rows_per_chunk(count: int, num_experts: int, tiles: int, processors: int) -> int:
    """How many rows a chunk has, where a sum over an expert's rows is cut into chunks.

    Where the tiles of all experts give at least every second processor a program, only an expert with more
    than four times the average share is cut. Elsewhere chunks are so small that each processor has about two
    programs.

    Args:
        count: rows of all experts.
        num_experts: E.
        tiles: of one expert's result.
        processors: multiprocessors of the GPU.

    Returns:
        A multiple of 128, at least 256.
    """
    if 2 * num_experts * tiles >= processors:
        rows = 4 * -(-count // num_experts)
    else:
        rows = -(-count * tiles // (2 * processors))
    return -(-max(rows, _MIN_CHUNK) // _CHUNK_UNIT) * _CHUNK_UNIT


@functools.cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def _processors(tensor: Tensor) -> int:
    return _properties(tensor.device).multi_processor_count if tensor.is_cuda else 1


def _cache_bytes(tensor: Tensor) -> int:
    """Size of the device's second-level cache; old torch does not know it."""
    if tensor.is_cuda:
        known = _properties(tensor.device)
    else:
        known = None
    return max(getattr(known, "L2_cache_size", 0), _LEAST_CACHE)


def _chunks(count: int, experts: int, tiles: int, sample: Tensor) -> tuple[int, int, int]:
    """(rows of a chunk, blocks to launch, parts to make room for)

    Only experts of more than one chunk leave parts: n rows are at most n / chunk + 1 of them, and less than
    2n / chunk.
    """
    chunk = rows_per_chunk(count, experts, tiles, _processors(sample))
    blocks = count // chunk + experts
    return chunk, blocks, min(blocks, 2 * count // chunk) if count > chunk else 0


@on_its_device
def outer(
    left: Tensor, right: Tensor, order: Tensor, offsets: Tensor, per_left: int, per_right: int
) -> Tensor:
    """The weights' gradient: out[e] = Σ_{slots of e} left[slot // per_left]ᵀ · right[slot // per_right].

    Args:
        left: [S / per_left, D].
        right: [S / per_right, C].
        order, offsets: those of `ExpertPermutation`.
        per_left, per_right: neighbouring slots that share a row.

    Returns:
        [E, D, C], in the dtype of left; an expert without slots gets zeros.
    """
    left = left.contiguous()
    right = right.contiguous()
    expert_dim = left.size(1)
    model_dim = right.size(1)
    experts = offsets.numel()
    count = order.numel()
    tiles = -(-expert_dim // _COLUMN_TILE) * -(-model_dim // _COLUMN_TILE)
    chunk, blocks, parts = _chunks(count, experts, tiles, left)
    out = left.new_empty(experts, expert_dim, model_dim)
    partial = left.new_empty(parts, expert_dim, model_dim, dtype=torch.float32)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (blocks * -(-expert_dim // meta["BLOCK_D"]) * -(-model_dim // meta["BLOCK_C"]),)

    start(
        weight_grad.outer_kernel,
        grid,
        left=left,
        right=right,
        out=out,
        partial=partial,
        chunk=chunk,
        rows_per_chunk=rows_class(min(chunk, count), 1),
        PER_LEFT=per_left,
        PER_RIGHT=per_right,
        EXPERT_DIM=expert_dim,
        MODEL_DIM=model_dim,
        TF32=may_use_tf32(left),
        **_routing(order, offsets),
    )
    if parts:
        _sum_chunks(partial, out, offsets, chunk)
    return out


@on_its_device
def sum_rows(rows: Tensor, gate: Tensor | None, order: Tensor, offsets: Tensor, per_row: int) -> Tensor:
    """The biases' gradient: out[e] = Σ_{slots of e} gate · rows[slot // per_row].

    Args:
        rows: [S / per_row, W].
        gate: [S] or None for ones.
        order, offsets: those of `ExpertPermutation`.
        per_row: neighbouring slots that share a row.

    Returns:
        [E, W] float32.
    """
    rows = rows.contiguous()
    width = rows.size(1)
    experts = offsets.numel()
    block_r, block_c = _ROWS_TILE
    tiles = -(-width // block_c)
    chunk, blocks, parts = _chunks(order.numel(), experts, tiles, rows)
    out = rows.new_empty(experts, width, dtype=torch.float32)
    partial = rows.new_empty(parts, width, dtype=torch.float32)
    weight_grad.sum_rows_kernel[(blocks * tiles,)](
        rows=rows,
        gate=None if gate is None else gate.contiguous(),
        out=out,
        partial=partial,
        chunk=chunk,
        PER_ROW=per_row,
        WIDTH=width,
        BLOCK_C=block_c,
        BLOCK_R=block_r,
        **_routing(order, offsets),
    )
    if parts:
        _sum_chunks(partial, out, offsets, chunk)
    return out


def _sum_chunks(partial: Tensor, out: Tensor, offsets: Tensor, chunk: int) -> None:
    size = out[0].numel()
    weight_grad.sum_chunks_kernel[(-(-size // _CHUNK_SUM_TILE), out.size(0))](
        partial,
        out,
        offsets,
        chunk,
        SIZE=size,
        BLOCK=_CHUNK_SUM_TILE,
        EXPERTS_POW2=experts_pow2(out.size(0)),
    )
