"""The expert products alone: each backend against a dense GEMM of the same MACs, and `auto` against all.

    python benchmarks/kernels.py

MoA's queries and outputs with one routing decision, forward + backward and forward alone (decoding), swept
over tokens, E, K and D. 1.0 is the rate of one large GEMM on the device. "bmm" is torch.bmm of operands of
the same sizes that are sorted already and shared out evenly: what no routing could beat. On a GPU "seconds"
are those of a CUDA graph that is replayed, the device's time alone, where a call can be captured;
"eager_seconds" are those of the calls as they come, by which `auto` is compared.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _bench import arguments, gemm, replay_times, report, take_turns
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from moa_fairseq.errors import UserError
from moa_fairseq.layers.expert_linear import ExpertLinear
from moa_fairseq.layers.experts import BACKENDS, ExpertPermutation, compile_ahead, resolve_backend

C = 512
BASE = {
    "cpu": {"tokens": 2048, "E": 32, "K": 8, "D": 128},
    "cuda": {"tokens": 8192, "E": 32, "K": 8, "D": 128},
}
_OTHERS = {"E": (8, 16, 32, 64), "K": (1, 2, 4, 8, 16), "D": (32, 64, 128, 256)}
SWEEPS = {
    "cpu": {"tokens": (1, 4, 16, 64, 256, 1024, 2048, 8192), **_OTHERS},
    "cuda": {"tokens": (1, 16, 256, 2048, 8192, 32768, 65536), **_OTHERS},
}
MINIATURE = {"tokens": (1, 64), "E": (8, 32), "K": (8,), "D": (32,)}
COLOURS = {
    "auto": "#000000",
    "reference": "#999999",
    "grouped": "#0072B2",
    "triton": "#D55E00",
    "bmm": "#009E73",
}
STYLES = {"auto": {"linestyle": "--"}}
_REFERENCE_LIMIT = 4e9  # MACs; the reference does all experts, and would take most of the time


def points(args: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """(axis, point) of every sweep."""
    base = {**BASE[args.device], "tokens": 64} if args.miniature else BASE[args.device]
    for axis, values in (MINIATURE if args.miniature else SWEEPS[args.device]).items():
        for value in values:
            yield axis, {**base, axis: value}


def backends(device: str) -> "list[str]":
    """The named backends that this machine can run; auto is measured beside them."""
    usable = []
    for name in BACKENDS:
        try:
            resolve_backend(name)
        except UserError:  # says that it cannot run here
            continue
        if name != "triton" or device == "cuda":
            usable.append(name)
    return usable


def candidate(backend: str, point: dict[str, int], args: Any) -> "tuple[Callable, Callable]":
    """(forward without gradients, forward + backward) of queries and outputs."""
    tokens, experts, per_token, dim = (point[key] for key in ("tokens", "E", "K", "D"))
    generator = torch.Generator().manual_seed(1)
    index = torch.rand(tokens, experts, generator=generator).topk(per_token).indices.to(args.device)
    gates = torch.rand(tokens, per_token, generator=generator).to(args.device)
    queries = ExpertLinear(experts, C, dim, True, False, backend).to(args.device, args.torch_dtype)
    outputs = ExpertLinear(experts, dim, C, False, False, backend).to(args.device, args.torch_dtype)
    x = torch.randn(tokens, C, device=args.device, dtype=args.torch_dtype, requires_grad=True)
    upstream = torch.randn_like(x)

    def forward() -> torch.Tensor:
        order = ExpertPermutation(index, experts)  # anew: sorting is part of the price
        return outputs(queries(x, order), order, gates)

    def inference() -> torch.Tensor:
        with torch.no_grad():
            return forward()

    def step() -> None:
        for leaf in (x, queries.weight, outputs.weight):
            leaf.grad = None
        forward().backward(upstream)

    return inference, step


def compile_point(args: Any, point: dict[str, int]) -> None:
    """Triton's kernels of one point, for one of many processes."""
    from moa_fairseq.layers.experts.triton import table

    inference, step = candidate("triton", point, args)
    with table.compiling():
        inference(), step()


def sorted_already(point: dict[str, int], args: Any) -> "tuple[Callable, Callable]":
    """As `candidate`: two torch.bmm of operands that need no routing."""
    tokens, experts, per_token, dim = (point[key] for key in ("tokens", "E", "K", "D"))
    like = {"device": args.device, "dtype": args.torch_dtype}
    x = torch.randn(experts, tokens * per_token // experts, C, **like, requires_grad=True)
    queries = torch.randn(experts, C, dim, **like, requires_grad=True)
    outputs = torch.randn(experts, dim, C, **like, requires_grad=True)
    upstream = torch.randn_like(x)

    def inference() -> torch.Tensor:
        with torch.no_grad():
            return torch.bmm(torch.bmm(x, queries), outputs)

    def step() -> None:
        for leaf in (x, queries, outputs):
            leaf.grad = None
        torch.bmm(torch.bmm(x, queries), outputs).backward(upstream)

    return inference, step


def measure(point: dict[str, int], args: Any) -> dict[str, Any]:
    """Time and GEMM share of every backend at one point."""
    product, product_macs = gemm(args.device, args.torch_dtype)
    macs = 2 * point["tokens"] * point["K"] * point["D"] * C
    calls = {"gemm": product}
    for backend in backends(args.device):
        if backend == "reference" and macs * point["E"] / point["K"] > _REFERENCE_LIMIT:
            continue
        inference, step = candidate(backend, point, args)
        calls[f"{backend} forward"], calls[f"{backend} step"] = inference, step
    if point["tokens"] * point["K"] % point["E"] == 0:
        calls["bmm forward"], calls["bmm step"] = sorted_already(point, args)
    times = take_turns(calls, args.rounds, args.device)
    rate = product_macs / times.pop("gemm")
    rows = {}
    del calls["gemm"]
    replays = replay_times(calls, args.rounds, args.device)
    for name, eager in times.items():
        work = macs * (3 if name.endswith("step") else 1)
        seconds = replays.get(name, eager)
        timed = "replay" if name in replays else "eager"
        share = work / seconds / rate
        rows[name] = {
            "seconds": seconds,
            "timed": timed,
            "eager_seconds": eager,
            "gemm_share": share,
        }
    return {**point, "rows": rows, "auto_over_best": auto_over_best(times)}


def auto_over_best(times: dict[str, float]) -> dict[str, float]:
    """Time of auto ÷ time of the fastest named backend, of a forward pass and of a step."""
    result = {}
    for kind in ("forward", "step"):
        named = [
            t
            for name, t in times.items()
            if name.endswith(kind) and name[:4] not in ("auto", "bmm ")
        ]
        result[kind] = times[f"auto {kind}"] / min(named)
    return result


def draw(results: dict[str, Any], args: Any) -> Figure:
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True)
    for panel, (axis, measured) in zip(panels, results.items()):
        for backend in [*backends(args.device), "bmm"]:
            rows = [(p[axis], p["rows"].get(f"{backend} step")) for p in measured]
            rows = [(value, row["gemm_share"]) for value, row in rows if row]
            if rows:
                panel.plot(
                    *zip(*rows),
                    label=backend,
                    color=COLOURS[backend],
                    **STYLES.get(backend, {"marker": "o"}),
                )
        panel.set_xscale("log", base=2)
        panel.set_xticks([p[axis] for p in measured][:: 2 if len(measured) > 5 else 1])
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.set(xlabel=axis, ylim=(0, 1.1))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("share of the GEMM rate")
    panels[0].legend(frameon=False)
    fixed = ", ".join(f"{key} {value:,}" for key, value in BASE[args.device].items())
    figure.suptitle(
        f"Expert products, forward + backward, {args.device} {args.dtype}; else {fixed}, width {C}"
    )
    return figure


def main() -> None:
    args = arguments(__doc__)
    results: dict[str, Any] = {axis: [] for axis in SWEEPS[args.device]}
    worst = 0.0
    if "triton" in backends(args.device):
        compile_ahead.run(compile_point, [(args, point) for _, point in points(args)])
    for axis, point in points(args):
        found = measure(point, args)
        results[axis].append(found)
        worst = max(worst, *found["auto_over_best"].values())
        shares = ", ".join(f"{n} {row['gemm_share']:.2f}" for n, row in found["rows"].items())
        ratios = ", ".join(f"{kind} {value:.2f}" for kind, value in found["auto_over_best"].items())
        print(
            f"{axis}={point[axis]:<5d} share of GEMM rate: {shares}; auto ÷ best: {ratios}",
            flush=True,
        )
    print(f"auto is at most {worst:.2f} times the best backend's time")
    report(
        "kernels",
        args,
        {"width": C, "base": BASE[args.device], "sweeps": results, "auto_over_best": worst},
        draw(results, args),
    )


if __name__ == "__main__":
    main()
