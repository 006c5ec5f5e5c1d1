"""How evenly a model uses its experts (MoA Figs. 3 and 4), as picture and numbers.

moa-fairseq analyze expert-load runs/B --output load.png --json load.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Dict, List

from moa_fairseq.analysis.model_arguments import add_model_arguments, checked_model, say_written, write_json

NAME = "expert-load"
SUMMARY = "how evenly a model uses its experts (MoA Figs. 3 and 4)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    add_model_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")


def analyze(args: argparse.Namespace) -> int:
    """Run a data set through a model; draw and print where its tokens went."""
    from moa_fairseq.analysis.expert_load import measure_expert_load
    from moa_fairseq.analysis.plots import draw_expert_load, save

    checkpoint, data = checked_model(args)
    loads = measure_expert_load(checkpoint, data, args.subset, args.max_tokens, args.cpu)
    summaries = [load.summary() for load in loads]
    if args.json:
        report = {"checkpoint": str(checkpoint), "subset": args.subset, "modules": summaries}
        write_json(args.json, report)
    title = f"Expert load of {args.model.name} on {args.subset}"
    save(draw_expert_load(loads, title), args.output)
    print(_table(summaries))
    say_written(args.output, args.json)
    return 0


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
