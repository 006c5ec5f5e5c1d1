"""The one function that every expert projection goes through, and the choice of its backend."""

import logging
from functools import cache
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.kernels import grouped, reference, triton, validation
from moa_fairseq.kernels.grouped import dense
from moa_fairseq.kernels.slot_order import Fan, SlotOrder
from moa_fairseq.torch_compat import autocast_dtype

logger = logging.getLogger(__name__)

_GROUPED_BY = "torch grouped_mm where it applies" if hasattr(F, "grouped_mm") else "one mm per expert"
BACKENDS = ("auto", "reference", "grouped", "triton")
# The dtypes in which `auto` takes Triton's kernels: those in which they passed their checks on this machine
_checked: Tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in validation.DTYPES)


def resolve_backend(name: str) -> str:
    """The backend that `--expert-backend NAME` stands for on this machine; logged once, with the reason.

    "auto" stays "auto" where Triton's kernels may be used beside the others; else it becomes "grouped".
    Raises UserError for a name that is not in BACKENDS, and for `triton` where it cannot run.
    """
    check_choice("--expert-backend", name, BACKENDS)
    if name == "triton" and triton.why_not():
        raise UserError(
            f"--expert-backend triton cannot run here: {triton.why_not()}. Choose auto or grouped; for "
            """a checkpoint that was trained with it: --model-overrides "{'expert_backend': 'auto'}"."""
        )
    chosen, reason = _automatic() if name == "auto" else (name, "")
    return _announce(name, chosen, reason)


@cache
def _automatic() -> Tuple[str, str]:
    """(backend, why) of `auto` on this machine: Triton on a GPU where its kernels passed their checks."""
    global _checked
    if not torch.cuda.is_available():
        return "grouped", ""
    reason = triton.why_not()
    if reason:
        return "grouped", f"not triton: {reason}"
    trusted, reason = validation.verdict()
    if not trusted:
        return "grouped", f"not triton: {reason}"
    _checked = tuple(getattr(torch, name) for name in trusted)
    return "auto", f"triton for {', '.join(trusted)}: {reason}"


def automatic(dtype: torch.dtype) -> Tuple[str, str]:
    """("triton" or "grouped", why): what `auto` takes for experts of K < E in a dtype on this machine."""
    chosen, reason = _automatic()
    if chosen == "auto" and dtype not in _checked:
        return "grouped", f"not triton: not checked in {dtype}; {validation.COMMAND} does"
    return "triton" if chosen == "auto" else chosen, reason


@cache
def _announce(asked: str, chosen: str, reason: str) -> str:
    details = {
        "grouped": f"{_GROUPED_BY}; one dense GEMM when K = E",
        "auto": "and every expert at once for few tokens; one dense GEMM when K = E",
    }
    named = "triton" if chosen == "auto" else chosen
    text = "; ".join(filter(None, [details.get(chosen), reason]))
    logger.info(f"expert backend: {named}{f' ({text})' if text else ''} (--expert-backend {asked})")
    return chosen


def project(
    rows: Tensor,
    order: SlotOrder,
    weight: Tensor,
    *,
    into: str,
    slots_per_row: int,
    slots_per_sum: int,
    gate: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    backend: str = "grouped",
) -> Tensor:
    """Send each row through the experts of its slots, and add up the slots, weighted by their gates.

        sums[m] = Σ_{s : s // slots_per_sum = m} gate[s] · (A_e(s) · rows[s // slots_per_row] + bias[e(s)])

    e(s) is the expert that `order` has for slot s. Into "experts", A_e is weight[e], from the model's
    width C to the experts' D; into "model" it is the transpose of weight[e], from D to C. Its uses, with K
    experts per token, or H heads with k experts each (K = H·k, slots head by head):

        into      slots_per_row  slots_per_sum  gate  use
        experts   K              1              -     MoA's queries (Eq. 10), σ-MoE's first layer
        model     1              K              yes   MoA's outputs (Eq. 6, 12), σ-MoE's second layer
        experts   H·k            k              yes   SwitchHead's values and keys (and queries)
        model     k              H·k            yes   SwitchHead's outputs

    rows [S / slots_per_row, C or D], weight [E, D, C], gate [S] or [N, K] (ones if absent), bias [E, D]
    into experts or [E, C] into the model → [S / slots_per_sum, D or C]. A sum whose gates are all zero
    (padding) is zero. No backend ever stores S rows of width C, so memory does not grow with k.
    rows and weight follow autocast; the result has the dtype of the product.
    backend: a name that `resolve_backend` returned. Only `reference` can be differentiated twice.
    Raises ValueError where the sizes do not fit each other.
    """
    if into not in ("experts", "model"):
        raise ValueError(f"into must be 'experts' or 'model', not {into!r}")
    into_experts = into == "experts"
    fan = into_experts, slots_per_row, slots_per_sum
    _check(rows, weight, gate, order, fan)
    per_wide, per_narrow = fan[1:] if into_experts else (slots_per_sum, slots_per_row)
    autocast = autocast_dtype(rows.device.type)
    if autocast is not None:  # as for an ordinary matmul: torch does not cast for a custom Function
        rows, weight = rows.to(autocast), weight.to(autocast)
    if gate is not None:
        gate = gate.reshape(-1)  # [N, K] → [S]
    is_dense = order.in_order and per_narrow == 1 and per_wide == order.num_experts
    is_dense = is_dense and (gate is None or not into_experts)
    may_use_triton = backend == "triton" or (backend == "auto" and rows.dtype in _checked)
    may_use_triton = may_use_triton and triton.takes(rows, weight)
    if may_use_triton and not is_dense:
        few = backend == "auto" and grouped.every_expert_pays(order.slots // per_wide, per_wide, weight)
        if not few:
            return triton.project(rows, weight, bias, gate, order, fan)
    if gate is not None and (not is_dense or backend == "reference"):
        gate = gate.to(rows.dtype)
    bias = None if bias is None else bias.to(rows.dtype)
    inner_bias = bias if into_experts else None
    if backend == "reference":
        out = reference.project(rows, weight, inner_bias, gate, order, fan)
    elif is_dense and into_experts:
        out = dense.into_experts(rows, weight, bias)
    elif is_dense:
        out = dense.into_model(rows, weight, gate, may_use_triton and not is_compiling())
    else:
        out = grouped.project(rows, weight, inner_bias, gate, order, fan)
    if bias is None or into_experts:
        return out
    # The biases of a sum's slots in one small product, [M, E] · [E, C].
    experts = order.expert.view(-1, slots_per_sum)
    share = out.new_ones(experts.shape) if gate is None else gate.view(experts.shape).to(out.dtype)
    return out + out.new_zeros(experts.size(0), order.num_experts).scatter_add(1, experts, share) @ bias


def _check(rows: Tensor, weight: Tensor, gate: Optional[Tensor], order: SlotOrder, fan: Fan) -> None:
    slots, (experts, dim, model_dim) = order.slots, weight.shape
    into_experts, slots_per_row, slots_per_sum = fan
    if experts != order.num_experts:
        raise ValueError(f"weights of {experts} experts, but an order of {order.num_experts}")
    if rows.size(0) * slots_per_row != slots or slots % slots_per_sum:
        raise ValueError(
            f"{rows.size(0)} rows of {slots_per_row} slots and sums of {slots_per_sum} do not fit "
            f"an order of {slots} slots"
        )
    if rows.size(1) != (model_dim if into_experts else dim):
        raise ValueError(f"rows of width {rows.size(1)}, but weights [E, D, C] = {[experts, dim, model_dim]}")
    if gate is not None and gate.numel() != slots:
        raise ValueError(f"{gate.numel()} gates for {slots} slots")
