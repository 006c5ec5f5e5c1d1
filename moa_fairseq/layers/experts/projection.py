"""Products with the selected experts, from width C up to D and from D down to C, and their backends."""

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.experts import every_expert, grouped, triton, validation
from moa_fairseq.layers.experts.expert_permutation import ExpertPermutation
from moa_fairseq.layers.experts.grouped import dense, expert_loop, placed_rows, sorted_rows

logger = logging.getLogger(__name__)

_GROUPED_BY = "one mm per expert"
if hasattr(F, "grouped_mm"):
    _GROUPED_BY = "torch grouped_mm where it applies"
# Plain operations take fewer calls, and are used if they keep at most so many numbers for the backward pass
_KEPT_RESULTS = 2**13
BACKENDS = ("auto", "reference", "grouped", "triton")
# The dtypes for which `auto` uses Triton's kernels, which `_auto_backend` limits to those checked here. A
# variable, because torch.compile would enter a cached function, and read the record of the checks
_checked: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in validation.DTYPES)


def resolve_backend(name: str) -> str:
    """The backend that `--expert-backend NAME` means on this machine, which is logged once, with the reason.

    Args:
        name: one of BACKENDS.

    Returns:
        The name itself, but "grouped" for "auto" if Triton's kernels may not be used.

    Raises:
        UserError: for a name that is not in BACKENDS, and for "triton" if it cannot run here.
    """
    check_choice("expert_backend", name, BACKENDS)
    if name == "triton" and triton.why_not():
        raise UserError(
            f"expert_backend triton cannot run here: {triton.why_not()}. Choose auto or grouped; for "
            """a checkpoint trained with triton: --model-overrides "{'expert_backend': 'auto'}"."""
        )
    if name == "auto":
        return _announce(name, *_auto_backend())
    return _announce(name, name, "")


@cache
def _auto_backend() -> tuple[str, str]:
    """The backend of `auto`, "auto" on a GPU on which Triton's kernels passed checks, and the reason."""
    global _checked
    if not torch.cuda.is_available():
        return "grouped", ""
    trusted: tuple[str, ...] = ()
    reason = triton.why_not()
    if not reason:
        trusted, reason = validation.verdict()
    if not trusted:
        return "grouped", f"not triton: {reason}"
    _checked = tuple(getattr(torch, name) for name in trusted)
    return "auto", f"triton for {', '.join(trusted)}: {reason}"


def backend_of_auto(dtype: torch.dtype) -> tuple[str, str]:
    """The backend that `auto` uses for K < E on this machine, and why.

    Args:
        dtype: the dtype of rows and weights, after autocast.

    Returns:
        "triton" or "grouped", and the reason, which may be "".
    """
    chosen, reason = _auto_backend()
    if chosen == "grouped":
        return chosen, reason
    if dtype not in _checked:
        return "grouped", f"not triton: not checked in {dtype}; {validation.COMMAND} does"
    return "triton", reason


@cache
def _announce(asked: str, chosen: str, reason: str) -> str:
    details = {
        "grouped": f"{_GROUPED_BY}; one dense GEMM when K = E",
        "auto": "and every expert at once for few tokens; one dense GEMM when K = E",
    }
    backend = "triton" if chosen == "auto" else chosen
    text = "; ".join(filter(None, [details.get(chosen), reason]))
    logger.info(
        f"expert backend: {backend}{f' ({text})' if text else ''} (--expert-backend {asked})"
    )
    return chosen


class Product(NamedTuple):
    """One product of tokens with the experts that a routing selected for them.

    The narrow side has the width D of the experts; the wide side has the width C of the model and a row for
    each of the N tokens. With slot s = t·K + k, its expert e(s) and its gate g(s) (1 without gates), the
    product up is

        narrow[m] = Σ_{s : s // fan = m} g(s) · (W_e(s) x[t(s)] + b_e(s))

    and the product down is

        wide[t] = Σ_{s of t} g(s) · W_e(s)ᵀ h[s // fan]

    The uses, with K experts for each token, or H heads with k experts each (K = H·k, slots head by head):

        direction  fan  gates  use
        up         1    -      MoA's queries (Eq. 10), MoH's, NAMOH's; σ-MoE's first layer
        down       1    g      their outputs (MoA Eq. 6, 12); σ-MoE's second layer
        up         k    σ      SwitchHead's values, keys and queries (Eq. 9)
        down       k    σ      SwitchHead's outputs (Eq. 10)

    No backend ever stores S rows of width C, so memory does not grow with k.
    """

    rows: Tensor  # up: [N, C]; down: [S / fan, D]
    weight: Tensor  # [E, D, C]
    bias: Tensor | None  # up: [E, D]; down: [E, C]
    gates: Tensor | None  # [S]
    order: ExpertPermutation
    is_up: bool
    fan: int


def project(
    rows: Tensor,
    weight: Tensor,
    order: ExpertPermutation,
    *,
    is_up: bool,
    gates: Tensor | None = None,
    fan: int = 1,
    bias: Tensor | None = None,
    backend: str = "grouped",
) -> Tensor:
    """Compute a `Product`, in the first way of `_WAYS` that supports it.

    Rows and weight follow autocast; the result has the dtype of the product. A row whose gates are all zero
    (padding) becomes zero.

    Args:
        rows: inputs; up: [N, C]; down: [N·K / fan, D].
        weight: the experts' matrices, [E, D, C].
        order: the experts of the N·K slots.
        is_up: whether the product leads up, from C to D.
        gates: [N, K] or [N·K]; None: all gates are 1.
        fan: the number of neighbouring slots that share a row of width D.
        bias: the experts' biases; up: [E, D]; down: [E, C]; or None.
        backend: a name that `resolve_backend` returned.

    Returns:
        The result; up: [N·K / fan, D]; down: [N, C].

    Raises:
        ValueError: for sizes that do not fit each other.
    """
    experts, dim, model_dim = weight.shape
    expected = (order.tokens, model_dim) if is_up else (order.slots // fan, dim)
    if rows.shape != expected or experts != order.num_experts or order.per_token % fan:
        raise ValueError(
            f"rows {list(rows.shape)}, weight [E, D, C] = {list(weight.shape)} and fan {fan} do not fit "
            f"{order.per_token} of {order.num_experts} experts for each of {order.tokens} tokens"
        )
    if gates is not None:
        if gates.numel() != order.slots:
            raise ValueError(f"{gates.numel()} gates for {order.slots} slots")
        gates = gates.reshape(-1)  # [N, K] → [S]
    device = rows.device.type
    # As for a matrix product, because torch does not cast for a custom Function
    if device != "meta" and torch.is_autocast_enabled(device):
        rows = rows.to(torch.get_autocast_dtype(device))
        weight = weight.to(rows.dtype)
    if bias is not None:
        bias = bias.to(rows.dtype)
    product = Product(rows, weight, bias, gates, order, is_up, fan)
    ways = _WAYS
    if order.in_order and fan == 1 and not (is_up and gates is not None):
        ways = _IN_ORDER
    key = (backend, ways is _WAYS, weight.shape, weight.dtype, rows.dtype)
    way: Way | None = order.ways.get(key)
    if way is None:  # decided once for all products of a routing
        for way in ways[backend]:  # the last way supports everything
            if not way.unsupported_reason(product):
                break
        assert way is not None
        order.ways[key] = way
    run = way.run
    if (
        way.keeps_less
        and torch.is_grad_enabled()
        and not _why_not_function(product)
        # Last, because the comparison would fix the length of an exported model
        and order.tokens * experts * dim > _KEPT_RESULTS
    ):
        run = way.keeps_less
    out = run(product)
    if bias is None or is_up or way.adds_biases:
        return out
    return _add_biases(out, product)


def _add_biases(out: Tensor, product: Product) -> Tensor:
    """Add the biases of each token's slots, by one small product [N, E] · [E, C]."""
    order = product.order
    assert product.bias is not None
    chosen = order.expert.view(order.tokens, order.per_token)
    if product.gates is None:
        gates = out.new_ones(chosen.shape)
    else:
        gates = product.gates.view(chosen.shape).to(out.dtype)
    by_expert = out.new_zeros(order.tokens, order.num_experts).scatter_add(1, chosen, gates)
    return out + by_expert @ product.bias


class Way(NamedTuple):
    """A way to compute products."""

    unsupported_reason: Callable[[Product], str]  # why this way is not for a product, or ""
    run: Callable[[Product], Tensor]
    adds_biases: bool = False  # whether `run` adds the biases of a product down, too
    # `run` with our own gradient, for larger products
    keeps_less: Callable[[Product], Tensor] | None = None


def _why_not_function(product: Product) -> str:
    """Why our autograd functions do not support a product: torch.func cannot differentiate them."""
    if not is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func knows no gradient of it"
    return ""


def _why_not_loop(product: Product) -> str:
    if is_compiling() or product.rows.is_meta:
        return "its loop asks the device for sizes"
    return _why_not_function(product)


def _why_not_grouped_mm(product: Product) -> str:
    return _why_not_function(product) or sorted_rows.unsupported_reason(
        product.rows, product.weight
    )


def _why_not_triton(product: Product) -> str:
    if not triton.takes(product.rows, product.weight):
        return "Triton's kernels are for GPUs and other dtypes"
    return _why_not_function(product)


def _why_not_auto(product: Product) -> str:
    if product.rows.dtype in _checked:
        return _why_not_triton(product)
    return f"not checked in {product.rows.dtype}"


def _by_triton(product: Product) -> Tensor:
    rows, weight, bias, gates, order, is_up, fan = product
    if is_up:
        per_row = order.per_token
        per_sum = fan
    else:
        per_row = fan
        per_sum = order.per_token
    out: Tensor = triton.project(rows, weight, bias, gates, order, (is_up, per_row, per_sum))
    return out


def _by_one_product(product: Product, uses_triton: bool = False) -> Tensor:
    if product.is_up:
        return dense.up(product.rows, product.weight, product.bias)
    return dense.down(product.rows, product.weight, product.gates, uses_triton)


_EVERY_EXPERT = Way(lambda product: "", every_expert.run)
_FEW_TOKENS = Way(
    every_expert.unsupported_reason,
    every_expert.run,
    keeps_less=lambda product: grouped.run(product, placed_rows.PlacedRows),
)
_GROUPED_MM = Way(_why_not_grouped_mm, lambda product: grouped.run(product, sorted_rows.SortedRows))
_LOOP = Way(_why_not_loop, lambda product: grouped.run(product, expert_loop.ExpertLoop))
_GROUPED_WAYS = (_FEW_TOKENS, _GROUPED_MM, _LOOP, _EVERY_EXPERT)
# The ways of each backend, the best first
_WAYS = {
    "reference": (_EVERY_EXPERT,),
    "grouped": _GROUPED_WAYS,
    "auto": (_FEW_TOKENS, Way(_why_not_auto, _by_triton, adds_biases=True), *_GROUPED_WAYS),
    "triton": (Way(_why_not_triton, _by_triton, adds_biases=True), *_GROUPED_WAYS),
}
# The ways of each backend if every token has every expert, in order: one dense product
_IN_ORDER = {
    "reference": (_EVERY_EXPERT,),
    "grouped": (Way(_why_not_function, _by_one_product), _EVERY_EXPERT),
    "auto": (
        Way(
            _why_not_function, lambda product: _by_one_product(product, not _why_not_auto(product))
        ),
        _EVERY_EXPERT,
    ),
    "triton": (
        Way(
            _why_not_function,
            lambda product: _by_one_product(product, not _why_not_triton(product)),
        ),
        _EVERY_EXPERT,
    ),
}
