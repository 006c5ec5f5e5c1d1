"""What a trained MAE loses when one expert in each module does the mixture's work (MAE Table 5).

  moa-fairseq analyze single-expert runs/mae7 --draws 5 --json table5.json

Evaluates the subset with the mixture, with each gate's favourite alone, and with random experts (drawn anew
by each seed, one for each module), by the generate and score settings of the run. The evaluations stay in
RUN_DIR/single-expert; what is finished is not done again.

fairseq-generate, fairseq-validate and fairseq-eval-lm do the same for any trained model with
--model-overrides "{'mae_evaluate_with': 'random-expert', 'mae_evaluate_seed': 2}" (or 'top-expert').
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Dict

from moa_fairseq.analysis.model_arguments import say_written, write_json
from moa_fairseq.errors import UserError

NAME = "single-expert"
SUMMARY = "scores with one expert per module instead of the mixture (MAE Table 5)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run folder of a trained MAE")
    parser.add_argument("--subset", default="valid", help="which part of the run's data (valid)")
    parser.add_argument("--draws", type=int, default=5, metavar="N", help="draws of random experts (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, too")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")


def analyze(args: argparse.Namespace) -> int:
    """Evaluate and print the rows of Table 5."""
    from moa_fairseq.analysis.single_expert import evaluate_single_experts, open_run
    from moa_fairseq.recipes.hardware import choose_devices, detect_hardware, device_environment

    if args.draws < 0:
        raise UserError(f"--draws {args.draws}: none, or some.")
    run, present = open_run(args.run_dir), detect_hardware()
    hardware = choose_devices(present, 0 if args.cpu else min(1, present.gpus), dry_run=False)
    environment = device_environment(hardware, present)
    report = evaluate_single_experts(run, args.subset, args.draws, hardware, environment)
    if args.json:
        write_json(args.json, report)
    print(_table(report))
    say_written(args.json)
    return 0


def _table(report: Dict[str, Any]) -> str:
    """The paper's rows: score and difference to the mixture."""
    lines = [f"{report['metric']} on {report['subset']}, {report['checkpoint']} ({report['gate']} gates)"]
    lines.append(f"{'mixture':32}{report['mixture']:8.2f}")
    top, drawn = report["top_expert"], report["random_expert"]
    if top:
        lines.append(f"{'most specialised expert':32}{top['score']:8.2f}{top['difference']:+8.2f}")
    if drawn:
        label = f"one random expert, {len(drawn['scores'])} draw(s)"
        line = f"{label:32}{drawn['mean']:8.2f}{drawn['difference']:+8.2f}"
        lines.append(line if drawn["sd"] is None else f"{line} ± {drawn['sd']:.2f}")
    return "\n".join(lines)
