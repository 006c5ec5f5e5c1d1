"""Entropy of MAE's gates, and the share of instances that each expert is the favourite for (§5.1, Table 8).

  moa-fairseq analyze gates runs/mae7 --output gates.png --json gates.json

--untrained 1 gives the values to compare with: those of gates that nobody has trained, on the same inputs.
An instance is a sequence in the encoder and a position in a decoder, whose gates see the inputs so far. The
paper's entropies (1.91 nats for MAE-7, 2.02 for NOBCD, 2.08 = ln 8 for UNI-MAE-7) are means over encoder
layers on WMT14's development set. Experts count from 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Dict, List

from moa_fairseq.analysis.model_arguments import add_model_arguments, checked_model, say_written, write_json

NAME = "gates"
SUMMARY = "entropy of MAE's gates and the experts they prefer (MAE §5.1, Table 8)"
MANY = 10  # experts: more shares than these do not fit on a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    add_model_arguments(parser)
    parser.add_argument(
        "--untrained",
        type=int,
        metavar="SEED",
        help="draw the gates' weights anew, as a new model's: what untrained gates show on the same inputs",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")


def analyze(args: argparse.Namespace) -> int:
    """Run a data set through a model; draw and print what its gates did."""
    from moa_fairseq.analysis.gate_plots import draw_gates
    from moa_fairseq.analysis.gates import mean_entropies, measure_gates
    from moa_fairseq.analysis.plots import save

    checkpoint, data = checked_model(args)
    uses = measure_gates(checkpoint, data, args.subset, args.max_tokens, args.cpu, args.untrained)
    summaries, means = [use.summary() for use in uses], mean_entropies(uses)
    if args.json:
        report = {"checkpoint": str(checkpoint), "subset": args.subset, "means": means, "modules": summaries}
        write_json(args.json, {**report, "untrained_seed": args.untrained})
    kind = "Gates" if args.untrained is None else "Untrained gates"
    save(draw_gates(uses, f"{kind} of {args.model.name} on {args.subset}"), args.output)
    print(_table(summaries))
    print(_means(means))
    if args.untrained is not None:
        print(f"The gates' weights drawn anew by seed {args.untrained}: nobody has trained these gates.")
    if any(use.counts is None for use in uses):
        print("Uniform gates prefer no expert: no instance is attributed to one, and there are no shares.")
    say_written(args.output, args.json)
    return 0


def _table(summaries: List[Dict[str, Any]]) -> str:
    lines = [f"{'gate':32}{'instances':>20}{'entropy':>9}{'ln E':>7}  share of each expert in %"]
    for row in summaries:
        instances = f"{row['instances']:,} {row['instance']}s"
        numbers = f"{row['entropy']:9.4f}{row['uniform_entropy']:7.3f}"
        lines.append(f"{row['name']:32}{instances:>20}{numbers}  {_shares(row['shares'])}")
    return "\n".join(lines)


def _shares(shares: List[float] | None) -> str:
    if shares is None:
        return "(uniform)"
    if len(shares) <= MANY:
        return "".join(f"{100 * share:6.1f}" for share in shares)
    return f"{len(shares)} experts, {100 * min(shares):.1f} to {100 * max(shares):.1f}"


def _means(means: Dict[str, Dict[str, float]]) -> str:
    """The paper's number: H(g) averaged over the layers."""
    lines = [f"{'mean over gates of':32}{'gates':>20}{'entropy':>9}{'ln E':>7}"]
    for label, row in means.items():
        lines.append(f"{label:32}{row['modules']:20}{row['entropy']:9.4f}{row['uniform_entropy']:7.3f}")
    return "\n".join(lines)
