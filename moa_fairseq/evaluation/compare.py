"""The papers' numbers beside ours: paper, ours, difference, or why there is none.

Scores come from results/measured/, where `moa-fairseq recipe ... --record` puts them; parameters and MACs are
counted from the models. If run folders are named, only those runs are compared, by their result.json. Without
flags the tables go to the screen.

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
from typing import Mapping

from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.results import load_comparison
from moa_fairseq.evaluation.results_markdown import render, render_headlines
from moa_fairseq.files import atomic_write, refuse_overwriting, shipped

# The markers of a generated part of a document, by its name.
BEGIN, END = "<!-- {}:begin -->", "<!-- {}:end -->"


def default_results() -> Path:
    """results/ of this package, else of the working directory."""
    return shipped("results") if shipped("results").is_dir() else Path("results")


def fill(text: str, parts: Mapping[str, str]) -> str:
    """`text`, with the content between the markers of each named part replaced by that part.

    A document need not have all parts. Raises UserError when it has none of them, or when a part's two
    markers do not each occur once, in order.
    """
    found = [name for name in parts if any(marker.format(name) in text for marker in (BEGIN, END))]
    for name in found or parts:
        begin, end = BEGIN.format(name), END.format(name)
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise UserError(
                f"The text goes between one line {begin} and one line {end}, which the file lacks."
            )
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{parts[name].strip()}\n\n{end}{rest.split(end)[1]}"
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq compare`."""
    parser.add_argument("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help="show only these runs")
    parser.add_argument("--results", type=Path, metavar="DIR", help="folder with papers/ and measured/")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to FILE")
    parser.add_argument(
        "--update-readme",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="rewrite the tables between the markers in each FILE (default: README.md, results/README.md): "
        f"all of them between {BEGIN.format('results')} and {END.format('results')}, the rows that papers/ "
        "calls headlines between the same markers of the name headlines",
    )


def run(args: argparse.Namespace) -> int:
    """Read, match, and print or write."""
    results = args.results or default_results()
    files = [folder / "result.json" for folder in args.run_dirs]
    if args.markdown:
        refuse_overwriting(args.markdown, [*files, *results.glob("*/*.json")], "--markdown")
    comparison = load_comparison(results, files or None)
    comparison = comparison.with_runs_only() if files else comparison
    if args.json:
        print(json.dumps(dataclasses.asdict(comparison), indent=2, ensure_ascii=False))
    markdown = render(comparison)
    if args.markdown:
        with atomic_write(args.markdown) as stream:
            stream.write(markdown)
    if args.update_readme is not None:
        parts = {"results": markdown, "headlines": render_headlines(comparison)}
        for path in args.update_readme or (results.parent / "README.md", results / "README.md"):
            try:
                text = path.read_text(encoding="utf-8")
            except OSError as error:
                raise UserError(f"--update-readme {path}: {error.strerror}.") from error
            with atomic_write(path) as stream:
                stream.write(fill(text, parts))
    if not (args.json or args.markdown or args.update_readme is not None):
        print(markdown, end="")
    return 0
