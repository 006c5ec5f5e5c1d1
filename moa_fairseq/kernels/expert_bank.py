"""The two functions every expert projection goes through, and the choice of what computes them."""

import logging
from functools import cache
from typing import Optional

import torch.nn.functional as F
from torch import Tensor

from moa_fairseq.errors import UserError
from moa_fairseq.kernels import dense, grouped, reference, triton_bank
from moa_fairseq.kernels.slot_order import SlotOrder
from moa_fairseq.torch_compat import autocast_dtype

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "grouped", "triton")


def resolve_backend(name: str) -> str:
    """The backend that `--expert-backend NAME` stands for on this machine; logged once.

    Raises UserError for a name that is not in BACKENDS, and for `triton` where it cannot run.
    """
    if name not in BACKENDS:
        raise UserError(f"--expert-backend {name} is unknown: choose one of {', '.join(BACKENDS)}.")
    if name == "triton" and triton_bank.why_not():
        raise UserError(
            f"--expert-backend triton cannot run here: {triton_bank.why_not()}. Choose auto or grouped; for "
            """a checkpoint that was trained with it: --model-overrides "{'expert_backend': 'auto'}"."""
        )
    return _announce(name, "grouped" if name == "auto" else name)


@cache
def _announce(asked: str, chosen: str) -> str:
    detail = "torch grouped_mm where it applies" if hasattr(F, "grouped_mm") else "one mm per expert"
    detail = f" ({detail}; one dense GEMM when K = E)" if chosen == "grouped" else ""
    logger.info(f"expert backend: {chosen}{detail} (--expert-backend {asked})")
    return chosen


def _autocast(*tensors: Tensor):
    """Under autocast, what an ordinary matmul would be given; a custom Function is not cast by itself."""
    dtype = autocast_dtype(tensors[0].device.type)
    return tensors if dtype is None else tuple(t.to(dtype) for t in tensors)


def dispatch(
    x: Tensor,
    expert_index: Tensor,
    order: Optional[SlotOrder],
    weight: Tensor,
    bias: Optional[Tensor] = None,
    backend: str = "grouped",
) -> Tensor:
    """Project every token by each of its K experts (MoA's query projection, q_t·W_i^q of Eq. 10).

    x [N, C], expert_index [N, K], weight [E, D, C], bias [E, D] → [N, K, D].
    order: the slots sorted by expert, or None when K = E and slot k is expert k; `reference` needs
    neither. Inputs follow autocast; the result has the dtype of the product.
    """
    x, weight = _autocast(x, weight)
    if backend == "triton" and order is not None and triton_bank.takes(x, weight):
        return triton_bank.dispatch(x, weight, bias, order)
    bias = None if bias is None else bias.to(weight.dtype)
    if backend == "reference":
        slots = reference.dispatch(x, expert_index, weight)
        return slots if bias is None else slots + F.embedding(expert_index, bias)
    if order is None:
        return dense.dispatch(x, weight, bias)
    return grouped.dispatch(x, weight, order, bias)


def combine(
    slots: Tensor,
    expert_index: Tensor,
    gate: Tensor,
    order: Optional[SlotOrder],
    weight: Tensor,
    bias: Optional[Tensor] = None,
    backend: str = "grouped",
) -> Tensor:
    """Project each token's K slots by their experts and add them, gate-weighted (MoA Eq. 6, 12).

    slots [N, K, D], expert_index and gate [N, K], weight [E, D, C], bias [E, C] → [N, C].
    order: as in `dispatch`. A token whose gates are all zero (padding) gets zeros.
    """
    slots, weight = _autocast(slots, weight)
    if backend == "triton" and order is not None and triton_bank.takes(slots, weight):
        return triton_bank.combine(slots, gate, weight, bias, order)
    gate = gate.to(slots.dtype)
    if backend == "reference":
        out = reference.combine(slots, expert_index, gate, weight)
    elif order is None:
        out = dense.combine(slots, gate, weight)
    else:
        out = grouped.combine(slots, gate, weight, order)
    if bias is None:
        return out
    per_expert = gate.new_zeros(gate.size(0), weight.size(0)).scatter(1, expert_index, gate)
    return out + per_expert @ bias.to(out.dtype)
