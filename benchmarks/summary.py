"""Measurements: the part of results/benchmarks/README.md that comes from the JSON files.

    python benchmarks/summary.py

A measurement that was not made on any machine has no row.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _bench import RESULTS

from moa_fairseq.files import atomic_write
from moa_fairseq.files.utf8 import use_utf8

Found = dict[str, Any] | None
NOT_RUN = "not run"
HEADING = "## All measurements"


def _smallest_share(names: tuple[str, ...]) -> Callable[[dict[str, Any]], str]:
    def read(found: dict[str, Any]) -> str:
        shares = [
            [batch["rows"][name]["gemm_share"] for batch in found["batches"]] for name in names
        ]
        return " / ".join(_range(values) for values in shares)

    return read


def _share_over_dense(names: tuple[str, ...]) -> Callable[[dict[str, Any]], str]:
    def read(found: dict[str, Any]) -> str:
        dense = [
            batch["rows"]["fairseq dense (8 heads of 64)"]["gemm_share"]
            for batch in found["batches"]
        ]
        ours = [[batch["rows"][name]["gemm_share"] for batch in found["batches"]] for name in names]
        return " / ".join(_range([x / y for x, y in zip(values, dense)]) for values in ours)

    return read


def _ratios(key: str, names: tuple[str, ...]) -> Callable[[dict[str, Any]], str]:
    def read(found: dict[str, Any]) -> str:
        rows = [[batch["rows"][name].get(key) for batch in found["batches"]] for name in names]
        return " / ".join(NOT_RUN if None in values else _range(values) for values in rows)

    return read


def _over_dense(key: str) -> Callable[[dict[str, Any]], str]:
    def read(found: dict[str, Any]) -> str:
        return _range(
            [row[key] for batch in found["batches"] for row in batch["rows"].values() if key in row]
        )

    return read


def _range(values: list[float]) -> str:
    low = min(values)
    high = max(values)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}-{high:.2f}"


def _flatness(found: dict[str, Any]) -> str:
    rows = []
    for label, times in found["experts_sweep"].items():
        ratios = [times[experts] / times["8"] for experts in times]
        rows.append(f"{label}: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))
    return "; ".join(rows)


def _over_bmm(found: dict[str, Any]) -> str:
    points = {point["D"]: point["rows"] for point in found["sweeps"]["D"] if point["D"] >= 64}
    if not all("triton step" in rows for rows in points.values()):
        return NOT_RUN
    ratios = (
        rows["bmm step"]["seconds"] / rows["triton step"]["seconds"] for rows in points.values()
    )
    return " / ".join(f"{ratio:.2f}" for ratio in ratios)


def _over_float32(found: dict[str, Any]) -> str:
    return " / ".join(
        f"{found['speed_over_float32'][arch]:.2f}"
        for arch in ("transformer", "moa_transformer_base")
    )


def _training(found: dict[str, Any]) -> str:
    return f"{found['speed_over_dense']['moa_transformer_base']:.2f}"


def _generation(arch: str) -> Callable[[dict[str, Any]], str]:
    def read(found: dict[str, Any]) -> str:
        return " / ".join(f"{batch['speed_over_dense'][arch]:.2f}" for batch in found["batches"])

    return read


def _switchhead(found: dict[str, Any]) -> str:
    row = found["groups"]["47M"]["rows"]["SwitchHead, 2 heads, 2 of 5"]
    return f"{row['time_over_dense']:.2f} / {row['memory_over_dense']:.2f}"


_MIXED = ("8K32E128D", "8K32E256D", "16K32E256D")
_SIZES = ("8K8E128D", *_MIXED)
_PEAK = "peak of a step, gradients included ÷ dense attention of equal MACs"
_SWEEP = "time at E = 8, 16, 32, 64 ÷ time at E = 8"
# where, what, benchmark, how to read its JSON
MEASURES = (
    (
        "cpu",
        "layer, forward + backward ÷ GEMM rate, K = E (8K8E128D)",
        "attention",
        _smallest_share(("8K8E128D",)),
    ),
    ("cpu", "the same, " + " / ".join(_MIXED), "attention", _smallest_share(_MIXED)),
    (
        "cpu",
        "share of the GEMM rate ÷ that of fairseq's dense attention",
        "attention",
        _share_over_dense(_SIZES),
    ),
    *(
        (
            "cpu",
            f"time of forward + backward ÷ dense attention of equal MACs, {dtype}",
            benchmark,
            _ratios("time_over_dense", _SIZES),
        )
        for dtype, benchmark in (("float32", "attention"), ("bfloat16", "attention (bfloat16)"))
    ),
    (
        "cpu",
        "kept for the backward pass ÷ dense attention of equal MACs, bfloat16",
        "attention (bfloat16)",
        _over_dense("kept_over_dense"),
    ),
    ("cpu", f"{_PEAK}, bfloat16", "attention (bfloat16)", _over_dense("peak_over_dense")),
    ("cpu", f"{_SWEEP}, bfloat16", "attention (bfloat16)", _flatness),
    (
        "cpu",
        "training in bfloat16 (--amp) ÷ float32, base, dense / MoA",
        "training (amp)",
        _over_float32,
    ),
    (
        "cpu",
        "training tokens/s, the quickstart's MoA ÷ its dense model",
        "training (tiny)",
        lambda found: f"{found['speed_over_dense']['quickstart_moa']:.2f}",
    ),
    ("cpu", "training tokens/s, MoA base ÷ dense base", "training", _training),
    (
        "cpu",
        "generation, beam 5, MoA big ÷ dense big, 1 / 16 at a time",
        "generation",
        _generation("moa_transformer_big"),
    ),
    (
        "cpu",
        "generation, beam 5, the quickstart's MoA ÷ its dense model, 1 / 16 at a time",
        "generation (tiny)",
        _generation("quickstart_moa"),
    ),
    (
        "cpu",
        "generation, beam 5, MoA base ÷ dense base, 1 / 16 at a time",
        "generation",
        _generation("moa_transformer_base"),
    ),
    (
        "cuda",
        "layer as a CUDA graph ÷ dense attention of equal MACs, 8K8E128D / 16K32E256D / 8K32E128D",
        "attention",
        _ratios("replay_over_dense", ("8K8E128D", "16K32E256D", "8K32E128D")),
    ),
    (
        "cuda",
        "the same with the host's share (eager)",
        "attention",
        _ratios("time_over_dense", _SIZES),
    ),
    (
        "cuda",
        "Triton expert products ÷ torch.bmm, D = 64 / 128 / 256",
        "kernels",
        _over_bmm,
    ),
    ("cuda", "training tokens/s, MoA base ÷ dense base", "training", _training),
    (
        "cuda",
        "training tokens/s, MoA big (6 % fewer parameters) ÷ dense big",
        "training",
        lambda found: f"{found['speed_over_dense']['moa_transformer_big']:.2f}",
    ),
    (
        "cuda",
        "generation, MoA base ÷ dense base, 1 / 16 / 128 at a time",
        "generation",
        _generation("moa_transformer_base"),
    ),
    (
        "cuda",
        "generation, MoA big (6 % fewer parameters) ÷ dense big, 1 / 16 / 128 at a time",
        "generation",
        _generation("moa_transformer_big"),
    ),
    *(
        row
        for device in ("cpu", "cuda")
        for row in (
            (
                device,
                "kept for the backward pass ÷ dense attention of equal MACs",
                "attention",
                _over_dense("kept_over_dense"),
            ),
            (device, _PEAK, "attention", _over_dense("peak_over_dense")),
            (device, _SWEEP, "attention", _flatness),
            (
                device,
                "training time, MAE-7 base ÷ dense base, G step in every 5th epoch (the paper: about 1.2)",
                "coordinate_descent",
                lambda found: f"{found['time_over_dense']['mean, G step in every 5th epoch']:.2f}",
            ),
            (
                device,
                "update of SwitchHead 47M ÷ its dense Transformer-XL, time / peak memory "
                "(the paper, on a GPU: 0.72 / 0.65)",
                "language_models",
                _switchhead,
            ),
            (
                device,
                "auto ÷ the fastest backend's time, at most",
                "kernels",
                lambda found: f"{found['auto_over_best']:.2f}",
            ),
        )
    ),
)
_DEVICES = {"cpu": "CPU", "cuda": "GPU"}


def _load(folder: Path, benchmark: str, device: str) -> Found:
    """benchmark: its name, and in brackets the dtype or size that is not the default."""
    name, _, dtype = benchmark.removesuffix(")").partition(" (")
    path = folder / f"{name}-{device}{'-' + dtype if dtype else ''}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table() -> list[str]:
    """The measurements as Markdown lines; a folder of another machine's results has a column of its own."""
    others = sorted(path for path in RESULTS.iterdir() if path.is_dir())
    heads = ["where", "measure", "ratio", *(folder.name for folder in others)]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for device, what, benchmark, read in MEASURES:
        cells = []
        for folder in (RESULTS, *others):
            found = _load(folder, benchmark, device)
            cells.append("" if found is None else read(found))
        if set(cells) - {"", NOT_RUN}:
            lines.append(f"| {' | '.join([_DEVICES[device], what, *cells])} |")
    return lines


def document() -> str:
    """results/benchmarks/README.md: what is written by hand above the heading, and all measurements."""
    by_hand = (RESULTS / "README.md").read_text(encoding="utf-8").partition(HEADING)[0]
    pictures = [f"![{path.stem}]({path.name})" for path in sorted(Path(RESULTS).glob("*.png"))]
    text = [
        by_hand + HEADING,
        "",
        "`python benchmarks/summary.py` writes this from the JSON files here. Each ratio is that of two",
        "measurements in one run. A range covers the batch shapes, or the sizes of MoA, that the file lists.",
        f"Sizes of MoA are {' / '.join(_SIZES)} unless they are named. The last column was measured on an",
        "EPYC of family 26. Each file names its machine, command, threads, precision, versions and date.",
        "[launches.json](launches.json) counts kernels of a layer, and",
        "[decoding_step-cpu.json](decoding_step-cpu.json) Python calls of a decoding step.",
        "",
        *table(),
        "",
        *pictures,
        "",
    ]
    return "\n".join(text)


def main() -> None:
    use_utf8()
    with atomic_write(RESULTS / "README.md") as stream:
        stream.write(document())
    print(f"wrote {RESULTS / 'README.md'}")


if __name__ == "__main__":
    main()
