"""The papers' numbers beside ours: paper, ours, difference, or why there is none.

Scores come from results/measured/, where `moa-fairseq recipe ... --record` puts them; parameters and MACs are
counted from the models. If run folders are named, only those runs are compared, by their result.json.

MoA's BLEU on WMT14 is compared twice. Its text is tokenised with split hyphens, so (multi-bleu), plain
multi-bleu.perl, is the score after one compound split, which the paper describes. (moa-release) is the score
that the script of MoA's release would print for the same output: it splits those hyphens a second time, which
adds about 0.9 BLEU for German and 0.8 for French.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from moa_fairseq.evaluation.results import load_comparison
from moa_fairseq.evaluation.results_markdown import render
from moa_fairseq.files import shipped


def default_results() -> Path:
    """results/ of this package, else of the working directory."""
    return shipped("results") if shipped("results").is_dir() else Path("results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq compare`."""
    parser.add_argument("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help="show only these runs")
    parser.add_argument("--results", type=Path, metavar="DIR", help="folder with papers/ and measured/")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Read, match, and print."""
    files = [folder / "result.json" for folder in args.run_dirs]
    comparison = load_comparison(args.results or default_results(), files)
    if args.json:
        print(json.dumps(dataclasses.asdict(comparison), indent=2, ensure_ascii=False))
    else:
        print(render(comparison), end="")
    return 0
