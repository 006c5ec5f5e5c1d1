"""Pictures and numbers of a trained model.

  moa-fairseq analyze learning-curve runs/A runs/B --output curves.png
  moa-fairseq analyze expert-load runs/B --output load.png
  moa-fairseq analyze expert-load runs/B/average.pt --data data-bin/X --output load.png --json load.json
  moa-fairseq analyze gates runs/C --output gates.png
  moa-fairseq analyze expert-tokens runs/C --words
  moa-fairseq analyze attention-maps runs/D --sentence 3 --layer 2 --output heads.png

A run folder stands for its averaged (else its best) checkpoint and for the data it was trained on.
"""

from __future__ import annotations

import argparse

from moa_fairseq.analysis import attention_maps, expert_load, expert_tokens, gates, learning_curve
from moa_fairseq.errors import UserError
from moa_fairseq.files import refuse_overwriting

# Each module: NAME, SUMMARY, a docstring for --help, add_arguments(parser) and analyze(args) -> int.
KINDS = (learning_curve, expert_load, gates, expert_tokens, attention_maps)

# what a recipe writes into its run folder
OF_A_RUN = ("*.pt", "checkpoints/*", "*.json", "*.jsonl", "*.yaml", "*.txt")


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
        kind.add_arguments(subparser)
        subparser.set_defaults(analyze=kind.analyze)


def run(args: argparse.Namespace) -> int:
    """Run the chosen analysis."""
    picture = getattr(args, "output", None)
    if picture is not None and picture.suffix.lower() != ".png":
        raise UserError(f"--output {picture}: the picture is a PNG, so its name must end in .png.")
    inputs = [*vars(args).get("runs", ()), *([args.model] if "model" in args else [])]
    inputs += [file for path in inputs for pattern in OF_A_RUN for file in path.glob(pattern)]
    for name in ("output", "json"):
        if vars(args).get(name) is not None:
            refuse_overwriting(vars(args)[name], inputs, f"--{name}")
    return args.analyze(args)
