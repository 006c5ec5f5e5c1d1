"""Whole-model training: target tokens per second of MoA beside fairseq's dense Transformers.

    python benchmarks/training.py                base and big
    python benchmarks/training.py --size tiny    the quickstart's models
    python benchmarks/training.py --compiled     each with and without --compile-layers

An update is forward, criterion (with the routers' losses and statistics), backward and Adam. Base is
compared with the dense base model (equal MACs), big with the dense big one (equal parameters). --dtype amp
is float32 parameters under autocast (bfloat16 on the CPU), as fairseq-train --amp has it, beside float32 in
the same run, for base alone.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from _bench import arguments, peak_bytes, report, take_turns
from _models import SIZE, batch_shape, build, criterion, pairs, training_batch
from matplotlib.figure import Figure

from moa_fairseq.plugin.patches.compiled_layers import compile_layers

_FLOAT32 = ", float32"
_COMPILED = ", compiled"
COMPILED = {"action": "store_true", "help": "each model also with its layers compiled"}


def update(
    arch: str, sample: dict[str, Any], words: Any, args: Any, amp: bool, compiled: bool = False
) -> "tuple[Callable[[], None], int]":
    """One optimiser update on the sample, and the model's parameters."""
    model = build(arch, words, args.device, args.torch_dtype).train()
    if compiled:
        compile_layers(model)
    autocast = torch.autocast(args.device, enabled=amp)
    loss_of = criterion(arch, words)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, betas=(0.9, 0.98))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = loss_of(model, sample)[0]
        loss.backward()
        optimizer.step()

    return step, sum(parameter.numel() for parameter in model.parameters())


def host_waits(step: Callable[[], None]) -> int:
    """How often an update makes the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def draw(
    rows: dict[str, Any], ratios: dict[str, float], dense: dict[str, str], args: Any
) -> Figure:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    panel = figure.subplots()
    names = list(rows)
    colours = ["#0072B2" if "moa" in name else "#999999" for name in names]
    panel.barh(names, [rows[name]["tokens_per_second"] for name in names], color=colours)
    for place, name in enumerate(names):
        if name in ratios:
            text = f" {ratios[name]:.2f} × {dense[name]}"
            panel.text(rows[name]["tokens_per_second"], place, text, va="center", fontsize=8)
    panel.set_xlim(right=1.45 * max(row["tokens_per_second"] for row in rows.values()))
    panel.invert_yaxis()
    panel.set(xlabel="target tokens per second", title=f"Training, {args.device}, {args.dtype}")
    panel.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    args = arguments(__doc__, amp=True, more={"--size": SIZE, "--compiled": COMPILED})
    words, sample = training_batch(args)
    steps = {}
    parameters = {}
    beside_of = pairs(args)
    amp = args.dtype == "amp"
    if amp:
        beside_of = dict(list(beside_of.items())[:1])
    for arch in [name for pair in beside_of.items() for name in pair]:
        steps[arch], parameters[arch] = update(arch, sample, words, args, amp)
        if amp:
            steps[f"{arch}{_FLOAT32}"], parameters[f"{arch}{_FLOAT32}"] = update(
                arch, sample, words, args, amp=False
            )
        if args.compiled:
            name = arch + _COMPILED
            steps[name], parameters[name] = update(arch, sample, words, args, amp, compiled=True)
    times = take_turns(steps, args.rounds, args.device)
    rows = {
        arch: {
            "seconds": seconds,
            "tokens_per_second": sample["ntokens"] / seconds,
            "parameters": parameters[arch],
            "peak_bytes": peak_bytes(steps[arch], args.device),
            "host_waits": host_waits(steps[arch]) if args.device == "cuda" else None,
        }
        for arch, seconds in times.items()
    }
    if args.compiled:
        beside_of = {
            **beside_of,
            **{moa + _COMPILED: of + _COMPILED for moa, of in beside_of.items()},
        }
    ratios = {arch: times[dense] / times[arch] for arch, dense in beside_of.items()}
    for arch, row in rows.items():
        beside = f"  {ratios[arch]:.2f} × {beside_of[arch]}" if arch in ratios else ""
        print(
            f"{arch:36s} {row['tokens_per_second']:9.0f} tokens/s  {row['peak_bytes'] >> 20} MiB{beside}"
        )
    batch, length = batch_shape(args)
    payload = {"batch": batch, "length": length, "rows": rows, "speed_over_dense": ratios}
    if amp:
        speedups = {
            arch: times[f"{arch}{_FLOAT32}"] / times[arch]
            for arch in times
            if f"{arch}{_FLOAT32}" in times
        }
        print(
            "amp ÷ float32:", ", ".join(f"{arch} {ratio:.2f}" for arch, ratio in speedups.items())
        )
        payload["speed_over_float32"] = speedups
    if args.compiled:
        args.stem += "-compiled"
        payload["compiled_over_eager"] = {
            arch: times[arch] / times[arch + _COMPILED]
            for arch in times
            if arch + _COMPILED in times
        }
    report("training", args, payload, draw(rows, ratios, beside_of, args))


if __name__ == "__main__":
    main()
