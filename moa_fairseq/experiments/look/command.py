"""One page of a trained run, to look at, to click through and to send: which expert took which token.

  moa-fairseq look runs/quickstart_moa --output moa.html
  moa-fairseq look runs/quickstart_moa runs/quickstart_transformer --output both.html
  moa-fairseq look runs/quickstart_moa --input english.txt --output mine.html

The page is one HTML file, which needs no network and no server. It shows sentences of the test set (of the
validation set if there is no test set), or the lines of --input: translations with reference and score, or
the text of a language model, with each token's surprise in bits. A masked language model guesses every
seventh token at a time. Loads and typical tokens are those that `moa-fairseq analyze` finds on the validation
set. Of two runs give the one with experts first. A page has at most 20 MB: it says what it leaves out.
"""

import argparse
import time
from pathlib import Path

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.look.page import assemble, write
from moa_fairseq.experiments.look.trained_run import examine
from moa_fairseq.experiments.records.provenance import provenance
from moa_fairseq.files import refuse_overwriting

ANY_ORDER = True  # RUN2 may be after the flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq look`."""
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="one run folder, or two to compare")
    add("--output", type=Path, required=True, metavar="FILE.html", help="the page")
    add("--input", type=Path, metavar="FILE", help="text with one sentence per line (the test set)")
    add("--sentences", type=int, default=50, metavar="N", help="how many sentences to show (50)")
    add("--data", type=Path, metavar="DATA_BIN", help="binarised data folder (the run's)")
    add("--cpu", action="store_true", help="do not use a GPU")


def run(args: argparse.Namespace) -> int:
    """Read the runs, and write the page."""
    if len(args.runs) > 2:
        raise UserError(f"{len(args.runs)} runs: a page compares two. Leave out {args.runs[2]}.")
    if args.output.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--output {args.output}: the page is HTML, so its name must end in .html.")
    if args.sentences < 1:
        raise UserError(f"--sentences {args.sentences} is less than 1.")
    inputs = [*args.runs, *([args.input] if args.input else [])]
    refuse_overwriting(args.output, inputs, "--output")
    started = time.monotonic()
    made_by = provenance()
    runs = [examine(folder, args, len(args.runs)) for folder in args.runs]
    size = write(assemble(runs, made_by), args.output)
    print(f"wrote {args.output} ({size / 1e6:.1f} MB, {time.monotonic() - started:.0f} s)")
    return 0
