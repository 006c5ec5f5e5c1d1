"""Pictures and numbers of a trained model.

  moa-fairseq analyze learning-curve runs/A runs/B --output curves.png
  moa-fairseq analyze expert-load runs/B --output load.png
  moa-fairseq analyze expert-load runs/B/average.pt --data data-bin/X --output load.png --json load.json

A run folder stands for its averaged (else its best) checkpoint and for the data it was trained on.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from moa_fairseq.analysis.training_log import METRICS, read_learning_curve
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write
from moa_fairseq.recipes.run_folder import RunState


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq analyze`."""
    kinds = parser.add_subparsers(dest="analysis", required=True, metavar="{learning-curve,expert-load}")
    curve = kinds.add_parser("learning-curve", help="training and validation curves of several runs")
    curve.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run folders, or JSON logs")
    curve.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    curve.add_argument("--metric", choices=sorted(METRICS), default="ppl", help="what to draw (ppl)")
    curve.set_defaults(analyze=learning_curve)
    load = kinds.add_parser("expert-load", help="how evenly a model uses its experts (MoA Figs. 3 and 4)")
    load.add_argument("model", type=Path, metavar="RUN_DIR|CHECKPOINT")
    load.add_argument("--data", type=Path, metavar="DATA_BIN", help="binarised data folder (the run's)")
    load.add_argument("--subset", default="valid", help="which part of the data to run (valid)")
    load.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    load.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, too")
    load.add_argument("--max-tokens", type=int, default=4096, metavar="N", help="tokens in a batch (4096)")
    load.add_argument("--cpu", action="store_true", help="do not use a GPU")
    load.set_defaults(analyze=expert_load)


def run(args: argparse.Namespace) -> int:
    """Run the analysis that was asked for."""
    if args.output.suffix.lower() != ".png":
        raise UserError(f"--output {args.output}: the picture is a PNG, so its name must end in .png.")
    # One of fairseq's modules switches the root logger to DEBUG on import: matplotlib would list every font.
    for library in ("matplotlib", "fairseq"):
        logging.getLogger(library).setLevel(logging.WARNING)
    return args.analyze(args)


def learning_curve(args: argparse.Namespace) -> int:
    """Draw the curves of all runs."""
    from moa_fairseq.analysis.plots import draw_learning_curves, save

    curves = [read_learning_curve(path, args.metric) for path in args.runs]
    save(draw_learning_curves(curves, args.metric), args.output)
    for curve in curves:
        if curve.valid:
            best = min(curve.valid, key=lambda point: point.value)
            print(f"{curve.name}: best valid {args.metric} {best.value:g} after {best.updates:,} updates")
    print(f"wrote {args.output}")
    return 0


def expert_load(args: argparse.Namespace) -> int:
    """Run a data set through a model; draw and print where its tokens went."""
    from moa_fairseq.analysis.expert_load import measure_expert_load
    from moa_fairseq.analysis.plots import draw_expert_load, save

    warnings.filterwarnings("ignore", message=".*pin_memory")
    if args.max_tokens < 1:
        raise UserError(f"--max-tokens {args.max_tokens}: a batch holds at least one token.")
    checkpoint, data = _checkpoint_and_data(args.model, args.data)
    loads = measure_expert_load(checkpoint, data, args.subset, args.max_tokens, args.cpu)
    summaries = [load.summary() for load in loads]
    if args.json:
        with atomic_write(args.json) as stream:
            report = {"checkpoint": str(checkpoint), "subset": args.subset, "modules": summaries}
            json.dump(report, stream, indent=1)
    title = f"Expert load of {args.model.name} on {args.subset}"
    save(draw_expert_load(loads, title), args.output)
    print(_table(summaries))
    print(f"wrote {', '.join(str(path) for path in (args.output, args.json) if path)}")
    return 0


def _checkpoint_and_data(model: Path, data: Optional[Path]) -> Tuple[Path, Path]:
    """The checkpoint and data folder that the arguments stand for."""
    checkpoint = model
    if model.is_dir():
        trained = model / "checkpoints" / "checkpoint_best.pt"
        checkpoint = next((path for path in (model / "average.pt", trained) if path.is_file()), None)
        if checkpoint is None:
            raise UserError(
                f"{model} holds neither average.pt nor checkpoints/checkpoint_best.pt: train first."
            )
        data = data or Path(RunState(model).get("prepare").get("folder", "."))
    elif data is None:
        raise UserError(
            f"{model} is no run folder, so --data must name the binarised data to run through it."
        )
    return checkpoint, data


def _table(summaries: List[Dict[str, Any]]) -> str:
    """One line per router: even share 1/E, largest and smallest share, entropy as a fraction of log E."""
    head = f"{'router':32}{'tokens':>10}{'K of E':>10}{'even':>8}{'most':>8}{'least':>8}{'entropy':>9}  dead"
    lines = [head]
    for row in summaries:
        sizes = f"{row['experts_per_token']} of {row['num_experts']}"
        even = 1 / row["num_experts"]
        shares = "".join(f"{share:8.1%}" for share in (even, row["max_load"], row["min_load"]))
        entropy = f"{row['evenness']:9.1%}{row['dead_experts']:6}"
        lines.append(f"{row['name']:32}{row['tokens']:10,}{sizes:>10}{shares}{entropy}")
    return "\n".join(lines)
