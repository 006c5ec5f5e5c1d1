"""Pictures and numbers of a trained model.

  moa-fairseq analyze learning-curve runs/A runs/B --output curves.png
  moa-fairseq analyze expert-load runs/B --output load.png
  moa-fairseq analyze expert-load runs/B/average.pt --data data-bin/X --output load.png --json load.json
  moa-fairseq analyze gates runs/C --output gates.png
  moa-fairseq analyze expert-tokens runs/C --words
  moa-fairseq analyze attention-maps runs/D --sentence 3 --layer 2 --output heads.png
  moa-fairseq analyze induction-heads runs/E --output induction.png

A run folder stands for its averaged (else its best) checkpoint and for the data it was trained on; so does
the --save-dir of a plain fairseq-train, or the folder around it.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis import (
    attention_maps,
    expert_load,
    expert_tokens,
    gates,
    induction_heads,
    learning_curve,
)
from moa_fairseq.experiments.analysis.plots import save
from moa_fairseq.experiments.recipes.checkpoints import checkpoint_and_data
from moa_fairseq.experiments.records.json_files import write_json
from moa_fairseq.experiments.records.provenance import provenance
from moa_fairseq.experiments.scoring.trained_model import load_trained
from moa_fairseq.files import checksum, refuse_overwriting

# Each module has NAME, SUMMARY, a docstring for --help, add_arguments(parser), and analyze, which returns an
# Analysis: analyze(args) for logs, analyze(args, model, task) for a trained model
KINDS = (learning_curve, expert_load, gates, expert_tokens, attention_maps, induction_heads)
READ_LOGS = (learning_curve,)
READ_RANDOM_TEXT = (induction_heads,)
WITHOUT_PICTURE = (expert_tokens,)

# The files that a recipe writes into its run folder
RUN_FILES = ("*.pt", "checkpoints/*", "*.json", "*.jsonl", "*.yaml", "*.txt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq analyze`."""
    kinds = parser.add_subparsers(
        dest="analysis", required=True, metavar="{" + ",".join(kind.NAME for kind in KINDS) + "}"
    )
    for kind in KINDS:
        subparser = kinds.add_parser(
            kind.NAME,
            help=kind.SUMMARY,
            description=kind.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = subparser.add_argument
        if kind not in READ_LOGS:
            add("model", type=Path, metavar="RUN_DIR|CHECKPOINT")
            add("--data", type=Path, metavar="DATA_BIN", help="binarised data folder (the run's)")
            if kind not in READ_RANDOM_TEXT:
                add("--subset", default="valid", help="which subset of the data to run (valid)")
                add(
                    "--max-tokens",
                    type=int,
                    default=4096,
                    metavar="N",
                    help="tokens in a batch (4096)",
                )
            add("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")
            add("--cpu", action="store_true", help="do not use a GPU")
        kind.add_arguments(subparser)
        if kind not in WITHOUT_PICTURE:
            add("--output", type=Path, required=True, metavar="FILE.png")
        # The defaults are for kinds without these flags
        subparser.set_defaults(analyze=kind.analyze, output=None, json=None)


def run(args: argparse.Namespace) -> int:
    """Run the chosen analysis; write its picture and its numbers, and print its text."""
    if args.output is not None and args.output.suffix.lower() != ".png":
        raise UserError(
            f"--output {args.output}: the picture is a PNG, so its name must end in .png."
        )
    inputs = [args.model] if "model" in args else args.runs
    files = []
    for path, pattern in itertools.product(inputs, RUN_FILES):
        files += path.glob(pattern)
    written = {"output": args.output, "json": args.json}
    for name, path in written.items():
        if path is not None:
            refuse_overwriting(path, [*inputs, *files], f"--{name}")
    made_by = provenance()
    analysis = _analyze_model(args) if "model" in args else args.analyze(args)
    if args.output:
        save(analysis.figure, args.output)
    if args.json:
        write_json(args.json, dict(analysis.report, made_by=made_by))
    print(*analysis.lines, sep="\n")
    paths = list(filter(None, written.values()))
    if paths:
        print(f"wrote {', '.join(map(str, paths))}")
    return 0


def _analyze_model(args: argparse.Namespace) -> Any:
    """The Analysis of a trained model; for --json its report also names the checkpoint and the data."""
    if getattr(args, "max_tokens", 1) < 1:
        raise UserError(f"--max-tokens {args.max_tokens}: a batch holds at least one token.")
    checkpoint, data = checkpoint_and_data(args.model, args.data)
    model, task = load_trained(checkpoint, data)
    args.data = data or Path(task.cfg.data)
    origin = {}
    if args.json:  # now, because a training may replace the file meanwhile
        origin = {"checkpoint": str(checkpoint), "checkpoint_sha256": checksum(checkpoint)}
        origin["data"] = str(args.data)
        if "subset" in args:
            origin["subset"] = args.subset
    analysis = args.analyze(args, model, task)
    return analysis._replace(report=origin | analysis.report)
