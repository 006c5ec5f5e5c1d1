"""What every benchmark here shares: fair timing, the device's GEMM rate, memory, one JSON and one plot.

Machines are noisy and drift, so candidates take turns and only ratios within one run are compared.
"""

import argparse
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

import moa_fairseq
from moa_fairseq.experiments.analysis.plots import COLOURS, save
from moa_fairseq.experiments.recipes.hardware import detect_hardware
from moa_fairseq.experiments.records.provenance import provenance
from moa_fairseq.files import atomic_write
from moa_fairseq.files.utf8 import use_utf8
from moa_fairseq.layers.experts import projection

moa_fairseq.register()  # as in a training: no cuDNN attention, freed memory is kept
logging.getLogger().setLevel(logging.WARNING)  # fairseq turns everything on
matplotlib.rcParams["axes.prop_cycle"] = matplotlib.cycler(color=COLOURS)
RESULTS = Path(__file__).resolve().parent.parent / "results" / "benchmarks"
_BLOCK_SECONDS = 0.02  # shorter calls are repeated inside one reading of the clock


def arguments(
    description: str, amp: bool = False, more: Mapping[str, dict[str, Any]] = MappingProxyType({})
) -> argparse.Namespace:
    """--device, --dtype, --rounds, --miniature, --output: the same for all benchmarks.

    amp: whether --dtype amp has a meaning, float32 parameters under autocast. more: flags of one alone.
    """
    use_utf8()
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=description.replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    dtypes = ("float32", "bfloat16", "float16") + ("amp",) * amp
    parser.add_argument("--dtype", choices=dtypes, help="default: bfloat16 on GPUs, else float32")
    parser.add_argument(
        "--rounds", type=int, default=7, help="how often each candidate takes its turn"
    )
    parser.add_argument("--miniature", action="store_true", help="tiny sizes: to see that it works")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder of the JSON and the plot"
    )
    parser.set_defaults(size="large")  # of benchmarks without --size
    for flag, options in more.items():
        parser.add_argument(flag, **options)
    args = parser.parse_args()
    if args.miniature and args.output == RESULTS:
        parser.error("--miniature needs --output DIR: its numbers are not results")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: each candidate takes at least one turn")
    if args.device == "cuda" and not cuda:
        parser.error(
            "--device cuda: torch sees no GPU here; use --device cpu, or check torch and the driver"
        )
    default = "bfloat16" if args.device == "cuda" else "float32"
    args.dtype = args.dtype or default
    args.torch_dtype = torch.float32 if args.dtype == "amp" else getattr(torch, args.dtype)
    kind = [args.dtype] * (args.dtype != default) + [args.size] * (args.size != "large")
    args.stem = "-".join([args.device, *kind])
    multiplied = (
        torch.float16 if args.dtype == "amp" and args.device == "cuda" else args.torch_dtype
    )
    chosen, why = (
        projection.backend_of_auto(multiplied) if args.device == "cuda" else ("grouped", "")
    )
    args.auto = {"backend": chosen, "why": why}
    if args.device == "cuda" and chosen != "triton":
        print(f"WARNING: `auto` is {chosen} on this GPU, {why}", file=sys.stderr, flush=True)
    found = provenance()  # before the measuring, for the code may change in the meantime
    args.made_by = {
        **found,
        "versions": {**found["versions"], "platform": platform.platform(terse=True)},
    }
    torch.manual_seed(0)
    return args


def _clock(call: Callable[[], Any], repeats: int, device: str) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def take_turns(
    candidates: dict[str, Callable[[], Any]], rounds: int, device: str
) -> dict[str, float]:
    """Median seconds of each candidate's call; all are called once per round, in turn."""
    repeats = {}
    for name, call in candidates.items():
        call()
        repeats[name] = max(1, round(_BLOCK_SECONDS / max(_clock(call, 1, device), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            times[name].append(_clock(call, repeats[name], device))
    return {name: statistics.median(values) for name, values in times.items()}


@cache
def _say(text: str) -> None:
    """Once."""
    print(text, flush=True)


def replayed(step: Callable[[], Any], device: str) -> Callable[[], Any] | None:
    """step as a CUDA graph: the device's time alone; None on a CPU, or where it waits for the host."""
    if device != "cuda":
        _say("no CUDA graphs on a CPU: every time here is eager, with the host's share in it")
        return None
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(beside):
            for _ in range(3):
                step()
            # A capture that fails would leave the stream unusable
            torch.cuda.set_sync_debug_mode("error")
            step()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(beside)
        with torch.cuda.graph(graph):
            step()
    except (
        RuntimeError
    ) as error:  # of a step that waits for the host; torch has no kind of its own for it
        _say(f"eager times where there is no CUDA graph: {error}")
        return None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return graph.replay


def replay_times(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """As `take_turns`, of the calls that can be replayed."""
    graphs = {name: replayed(call, device) for name, call in calls.items()}
    return take_turns({name: graph for name, graph in graphs.items() if graph}, rounds, device)


def profile(step: Callable[[], Any], device: str) -> list[dict[str, Any]]:
    """The 25 kernels (on a CPU: operations) that take most of a step: name, count, microseconds."""
    step()
    kind = (
        torch.profiler.ProfilerActivity.CUDA
        if device == "cuda"
        else torch.profiler.ProfilerActivity.CPU
    )
    with torch.profiler.profile(activities=[kind]) as found:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = [
        {"name": event.key, "count": event.count, "microseconds": getattr(event, key)}
        for event in found.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["microseconds"])[:25]


def gemm(device: str, dtype: torch.dtype) -> "tuple[Callable[[], Any], int]":
    """One large matrix product, and its multiply-accumulates: what the device reaches at its best."""
    rows, inner, columns = (4096, 2048, 2048) if device == "cpu" else (8192, 8192, 8192)
    left = torch.randn(rows, inner, device=device, dtype=dtype)
    right = torch.randn(inner, columns, device=device, dtype=dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    return (lambda: torch.mm(left, right, out=out)), rows * inner * columns


def kept_bytes(forward: Callable[[], Any], module: torch.nn.Module) -> int:
    """Bytes that one forward pass keeps for the backward pass, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result
    return sum(storages.values())


def peak_bytes(step: Callable[[], Any], device: str) -> int:
    """The most memory that one forward and backward pass holds beyond what was held before it."""
    step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


def report(name: str, args: argparse.Namespace, results: dict[str, Any], figure: Figure) -> None:
    """Write results/benchmarks/NAME-DEVICE.json and .png; with the dtype where it is not the default."""
    hardware = detect_hardware()
    payload = {
        "benchmark": name,
        "command": " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
        "device": args.device,
        "hardware": hardware.describe()
        if args.device == "cuda"
        else detect_cpu(hardware.describe()),
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
        "rounds": args.rounds,
        "seed": 0,
        "auto": args.auto,
        **args.made_by,
        **results,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    stem = args.output / f"{name}-{args.stem}"
    with atomic_write(stem.with_suffix(".json")) as stream:
        json.dump(payload, stream, indent=1)
        stream.write("\n")
    save(figure, stem.with_suffix(".png"))
    print(f"wrote {stem}.json and {stem}.png")


def detect_cpu(described: str) -> str:
    """The CPU's name even on a machine with GPUs."""
    return (
        described if "CPU" in described else f"CPU ({platform.processor() or platform.machine()})"
    )
