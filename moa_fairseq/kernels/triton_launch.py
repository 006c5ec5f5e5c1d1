"""Launches of the Triton kernels: output tensors, grids, and the memory that lives in between.

Everything here is sized by shapes alone. Where the experts' rows begin stays on the device: nothing waits
for it. Grids are upper bounds, and blocks beyond the last row of their expert end at once.
"""

import contextlib
from typing import Any, ContextManager, Dict, Optional, Tuple

import torch
import triton
from torch import Tensor

from moa_fairseq.kernels import triton_kernels as kernels
from moa_fairseq.kernels import triton_weight_grad as weight_grad
from moa_fairseq.kernels.triton_tuning import rows_class

_COLUMN_TILE = 128
_FREE_ELEMENTS = 8 * 2**20  # a buffer of this size is never cut: launches would cost more than it does
_SUM_TILE = (8, 128)  # tokens × columns of a program that adds slots
_CHUNK_SUM_TILE = 1024
_MIN_CHUNK, _CHUNK_UNIT = 256, 128  # rows


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _on(tensor: Tensor) -> ContextManager:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _tf32(tensor: Tensor) -> bool:
    """Whether a float32 product may use TF32: what the user allows torch's own matmuls."""
    if tensor.dtype != torch.float32 or not tensor.is_cuda:
        return False
    settings = torch.backends.cuda.matmul
    # torch ≥ 2.9 refuses to read allow_tf32 once the newer setting was used; it reflects the old one
    precision = getattr(settings, "fp32_precision", None)
    return settings.allow_tf32 if precision is None else precision == "tf32"


def _routing(order: Tensor, offsets: Tensor, sample: Tensor) -> Dict[str, Any]:
    """Arguments that every product of rows takes."""
    experts = offsets.numel()
    return {
        "order": order,
        "offsets": offsets,
        "num_experts": experts,
        "rows_per_expert": rows_class(order.numel(), experts),
        "EXPERTS_POW2": max(16, triton.next_power_of_2(experts)),
        "TF32": _tf32(sample),
    }


def expand(
    rows: Tensor, weight: Tensor, bias: Optional[Tensor], order: Tensor, offsets: Tensor, per_token: int
) -> Tensor:
    """out[t, k] = rows[t] · W_eᵀ + bias[e]: rows [N, C], weight [E, D, C], bias [E, D] → [N, K, D]."""
    rows, weight = rows.contiguous(), weight.contiguous()
    num_experts, expert_dim, model_dim = weight.shape
    out = rows.new_empty(rows.size(0), per_token, expert_dim)
    count = order.numel()
    if count == 0:
        return out
    with _on(rows):
        kernels.expand_kernel[lambda meta: (count // meta["BLOCK_M"] + num_experts,)](
            rows=rows,
            weight=weight,
            bias=None if bias is None else bias.contiguous(),
            out=out,
            PER_TOKEN=per_token,
            INNER=model_dim,
            OUTER=expert_dim,
            **_routing(order, offsets, rows),
        )
    return out


def expand_gated(
    grad: Tensor,
    slots: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    order: Tensor,
    offsets: Tensor,
) -> Tuple[Tensor, Tensor]:
    """The gradients of a combine's slots [N, K, D] and gate [N, K] (in its dtype), from grad [N, C]."""
    grad, slots, gate, weight = (t.contiguous() for t in (grad, slots, gate, weight))
    num_experts, expert_dim, model_dim = weight.shape
    count = order.numel()
    grad_slots, grad_gate = torch.empty_like(slots), torch.empty_like(gate, dtype=torch.float32)
    if count:
        with _on(grad):
            kernels.grad_slots_kernel[lambda meta: (count // meta["BLOCK_M"] + num_experts,)](
                rows=grad,
                weight=weight,
                bias=None if bias is None else bias.contiguous(),
                slots=slots,
                gate=gate,
                grad_slots=grad_slots,
                grad_gate=grad_gate,
                PER_TOKEN=slots.size(1),
                INNER=model_dim,
                OUTER=expert_dim,
                **_routing(order, offsets, grad),
            )
    return grad_slots, grad_gate.to(gate.dtype)


def columns_at_once(count: int, expert_dim: int, model_dim: int) -> int:
    """How many of the C columns `project` computes per step for `count` slots.

    All, if the buffer is small; else so many that it is no larger than the slots themselves, in whole tiles.
    """
    most = max(expert_dim, _FREE_ELEMENTS // max(1, count))
    if most >= model_dim:
        return model_dim
    return min(model_dim, _cdiv(most, _COLUMN_TILE) * _COLUMN_TILE)


def project(
    slots: Tensor,
    gate: Optional[Tensor],
    weight: Tensor,
    bias: Optional[Tensor],
    order: Tensor,
    offsets: Tensor,
) -> Tensor:
    """out[t] = Σ_k gate[t, k]·(slots[t, k] · W_e + bias[e]): slots [N, K, D], weight [E, D, C] → [N, C].

    A token's K products come from K different tiles. They are written side by side and added by a second
    kernel: deterministic, and cheaper than 32-bit atomic additions, which move twice the bytes. So that
    the N·K products of width C never exist at once, it goes through C in steps of `columns_at_once`.
    """
    slots, weight = slots.contiguous(), weight.contiguous()
    num_experts, expert_dim, model_dim = weight.shape
    tokens, per_token = slots.size(0), slots.size(1)
    count = order.numel()
    out = slots.new_empty(tokens, model_dim)
    if count == 0:
        return out.zero_()
    width = model_dim if per_token == 1 else columns_at_once(count, expert_dim, model_dim)
    buffer = out if per_token == 1 else slots.new_empty(count * width)
    arguments = dict(
        rows=slots,
        gate=None if gate is None else gate.contiguous(),
        weight=weight,
        bias=None if bias is None else bias.contiguous(),
        out=buffer,
        INNER=expert_dim,
        MODEL_DIM=model_dim,
        **_routing(order, offsets, slots),
    )
    with _on(slots):
        for first in range(0, model_dim, width):
            now = min(width, model_dim - first)
            kernels.project_kernel[
                lambda meta, now=now: (
                    (count // meta["BLOCK_M"] + num_experts) * _cdiv(now, meta["BLOCK_N"]),
                )
            ](first_column=first, OUTER=now, **arguments)
            if per_token > 1:
                _sum_slots(buffer, out, first, now, per_token)
    return out


def _sum_slots(buffer: Tensor, out: Tensor, first: int, width: int, per_token: int) -> None:
    block_t, block_c = _SUM_TILE
    kernels.sum_slots_kernel[(_cdiv(out.size(0), block_t), _cdiv(width, block_c))](
        buffer,
        out,
        num_tokens=out.size(0),
        first_column=first,
        PER_TOKEN=per_token,
        WIDTH=width,
        MODEL_DIM=out.size(1),
        BLOCK_T=block_t,
        BLOCK_C=block_c,
    )


def rows_per_chunk(count: int, num_experts: int, tiles: int, processors: int) -> int:
    """Into chunks of how many rows `outer` cuts an expert's share of `count` rows.

    Tiles of all experts fill the processors: only an expert with twice its share is cut. Else so that
    there are about two programs per processor.
    """
    if num_experts * tiles >= processors:
        rows = 2 * _cdiv(count, num_experts)
    else:
        rows = _cdiv(count * tiles, 2 * processors)
    return _cdiv(max(rows, _MIN_CHUNK), _CHUNK_UNIT) * _CHUNK_UNIT


def _processors(tensor: Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1


def outer(
    left: Tensor,
    gate: Optional[Tensor],
    right: Tensor,
    order: Tensor,
    offsets: Tensor,
    sums_of: str = "",
) -> Tuple[Tensor, Optional[Tensor]]:
    """out[e] = Σ_{slots of e} gate·left[slot]ᵀ · right[token]: left [N, K, D], right [N, C] → [E, D, C].

    Beside it, float32: the sums [E, D] of left (sums_of="left"), or [E, C] of gate·right ("right"), else
    None. An expert without slots gets zeros.
    """
    left, right = left.contiguous(), right.contiguous()
    expert_dim, model_dim = left.size(2), right.size(1)
    experts, count = offsets.numel(), order.numel()
    tiles = _cdiv(expert_dim, _COLUMN_TILE) * _cdiv(model_dim, _COLUMN_TILE)
    chunk = rows_per_chunk(count, experts, tiles, _processors(left))
    blocks = count // chunk + experts
    parts = blocks if count > chunk else 0  # an expert can have two chunks
    width = {"": 0, "left": expert_dim, "right": model_dim}[sums_of]
    out = left.new_empty(experts, expert_dim, model_dim)
    partial = left.new_empty(parts, expert_dim, model_dim, dtype=torch.float32)
    sums = left.new_empty(experts, width, dtype=torch.float32) if width else None
    partial_sums = left.new_empty(parts, width, dtype=torch.float32) if width else None

    def grid(meta: Dict[str, int]) -> Tuple[int]:
        return (blocks * _cdiv(expert_dim, meta["BLOCK_D"]) * _cdiv(model_dim, meta["BLOCK_C"]),)

    routing = _routing(order, offsets, left)
    del routing["rows_per_expert"]
    with _on(left):
        weight_grad.outer_kernel[grid](
            left=left,
            gate=None if gate is None else gate.contiguous(),
            right=right,
            out=out,
            partial=partial,
            sums=sums,
            partial_sums=partial_sums,
            chunk=chunk,
            rows_per_chunk=rows_class(min(chunk, count), 1),
            PER_TOKEN=left.size(1),
            EXPERT_DIM=expert_dim,
            MODEL_DIM=model_dim,
            SUM_RIGHT=sums_of == "right",
            **routing,
        )
        if parts:
            _sum_chunks(partial, out, offsets, chunk)
            if sums is not None and partial_sums is not None:
                _sum_chunks(partial_sums, sums, offsets, chunk)
    return out, sums


def _sum_chunks(partial: Tensor, out: Tensor, offsets: Tensor, chunk: int) -> None:
    size = out[0].numel()
    weight_grad.sum_chunks_kernel[(_cdiv(size, _CHUNK_SUM_TILE), out.size(0))](
        partial, out, offsets, chunk, SIZE=size, BLOCK=_CHUNK_SUM_TILE
    )
