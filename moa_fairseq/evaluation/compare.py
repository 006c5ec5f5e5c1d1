"""The papers' numbers beside ours: paper, ours, difference, or why there is none.

Scores come from results/measured/, where `moa-fairseq recipe ... --record` puts them; parameters and
MACs are counted on the spot. Naming run folders compares those runs alone, by their result.json.
Without flags the tables go to the screen.

MoA's BLEU on WMT14 is compared twice. Its text is tokenised with split hyphens, so (multi-bleu), plain
multi-bleu.perl, is the score after one compound split, which the paper describes. (moa-release) is the
script of MoA's release, which splits those hyphens a second time and so prints about 0.9 BLEU more for
German and 0.8 for French: what the release would print of the same output.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import moa_fairseq
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.results import load_comparison
from moa_fairseq.evaluation.results_markdown import render
from moa_fairseq.files import atomic_write

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def default_results() -> Path:
    """results/ of the checkout that this package runs from, else of the working directory."""
    beside = Path(moa_fairseq.__file__).resolve().parent.parent / "results"
    return beside if beside.is_dir() else Path("results")


def with_results(readme: str, table: str) -> str:
    """`readme` with everything between the two result markers replaced by `table`.

    Raises UserError unless both markers stand in the text once, in order.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise UserError(f"The table goes between one line {BEGIN} and one line {END}: the file lacks them.")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{table.strip()}\n\n{END}{after}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq compare`."""
    parser.add_argument("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help="run folders to show alone")
    parser.add_argument("--results", type=Path, metavar="DIR", help="folder with papers/ and measured/")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to FILE")
    parser.add_argument(
        "--update-readme",
        nargs="?",
        type=Path,
        const=Path("README.md"),
        metavar="FILE",
        help=f"rewrite what stands between {BEGIN} and {END} in FILE (README.md)",
    )


def run(args: argparse.Namespace) -> int:
    """Read, match, and print or write."""
    results = args.results or default_results()
    if args.run_dirs:
        files = [folder / "result.json" for folder in args.run_dirs]
        comparison = load_comparison(results, files).with_runs_only()
    else:
        comparison = load_comparison(results)
    if args.json:
        print(json.dumps(comparison.as_json(), indent=2, ensure_ascii=False))
    markdown = render(comparison)
    if args.markdown:
        with atomic_write(args.markdown) as stream:
            stream.write(markdown)
    if args.update_readme:
        _update(args.update_readme, markdown)
    if not (args.json or args.markdown or args.update_readme):
        print(markdown, end="")
    return 0


def _update(path: Path, markdown: str) -> None:
    try:
        readme = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--update-readme {path}: {error.strerror}.") from error
    with atomic_write(path) as stream:
        stream.write(with_results(readme, markdown))
