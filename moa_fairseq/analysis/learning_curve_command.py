"""Training (thin) and validation (thick) curves of several runs in one picture (MAE Fig. 3, App. B).

moa-fairseq analyze learning-curve runs/base runs/nobcd runs/mae7 --metric loss --from-epoch 8 --output c.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from moa_fairseq.analysis.training_log import METRICS, read_learning_curve
from moa_fairseq.errors import UserError

NAME = "learning-curve"
SUMMARY = "training and validation curves of several runs (MAE Fig. 3)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run folders, or JSON logs")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    parser.add_argument("--metric", choices=sorted(METRICS), default="ppl", help="what to draw (ppl)")
    parser.add_argument(
        "--from-epoch", type=int, default=1, metavar="N", help="leave out what is before epoch N (1)"
    )


def analyze(args: argparse.Namespace) -> int:
    """Draw the curves of all runs; print each one's best validation."""
    from moa_fairseq.analysis.plots import draw_learning_curves, save

    if args.from_epoch < 1:
        raise UserError(f"--from-epoch {args.from_epoch}: the first epoch is 1.")
    curves = [read_learning_curve(path, args.metric, args.from_epoch) for path in args.runs]
    save(draw_learning_curves(curves, args.metric, from_zero=args.from_epoch == 1), args.output)
    for curve in curves:
        if curve.valid:
            best = min(curve.valid, key=lambda point: point.value)
            print(f"{curve.name}: best valid {args.metric} {best.value:g} after {best.updates:,} updates")
    print(f"wrote {args.output}")
    return 0
