"""Where the host's time of an update or a decoding step goes, and what takes it out of the way.

    python benchmarks/host.py --output DIR                  every step; each writes DIR/host-STEP-cuda.json
    python benchmarks/host.py --steps eager graph --output DIR
    python benchmarks/host.py --device cpu --miniature --output DIR    what a CPU can try of it

eager: an update of dense and MoA models, base and big. profile: operators, launches and Python calls of an
update of the base models, and its time without autograd's own threads. layer: a step of one small encoder
layer (4 sentences of 6 tokens, width 64), eager and by Inductor, and fairseq's by torch.compile alone.
compiled: every layer by torch.compile, with dynamic shapes and whole graphs. graph: forward and backward of
one shape as a CUDA graph, of eager and of compiled layers. overhead: torch.compile's own CUDA graphs (mode
"reduce-overhead"). decode: host time, launches and Python calls of a step of beam search.

Layers are compiled as by `fairseq-train --compile-layers`. The records of an H200 are older than that flag:
they were measured at 2c0a964 with results/host/layers-compiled.diff applied.
"""

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _bench import arguments, take_turns
from _models import BATCH, MINIATURE, PAIRS, SMALL_BATCH, build, criterion, sentences, vocabulary
from generation import LENGTH, translate
from training import host_waits

from moa_fairseq.experiments.recipes.hardware import detect_hardware
from moa_fairseq.plugin.patches.compiled_layers import compile_layers

SENTENCES = 16  # that are translated at once
Call = Callable[[], Any]


class Candidate:
    """A model with its criterion and its optimiser."""

    def __init__(self, arch: str, words: Any, args: Any, compiled: bool = False, mode: str = ""):
        self.model = build(arch, words, args.device, args.torch_dtype).train()
        self.loss_of = criterion(arch, words)
        if compiled:
            compile_layers(self.model, args.backend, mode or None)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=1e-6, betas=(0.9, 0.98), fused=args.device == "cuda"
        )

    def passes(self, sample: dict[str, Any]) -> None:
        """Forward and backward."""
        self.loss_of(self.model, sample)[0].backward()

    def update(self, sample: dict[str, Any]) -> None:
        """Forward, backward and the optimiser."""
        self.optimizer.zero_grad(set_to_none=True)
        self.passes(sample)
        self.optimizer.step()


def archs(args: Any) -> list[str]:
    """Each mixture, and the dense model beside it."""
    return [name for pair in args.pairs.items() for name in pair]


def base(args: Any) -> list[str]:
    """The two models of base size."""
    return archs(args)[:2]


def wait(args: Any) -> None:
    """Wait for the device."""
    if args.device == "cuda":
        torch.cuda.synchronize()


def speed_over_dense(seconds: dict[str, float], args: Any, suffix: str = "") -> dict[str, float]:
    """Of each mixture whose time and whose dense model's time are known."""
    known = [
        moa for moa, dense in args.pairs.items() if {moa + suffix, dense + suffix} <= seconds.keys()
    ]
    return {moa: seconds[args.pairs[moa] + suffix] / seconds[moa + suffix] for moa in known}


def eager(words: Any, sample: Any, args: Any) -> dict[str, Any]:
    models = {arch: Candidate(arch, words, args) for arch in archs(args)}
    updates: dict[str, Call] = {
        arch: lambda m=model: m.update(sample) for arch, model in models.items()
    }
    passes: dict[str, Call] = {
        f"{arch}, passes": lambda m=model: m.passes(sample) for arch, model in models.items()
    }
    seconds = take_turns({**updates, **passes}, args.rounds, args.device)
    waits = (
        {arch: host_waits(call) for arch, call in updates.items()} if args.device == "cuda" else {}
    )
    return {
        "seconds": seconds,
        "speed_over_dense": speed_over_dense(seconds, args),
        "host_waits": waits,
    }


def in_one_thread(step: Call) -> None:
    """A step whose backward pass runs in the caller's thread."""
    with torch.autograd.set_multithreading_enabled(False):
        step()


def python_calls(step: Call) -> int:
    """How many Python functions a step calls, those of its backward pass included."""
    events: list[str] = []
    in_one_thread(step)
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        in_one_thread(step)
    finally:
        sys.setprofile(None)
    return events.count("call")


def operators(step: Call, args: Any) -> dict[str, Any]:
    """The 40 operators that cost the host most in a step, launches, and microseconds of the device."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if args.device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as seen:
        step()
        wait(args)
    events = seen.key_averages()
    dearest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:40]
    return {
        "operators": [
            {"name": e.key, "count": e.count, "host_us": e.self_cpu_time_total} for e in dearest
        ],
        "launches": sum(event.count for event in events if "aunch" in event.key),
        "device_us": sum(event.self_device_time_total for event in events),
    }


def profile(words: Any, sample: Any, args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for arch in base(args):
        model = Candidate(arch, words, args)

        def step(model: Candidate = model) -> None:
            model.passes(sample)

        step()
        found[arch] = operators(step, args)
        found[arch]["python_calls"] = python_calls(step)
        times: dict[str, Call] = {
            "threads": step,
            "one thread": lambda step=step: in_one_thread(step),
        }
        found[arch]["seconds"] = take_turns(times, args.rounds, args.device)
    return found


def compiled(words: Any, sample: Any, args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"compile_seconds": {}, "graphs": {}, "graphs_ten_shapes": {}}
    counters = torch._dynamo.utils.counters
    calls: dict[str, Call] = {}
    models: dict[str, Candidate] = {}
    for arch in archs(args):
        counters.clear()
        begin = time.perf_counter()
        model = Candidate(arch, words, args, compiled=True)
        try:
            for _ in range(2):
                model.update(sample)
            wait(args)
        except Exception:  # is a result, with its text
            found[f"{arch} failed"] = traceback.format_exc(limit=-4)
            continue
        found["compile_seconds"][arch] = time.perf_counter() - begin
        found["graphs"][arch] = counters["stats"]["unique_graphs"]
        models[arch] = model
        plain = Candidate(arch, words, args)
        calls[f"{arch}, compiled"] = lambda m=model: m.update(sample)
        calls[f"{arch}, compiled, passes"] = lambda m=model: m.passes(sample)
        calls[arch] = lambda m=plain: m.update(sample)
    found["seconds"] = seconds = take_turns(calls, args.rounds, args.device)
    found["both_eager"] = speed_over_dense(seconds, args)
    found["both_compiled"] = speed_over_dense(seconds, args, ", compiled")
    for arch, model in models.items():
        counters.clear()
        for batch, length in args.shapes[:10]:
            model.passes(sentences(batch, length, words, args.device))
        breaks = dict(counters["graph_break"])
        found["graphs_ten_shapes"][arch] = {
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": breaks,
        }
    return found


def layer(words: Any, sample: Any, args: Any) -> dict[str, Any]:
    widths = {"embed-dim": "64", "ffn-embed-dim": "256", "attention-heads": "8", "layers": "1"}
    sizes = [
        f"--{side}-{name}={width}"
        for side in ("encoder", "decoder")
        for name, width in widths.items()
    ]
    experts = ["--num-experts=8", "--experts-per-token=8", "--expert-dim=8"]
    calls: dict[str, Call] = {}
    moa, dense = base(args)
    for arch, way in [
        (moa, ""),
        (moa, ", compiled"),
        (dense, ""),
        (dense, ", compiled"),
        (dense, ", torch.compile alone"),
    ]:
        flags = sizes + experts if arch == moa else sizes
        model = build(arch, words, args.device, args.torch_dtype, *flags).train()
        run = model.encoder.layers[0]
        if way == ", compiled":
            compile_layers(model)
        elif way:
            # What torch makes of fairseq's layer without this package
            run = torch.compile(run, dynamic=True)
        x = torch.randn(6, 4, 64, device=args.device, dtype=args.torch_dtype, requires_grad=True)

        def step(run: Any = run, x: torch.Tensor = x) -> None:
            run(x, encoder_padding_mask=None).sum().backward()

        calls[arch + way] = step
    seconds = take_turns(calls, 10 * args.rounds, args.device)
    return {
        "seconds": seconds,
        "compiled_over_eager_dense": seconds[f"{moa}, compiled"] / seconds[dense],
        "compiled_over_compiled_dense": seconds[f"{moa}, compiled"] / seconds[f"{dense}, compiled"],
        "torch_compile_alone_over_eager_dense": seconds[f"{dense}, torch.compile alone"]
        / seconds[dense],
    }


def with_answers(answers: list[bool], call: Call, recorded: bool) -> None:
    """What the host asks the device in a call: taken from `answers` where recorded, else added to them."""
    plain = torch.Tensor.__bool__
    left = list(answers)

    def ask(tensor: torch.Tensor) -> bool:
        if recorded:
            return left.pop(0)
        answers.append(plain(tensor))
        return answers[-1]

    torch.Tensor.__bool__ = ask  # type: ignore[method-assign]
    try:
        call()
    finally:
        torch.Tensor.__bool__ = plain  # type: ignore[method-assign]


def capture(model: Candidate, sample: Any) -> torch.cuda.CUDAGraph:
    """Forward and backward of a sample as one CUDA graph; it writes the same gradients at each replay."""
    answers: list[bool] = []
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            model.optimizer.zero_grad(set_to_none=True)
            model.passes(sample)
        with_answers(answers, lambda: model.passes(sample), recorded=False)
    torch.cuda.current_stream().wait_stream(beside)
    model.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()

    def inside() -> None:
        with torch.cuda.graph(graph):
            model.passes(sample)

    with_answers(answers, inside, recorded=True)
    return graph


def graph(words: Any, sample: Any, args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"captured": {}}
    calls: dict[str, Call] = {}
    for arch in archs(args):
        for kind in ("eager", "compiled"):
            name = f"{arch}, {kind}, graph"
            try:
                model = Candidate(arch, words, args, compiled=kind == "compiled")
                begin = time.perf_counter()
                captured = capture(model, sample)
                torch.cuda.synchronize()
            except Exception:  # is a result, with its text
                found["captured"][name] = "failed: " + traceback.format_exc(limit=-4)
                continue
            found["captured"][name] = time.perf_counter() - begin

            def update(captured: torch.cuda.CUDAGraph = captured, model: Candidate = model) -> None:
                captured.replay()
                model.optimizer.step()

            calls[name] = update
            calls[f"{name}, passes"] = captured.replay
    found["seconds"] = seconds = take_turns(calls, args.rounds, args.device)
    for kind in ("eager", "compiled"):
        found[f"both_graphed_{kind}"] = speed_over_dense(seconds, args, f", {kind}, graph")
    return found


def overhead(words: Any, sample: Any, args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for arch in base(args):
        begin = time.perf_counter()

        def step(model: Candidate) -> None:
            torch.compiler.cudagraph_mark_step_begin()
            model.update(sample)

        try:
            model = Candidate(arch, words, args, compiled=True, mode="reduce-overhead")
            for _ in range(4):
                step(model)
            wait(args)
        except Exception:  # is a result, with its text
            found[arch] = {"failed": traceback.format_exc(limit=-4)}
            continue
        found[arch] = {"first_seconds": time.perf_counter() - begin}
        call: dict[str, Call] = {"update": lambda m=model: step(m)}
        found[arch]["seconds"] = take_turns(call, args.rounds, args.device)["update"]
    return found


def decode(words: Any, sample: Any, args: Any) -> dict[str, Any]:
    mae = "mae_transformer_tiny" if args.miniature else "mae_transformer_base"
    found: dict[str, Any] = {}
    calls: dict[str, Call] = {}
    for arch in [*archs(args), mae]:
        model = build(arch, words, args.device, args.torch_dtype).eval()
        calls[arch] = translate(model, words, SENTENCES, args)
        calls[arch]()
        found[arch] = operators(calls[arch], args)
        for count in ("launches", "device_us"):
            found[arch][f"{count}_per_step"] = found[arch].pop(count) / LENGTH
        found[arch]["python_calls_per_step"] = python_calls(calls[arch]) / LENGTH
    seconds = take_turns(calls, max(2, args.rounds // 2), args.device)
    for arch, value in seconds.items():
        found[arch]["seconds_per_step"] = value / LENGTH
    found["speed_over_dense"] = speed_over_dense(seconds, args)
    return found


STEPS = {step.__name__: step for step in (eager, profile, layer, compiled, graph, overhead, decode)}
ON_A_GPU = ("graph", "overhead")


def main() -> None:
    choice = {"nargs": "+", "choices": list(STEPS), "default": list(STEPS)}
    args = arguments(__doc__, more={"--steps": choice})
    args.pairs = MINIATURE if args.miniature else PAIRS
    args.backend = "inductor" if args.device == "cuda" else "aot_eager"
    batch, length = SMALL_BATCH if args.miniature else BATCH[args.device]
    # shapes of as many tokens
    args.shapes = [(max(2, batch * length // t), t) for t in range(8, 136, 8)]
    words = vocabulary(args)
    sample = sentences(batch, length, words, args.device)
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.steps:
        if args.device == "cpu" and name in ON_A_GPU:
            print(f"{name}: a CPU has no CUDA graphs")
            continue
        begin = time.perf_counter()
        payload = {
            "benchmark": "host",
            "step": name,
            "hardware": detect_hardware().describe(),
            "dtype": args.dtype,
            "rounds": args.rounds,
            "auto": args.auto,
            **args.made_by,
            **STEPS[name](words, sample, args),
            "step_seconds": time.perf_counter() - begin,
        }
        path: Path = args.output / f"host-{name}-{args.device}.json"
        path.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path} after {payload['step_seconds']:.0f} s", flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
