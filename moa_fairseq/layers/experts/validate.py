"""Check every Triton kernel in every tile configuration against float64 here, and keep the outcome.

    python -m moa_fairseq.layers.experts.validate [--dtypes NAME...] [--repeats N] [--device cuda|cpu]

`--expert-backend auto` takes the Triton kernels on a GPU in the dtypes that have passed this check; the first
training on a GPU runs the check in the training's dtype. Each case is computed by torch in float64, by torch
in the case's dtype (which shows the error to expect), and N times by the kernels: their results must be as
good as torch's, and the same each time. All cores compile the kernels of a dtype first. The outcome is
written after each group of cases, so a check that was stopped goes on with the next group. On the CPU a few
small cases run under Triton's interpreter. The exit status is 1 if anything fails.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moa_fairseq.files.utf8 import use_utf8
from moa_fairseq.layers.experts import (
    ExpertPermutation,
    compile_ahead,
    project,
    triton,
    validation,
)
from moa_fairseq.layers.experts.validate_routing import check_routing


class Sizes(NamedTuple):
    """Sizes of the products in a case, with k of E experts selected for each token and head.

    Args:
        tokens: N.
        model_dim: C, the width of the model.
        experts: E, the experts of each head.
        per_head: k, the experts that a token selects in each head.
        expert_dim: D, the width of an expert.
        heads: H.
        hot_share: the share of the tokens that all select the first k experts of each head.
    """

    tokens: int
    model_dim: int
    experts: int
    per_head: int
    expert_dim: int
    heads: int
    hot_share: float = 0.0


class Use(NamedTuple):
    """How a layer uses `project`.

    Args:
        is_up: whether the product leads from C to D, instead of from D to C.
        fan: k → the argument `fan` of `project`.
        gated: whether the products are multiplied by gates.
    """

    is_up: bool
    fan: Callable[[int], int]
    gated: bool


class _Inputs(NamedTuple):
    leaves: dict[str, Tensor]  # the arguments of `project` that get a gradient
    upstream: Tensor  # the gradient of the output
    expert_ids: Tensor  # [N, H·k] int64, the selected experts


USES = {
    "MoA queries": Use(True, lambda k: 1, False),
    "MoA outputs": Use(False, lambda k: 1, True),
    "SwitchHead source": Use(True, lambda k: k, True),
    "SwitchHead destination": Use(False, lambda k: k, True),
}
_SHAPES = {
    "one token": Sizes(1, 64, 5, 2, 32, 2),
    "sizes of no tile": Sizes(397, 136, 7, 3, 72, 2),
    "a layer": Sizes(2048, 512, 32, 8, 128, 1),
    "a layer of wide experts": Sizes(1500, 512, 16, 4, 256, 1, 0.3),
    "one hot expert": Sizes(1700, 256, 16, 1, 128, 2, 1.0),
}
# For Triton's interpreter, which is slow
_SMALL = {
    "one token": Sizes(1, 12, 5, 2, 4, 2),
    "sizes of no tile": Sizes(21, 19, 3, 2, 13, 2, 0.5),
}
# In float32 the order of a sum changes more than the last rounding; in half precision the last rounding is
# larger than that, as sums are in float32.
_FLOAT32_ROUNDINGS = 8


def _shapes(device: str) -> dict[str, Sizes]:
    return _SHAPES if device == "cuda" else _SMALL


def _configurations(sample: Tensor, tunes: bool) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Every configuration that the device can run, of every kernel that is tuned.

    While a kernel's configurations are tried, the other kernels have their first one: nothing is timed.

    Args:
        sample: a tensor of the device and dtype in question.
        tunes: whether to begin with the configurations that the autotuner selects.

    Yields:
        A label, and the configuration to force for each kernel ({}: the autotuner selects).
    """
    from moa_fairseq.layers.experts.triton import kernels, launch, tuning, weight_grad

    tuned = (kernels.product_kernel, kernels.gate_kernel, weight_grad.outer_kernel)
    offered = {
        k: tuning.fitting(getattr(k, "configs", []), sample, launch.may_use_tf32(sample))
        for k in tuned
    }
    first = {kernel: configs[0] for kernel, configs in offered.items() if configs}
    if tunes or not first:
        yield "tuned", {}
    for kernel, configs in offered.items():
        for config in configs:
            yield str(config), first | {kernel: config}


def _inputs(sizes: Sizes, use: Use, dtype: torch.dtype, device: str) -> _Inputs:
    """Random inputs in float64 that `dtype` represents exactly."""
    tokens, model_dim, experts, k, dim, heads, hot_share = sizes
    g = torch.Generator().manual_seed(tokens + experts)
    scores = torch.rand(tokens, heads, experts, generator=g)
    scores[: round(hot_share * tokens), :, :k] += 1.0
    index = scores.topk(k, dim=-1).indices + experts * torch.arange(heads).view(1, heads, 1)
    slots_per_row = use.fan(k)
    slots_per_sum = heads * k
    in_width = dim
    out_width = model_dim
    if use.is_up:
        slots_per_row, slots_per_sum = slots_per_sum, slots_per_row
        in_width, out_width = out_width, in_width
    leaves = {
        "rows": torch.randn(index.numel() // slots_per_row, in_width, generator=g),
        "weight": torch.randn(heads * experts, dim, model_dim, generator=g) / in_width**0.5,
        "bias": torch.randn(heads * experts, out_width, generator=g),
    }
    if use.gated:
        leaves["gate"] = torch.rand(index.numel(), generator=g)
        leaves["gate"][::7] = 0.0  # as of padding
    leaves = {name: leaf.to(device, dtype).double() for name, leaf in leaves.items()}
    upstream = torch.randn(index.numel() // slots_per_sum, out_width, generator=g)
    upstream = upstream.to(device, dtype).double()
    return _Inputs(leaves, upstream, index.view(tokens, heads * k).to(device))


def _run(
    sizes: Sizes, use: Use, inputs: _Inputs, dtype: torch.dtype, backend: str
) -> dict[str, Tensor]:
    """The output of `project`, computed in `dtype`, and the gradients of its arguments, by name."""
    leaves = {name: leaf.to(dtype).requires_grad_() for name, leaf in inputs.leaves.items()}
    out = project(
        leaves["rows"],
        leaves["weight"],
        ExpertPermutation(inputs.expert_ids, leaves["weight"].size(0)),
        is_up=use.is_up,
        fan=use.fan(sizes.per_head),
        gates=leaves.get("gate"),
        bias=leaves["bias"],
        backend=backend,
    )
    grads = torch.autograd.grad(out, list(leaves.values()), inputs.upstream.to(dtype))
    return {"output": out.detach()} | dict(zip(leaves, grads))


def complaints(
    fast: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]
) -> list[str]:
    """The results of a kernel whose error is larger than twice torch's error and the rounding of the result.

    Args:
        fast: the results of the kernel, by name. A rounding is the eps of their dtype times the largest
            number in a result; in float32, eight of them are allowed.
        plain: the results of torch in that dtype, which show the error to expect.
        exact: the results of torch in float64.

    Returns:
        A line for each result that is wrong or not a number.
    """
    lines = []
    for name, truth in exact.items():
        dtype = fast[name].dtype
        error = (fast[name].double() - truth).abs().max().item()
        expected = (plain[name].double() - truth).abs().max().item()
        roundings = _FLOAT32_ROUNDINGS if dtype == torch.float32 else 1
        allowed = 2 * expected + roundings * truth.abs().max().item() * torch.finfo(dtype).eps
        if not error <= allowed:  # also true for NaN
            lines.append(f"{name} is off by {error:.1e}, {allowed:.1e} is expected")
    return lines


def _check_products(
    dtype: torch.dtype, name: str, use_name: str, device: str, repeats: int
) -> Iterator[tuple[str, list[str]]]:
    """Compute a product with each configuration.

    Args:
        dtype: the dtype of rows and weights.
        name: the name of the sizes.
        use_name: the name of the use, one of USES.
        device: "cuda" or "cpu".
        repeats: how often each configuration computes it.

    Yields:
        The case in words, and a line for each thing that is wrong with it.
    """
    from moa_fairseq.layers.experts.triton import table

    sizes = _shapes(device)[name]
    use = USES[use_name]
    inputs = _inputs(sizes, use, dtype, device)
    exact = _run(sizes, use, inputs, torch.float64, "reference")
    plain = _run(sizes, use, inputs, dtype, "reference")
    for label, forced in _configurations(inputs.leaves["rows"].to(dtype), name == "a layer"):
        table.forced.update(forced)
        try:
            first = _run(sizes, use, inputs, dtype, "triton")
            wrong = complaints(first, plain, exact)
            for _ in range(repeats - 1):
                repeated = _run(sizes, use, inputs, dtype, "triton")
                if not all(torch.equal(first[key], repeated[key]) for key in first):
                    wrong.append("not the same each time")
                    break
        except torch.OutOfMemoryError:  # another process fills the GPU: the kernels may be right
            raise
        except Exception as error:  # whatever the compiler or the kernel raises is a failed check
            wrong = [f"{type(error).__name__}: {error}"]
        finally:
            table.forced.clear()
        yield f"{use_name}, {name}, {dtype}, {label}", wrong


def compile_case(dtype: torch.dtype, name: str, use_name: str, device: str) -> None:
    """Compile what `_check_products` will run, in every configuration.

    Args:
        dtype: the dtype of rows and weights.
        name: the name of the sizes.
        use_name: the name of the use, one of USES.
        device: "cuda" or "cpu", each of which has its own sizes.
    """
    from moa_fairseq.layers.experts.triton import launch, table, tuning

    sizes = _shapes(device)[name]
    use = USES[use_name]
    inputs = _inputs(sizes, use, dtype, device)
    sample = inputs.leaves["rows"].to(dtype)
    tf32 = launch.may_use_tf32(sample)
    with table.compiling(lambda kernel, arguments: tuning.fitting(kernel.configs, sample, tf32)):
        _run(sizes, use, inputs, dtype, "triton")


def _passed_so_far() -> validation.CheckResult:
    """What is known of this machine; groups with a failure are forgotten, to be checked once more."""
    outcome, _ = validation.read()
    if not outcome.failed:
        return outcome
    passed = {group: n for group, n in outcome.groups.items() if group not in outcome.failed}
    return validation.CheckResult(groups=passed, refused=outcome.refused)


def _check_group(
    outcome: validation.CheckResult, group: str, cases: Iterator[tuple[str, list[str]]]
) -> None:
    """Go through the cases of a group, add their results to the outcome, and write it."""
    checked = 0
    for case, wrong in cases:
        checked += 1
        if wrong:
            outcome.failed.setdefault(group, []).append(f"{case}: {'; '.join(wrong)}")
            print(f"FAILED {outcome.failed[group][-1]}", flush=True)
    outcome.groups[group] = checked
    validation.write(outcome)


def _check_dtype(
    outcome: validation.CheckResult, dtype_name: str, device: str, repeats: int
) -> None:
    """Go through the groups of a dtype that are not in the outcome yet."""
    dtype = getattr(torch, dtype_name)
    sample = torch.empty(1, device=device, dtype=dtype)
    if not triton.takes(sample, sample):
        print(f"{dtype_name}: the kernels do not take it here", flush=True)
        outcome.refused = sorted({*outcome.refused, dtype_name})
        validation.write(outcome)
        return
    groups = {
        f"{dtype_name}, {name}, {use_name}": (dtype, name, use_name, device)
        for name, use_name in itertools.product(_shapes(device), USES)
    }
    groups = {group: case for group, case in groups.items() if group not in outcome.groups}
    if groups and device == "cuda":
        compile_ahead.run(compile_case, list(groups.values()))
    for group, case in groups.items():
        _check_group(outcome, group, _check_products(*case, repeats))
    if dtype_name not in outcome.dtypes:
        outcome.dtypes.append(dtype_name)
        validation.write(outcome)
    print(f"{dtype_name}: done, {sum(outcome.groups.values())} cases so far", flush=True)


def _check(dtypes: list[str], device: str, repeats: int) -> validation.CheckResult:
    """Go through all cases that are not known to have passed."""
    outcome = _passed_so_far()
    if "routing" not in outcome.groups:
        _check_group(outcome, "routing", check_routing(device))
    for dtype_name in dtypes:
        _check_dtype(outcome, dtype_name, device, repeats)
    return outcome


def main() -> None:
    use_utf8()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=validation.DTYPES, help="default: all (on the CPU: float32)"
    )
    parser.add_argument("--repeats", type=int, help="how often each case is computed (GPU: 20)")
    args = parser.parse_args()
    if args.device == "cpu" and not triton.INTERPRETED:  # Triton reads this when it loads
        arguments = [
            sys.executable,
            "-P",
            "-m",
            "moa_fairseq.layers.experts.validate",
            *sys.argv[1:],
        ]
        os.execve(sys.executable, arguments, os.environ | {"TRITON_INTERPRET": "1"})
    reason = triton.why_not()
    if reason:
        sys.exit(f"The Triton kernels cannot run here: {reason}.")
    dtypes = args.dtypes or (list(validation.DTYPES) if args.device == "cuda" else ["float32"])
    outcome = _check(dtypes, args.device, args.repeats or (20 if args.device == "cuda" else 1))
    checked = sum(outcome.groups.values())
    failed = sum(map(len, outcome.failed.values()))
    print(f"{checked} cases, {failed} failed, {', '.join(outcome.dtypes)}; see {validation.path()}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
