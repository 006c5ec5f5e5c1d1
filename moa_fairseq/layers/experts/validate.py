"""Check every Triton kernel in every tile configuration against float64 here, and keep the outcome.

    python -m moa_fairseq.layers.experts.validate [--dtypes NAME...] [--repeats N] [--device cuda|cpu]

`--expert-backend auto` takes the Triton kernels on a GPU in the dtypes for which this has passed; the first
training there runs it in its own dtype. Each case is computed by torch in float64, by torch in its own dtype
(which shows the error to expect), and N times by the kernels: their results must be as good, and the same
each time. All cores compile a dtype's kernels first. The outcome is written as it comes: what was stopped
goes on where it was. On the CPU a few small cases run under Triton's interpreter. Exits with 1 if anything
fails.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moa_fairseq.files.utf8 import use_utf8
from moa_fairseq.layers.experts import (
    ExpertPermutation,
    compile_ahead,
    project,
    routing,
    triton,
    validation,
)

# N, C, E of each head, k, D, H, the share of tokens that all choose the first experts
Shape = tuple[int, int, int, int, int, int, float]
Inputs = tuple[dict[str, Tensor], Tensor, Tensor]  # leaves, upstream gradient, expert index

# use → whether up, the fan where a head chooses k experts, whether gated
USES: dict[str, tuple[bool, Callable[[int], int], bool]] = {
    "MoA queries": (True, lambda k: 1, False),
    "MoA outputs": (False, lambda k: 1, True),
    "SwitchHead source": (True, lambda k: k, True),
    "SwitchHead destination": (False, lambda k: k, True),
}
_SHAPES: dict[str, Shape] = {
    "one token": (1, 64, 5, 2, 32, 2, 0.0),
    "sizes of no tile": (397, 136, 7, 3, 72, 2, 0.0),
    "a layer": (2048, 512, 32, 8, 128, 1, 0.0),
    "a layer of wide experts": (1500, 512, 16, 4, 256, 1, 0.3),
    "one hot expert": (1700, 256, 16, 1, 128, 2, 1.0),
}
_SMALL: dict[str, Shape] = {
    "one token": (1, 12, 5, 2, 4, 2, 0.0),
    "sizes of no tile": (21, 19, 3, 2, 13, 2, 0.5),
}


def _configurations(sample: Tensor, tunes: bool) -> Iterator[tuple[str, dict[Any, Any]]]:
    """(label, what to force): each configuration of each tuned kernel that fits the device.

    The other kernels have their first one meanwhile, so that no time goes into timing. tunes: begin with what
    the autotuner chooses.
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


def _inputs(shape: Shape, use: str, dtype: torch.dtype, device: str) -> Inputs:
    """(leaves, upstream gradient, expert index), in float64 but rounded to `dtype`."""
    tokens, model_dim, experts, k, dim, heads, skew = shape
    g = torch.Generator().manual_seed(tokens + experts)
    scores = torch.rand(tokens, heads, experts, generator=g)
    scores[: round(skew * tokens), :, :k] += 1.0
    index = scores.topk(k, dim=-1).indices + experts * torch.arange(heads).view(1, heads, 1)
    is_up, fan, gated = USES[use]
    if is_up:
        per_row = heads * k
        per_sum = fan(k)
        in_width = model_dim
        out_width = dim
    else:
        per_row = fan(k)
        per_sum = heads * k
        in_width = dim
        out_width = model_dim
    leaves = {
        "rows": torch.randn(index.numel() // per_row, in_width, generator=g),
        "weight": torch.randn(heads * experts, dim, model_dim, generator=g) / in_width**0.5,
        "bias": torch.randn(heads * experts, out_width, generator=g),
    }
    if gated:
        leaves["gate"] = torch.rand(index.numel(), generator=g)
        leaves["gate"][::7] = 0.0  # padding
    leaves = {name: leaf.to(device, dtype).double() for name, leaf in leaves.items()}
    upstream = (
        torch.randn(index.numel() // per_sum, out_width, generator=g).to(device, dtype).double()
    )
    return leaves, upstream, index.view(tokens, heads * k).to(device)


def _run(
    shape: Shape, use: str, inputs: Inputs, dtype: torch.dtype, backend: str
) -> dict[str, Tensor]:
    leaves, upstream, index = inputs
    leaves = {name: leaf.to(dtype).requires_grad_() for name, leaf in leaves.items()}
    is_up, fan, _ = USES[use]
    out = project(
        leaves["rows"],
        leaves["weight"],
        ExpertPermutation(index, leaves["weight"].size(0)),
        is_up=is_up,
        fan=fan(shape[3]),
        gates=leaves.get("gate"),
        bias=leaves["bias"],
        backend=backend,
    )
    grads = torch.autograd.grad(out, list(leaves.values()), upstream.to(dtype))
    return {"output": out.detach()} | dict(zip(leaves, grads))


def complaints(
    fast: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]
) -> list[str]:
    """Where `fast` is more than twice as far from `exact` as `plain` is, one rounding allowed.

    Args:
        fast: the results to judge by name, in their dtype; one rounding is its eps times the largest number,
            of float32 eight.
        plain: the same by torch in that dtype, which shows the error to expect.
        exact: the same in float64.

    Returns:
        A line for each result that is wrong, or not a number.
    """
    lines = []
    for name, truth in exact.items():
        got = fast[name].double()
        error = (got - truth).abs().max().item()
        allowed = (plain[name].double() - truth).abs().max().item()
        roundings = 1
        if fast[name].dtype == torch.float32:
            roundings = 8
        allowed = (
            2 * allowed + roundings * truth.abs().max().item() * torch.finfo(fast[name].dtype).eps
        )
        if not error <= allowed:  # also true for NaN
            lines.append(f"{name} is off by {error:.1e}, {allowed:.1e} is expected")
    return lines


def _check_products(
    dtype: torch.dtype, name: str, use: str, device: str, repeats: int
) -> Iterator[tuple[str, list[str]]]:
    """(case, what is wrong with it) of each configuration."""
    from moa_fairseq.layers.experts.triton import table

    shape = (_SHAPES if device == "cuda" else _SMALL)[name]
    inputs = _inputs(shape, use, dtype, device)
    exact = _run(shape, use, inputs, torch.float64, "reference")
    plain = _run(shape, use, inputs, dtype, "reference")
    for label, forced in _configurations(inputs[0]["rows"].to(dtype), name == "a layer"):
        table.forced.update(forced)
        try:
            first = _run(shape, use, inputs, dtype, "triton")
            wrong = complaints(first, plain, exact)
            for _ in range(repeats - 1):
                repeated = _run(shape, use, inputs, dtype, "triton")
                if not all(torch.equal(first[key], repeated[key]) for key in first):
                    wrong.append("not the same each time")
                    break
        # Of whoever else uses the GPU: it says nothing about the kernels
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler or the kernel ends in is a failed check
            wrong = [f"{type(error).__name__}: {error}"]
        finally:
            table.forced.clear()
        yield f"{use}, {name}, {dtype}, {label}", wrong


def compile_case(dtype: torch.dtype, name: str, use: str, device: str) -> None:
    """Compile what `_check_products` will run, in every configuration.

    Args:
        dtype: of rows and weights.
        name: of the sizes.
        use: one of USES.
        device: "cuda" or "cpu", which have tables of sizes of their own.
    """
    from moa_fairseq.layers.experts.triton import launch, table, tuning

    shape = (_SHAPES if device == "cuda" else _SMALL)[name]
    inputs = _inputs(shape, use, dtype, device)
    sample = inputs[0]["rows"].to(dtype)
    tf32 = launch.may_use_tf32(sample)
    with table.compiling(lambda kernel, arguments: tuning.fitting(kernel.configs, sample, tf32)):
        _run(shape, use, inputs, dtype, "triton")


def _check_routing(device: str) -> Iterator[tuple[str, list[str]]]:
    """Routing and sorting, likewise."""
    sizes = [(1, 8, 5, 2), (67, 37, 33, 8), (50, 24, 4, 4)] + [(8192, 512, 32, 8)] * (
        device == "cuda"
    )
    for tokens, width, experts, per_token in sizes:
        g = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, width, generator=g).to(device)
        weight = torch.randn(experts, width, generator=g).to(device) / width**0.5
        upstream = torch.randn(tokens, per_token, generator=g).to(device)
        outcomes = []
        for dtype in (torch.float32, torch.float64):
            leaves = [leaf.to(dtype).requires_grad_() for leaf in (x, weight)]
            if dtype == torch.float32:
                kernel_outputs = routing.top_k_routing(
                    leaves[0], leaves[1], per_token, "detached", None, "triton"
                )
                if kernel_outputs is None:
                    raise RuntimeError("the routing kernel does not take float32")
                logits, _, gate, index = kernel_outputs
            else:
                logits = leaves[0] @ leaves[1].t()
                probs = logits.softmax(-1)
                gate = probs
                if index is not None:
                    gate = probs.gather(1, index)
                if index is not None:
                    gate = gate / gate.sum(1, keepdim=True).detach()
            grads = torch.autograd.grad(gate, leaves, upstream.to(dtype))
            outcomes.append({"logits": logits, "gate": gate, "x": grads[0], "weight": grads[1]})
        wrong = []
        for name, truth in outcomes[1].items():
            if not torch.allclose(outcomes[0][name].double(), truth, atol=1e-4, rtol=1e-4):
                wrong.append(f"{name} is wrong")
        if index is not None:
            orders = ExpertPermutation(index, experts), ExpertPermutation(index, experts)
            orders[0].sort_by(triton.sorted_slots)
            if not all(
                torch.equal(getattr(orders[0], n), getattr(orders[1], n))
                for n in ("order", "offsets")
            ):
                wrong.append("slots are in a wrong order")
        yield f"routing {tokens} tokens to {per_token} of {experts} experts", wrong


def _check(dtypes: list[str], device: str, repeats: int) -> validation.CheckResult:
    """Go through all cases that are not known to have passed; what is known is written after each group."""
    outcome, _ = validation.read()
    if outcome.failed:  # once more
        passed = {group: n for group, n in outcome.groups.items() if group not in outcome.failed}
        outcome = validation.CheckResult(groups=passed, refused=outcome.refused)
    shapes = _SHAPES if device == "cuda" else _SMALL

    def note(group: str, cases: Iterator[tuple[str, list[str]]]) -> None:
        checked = 0
        for case, wrong in cases:
            checked += 1
            if wrong:
                outcome.failed.setdefault(group, []).append(f"{case}: {'; '.join(wrong)}")
                print(f"FAILED {outcome.failed[group][-1]}", flush=True)
        outcome.groups[group] = checked
        validation.write(outcome)

    if "routing" not in outcome.groups:
        note("routing", _check_routing(device))
    for text in dtypes:
        dtype = getattr(torch, text)
        sample = torch.empty(1, device=device, dtype=dtype)
        if not triton.takes(sample, sample):
            print(f"{text}: the kernels do not take it here", flush=True)
            outcome.refused = sorted({*outcome.refused, text})
            validation.write(outcome)
            continue
        groups = {
            f"{text}, {n}, {use}": (dtype, n, use, device)
            for n, use in itertools.product(shapes, USES)
        }
        groups = {group: case for group, case in groups.items() if group not in outcome.groups}
        if groups and device == "cuda":
            compile_ahead.run(compile_case, list(groups.values()))
        for group, case in groups.items():
            note(group, _check_products(*case, repeats))
        if text not in outcome.dtypes:
            outcome.dtypes.append(text)
            validation.write(outcome)
        print(f"{text}: done, {sum(outcome.groups.values())} cases so far", flush=True)
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
