"""How fast text is prepared: this project's stages against Moses' Perl scripts and subword-nmt.

  python benchmarks/text.py --lang de newstest2014.de.gz newstest2015.de.gz

Takes raw text files (plain or .gz) and writes results/benchmarks/text.json. With MOSES_SCRIPTS naming the
`scripts` folder of a Moses checkout, Perl runs the same three steps on the same lines.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from subword_nmt.apply_bpe import BPE

from moa_fairseq.experiments.data.catalogue import Cleaning
from moa_fairseq.experiments.data.parallel_text import TextFile, TextFilePair, read_lines
from moa_fairseq.experiments.data.text_stages import (
    Split,
    Treatment,
    learn_codes,
    load_codes,
    write_splits,
)
from moa_fairseq.experiments.records.provenance import provenance
from moa_fairseq.files.utf8 import use_utf8
from moa_fairseq.text.steps import apply_steps

ROOT = Path(__file__).resolve().parents[1]
MERGES = 8000


def main() -> None:
    """Measure, print and write the record."""
    use_utf8()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--lang", required=True)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "results" / "benchmarks" / "text.json"
    )
    args = parser.parse_args()
    made_by = {**provenance(), "versions": versions()}
    lines = [line for path in args.texts for line in read_lines(path)]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(lines, args.lang, args.workers, args.repeat, Path(folder))
    record = {
        "text": {
            "lines": len(lines),
            "words": sum(len(line.split()) for line in lines),
            "lang": args.lang,
        },
        "steps": "normalise punctuation, remove non-printing characters, tokenise with -a",
        "lines_per_second": rows,
        "ratios": ratios(rows),
        "workers": args.workers,
        "repeats": args.repeat,
        "hardware": {"processors": os.cpu_count(), "model": processor()},
        **made_by,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, rate in {**rows, **record["ratios"]}.items():
        print(f"{name:58s} {rate:12,.2f}")


def measure(
    lines: list[str], lang: str, workers: int, repeat: int, folder: Path
) -> dict[str, float]:
    """name → lines per second, the median of `repeat` runs."""
    steps = (
        ("normalize_punctuation", {"lang": lang}),
        ("remove_nonprinting", {}),
        ("tokenize", {"lang": lang, "aggressive_hyphens": True}),
    )
    tokens = [apply_steps(line, steps) for line in lines]
    raw = folder / "raw"
    codes = folder / "codes"
    raw.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    raw_pair = halves(lines, folder, "raw")
    token_pair = halves(tokens, folder, "tokens")
    learn_codes([file.path for file in token_pair], MERGES, codes)
    rows: dict[str, float] = {}

    def rate(name: str, work: Callable[[], Any], count: int = len(lines)) -> None:
        seconds = []
        for _ in range(repeat):
            begun = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begun)
        rows[name] = round(count / statistics.median(seconds), 1)

    def stage(treatment: Treatment, pair: TextFilePair, processes: int) -> None:
        if treatment.codes:
            load_codes(
                treatment.codes
            ).cache.clear()  # every run meets each word for the first time
        with tempfile.TemporaryDirectory(dir=folder) as out:
            write_splits([Split("train", [pair], treatment)], ("a", "b"), Path(out), processes)

    cleaned = Treatment((steps, steps), cleaning=Cleaning(1, 80, 9.0))
    stage(cleaned, raw_pair, workers)  # starts the fork server
    rate("tokens, our functions, 1 process", lambda: [apply_steps(line, steps) for line in lines])
    rate("tokens, our stage with cleaning, 1 process", lambda: stage(cleaned, raw_pair, 1))
    many = f"{workers} processes"
    rate(f"tokens, our stage with cleaning, {many}", lambda: stage(cleaned, raw_pair, workers))
    if os.environ.get("MOSES_SCRIPTS") and shutil.which("perl"):
        rate("tokens, Perl pipeline, 3 processes in a pipe", lambda: perl(raw, lang))

    def subword_nmt() -> None:
        with open(codes, encoding="utf-8") as stream:
            bpe = BPE(stream)
        for line in tokens:
            bpe.process_line(line)

    rate("subwords, subword-nmt, 1 process", subword_nmt)
    subwords = Treatment(codes=str(codes))
    rate("subwords, our stage, 1 process", lambda: stage(subwords, token_pair, 1))
    rate(f"subwords, our stage, {many}", lambda: stage(subwords, token_pair, workers))
    return rows


def halves(lines: list[str], folder: Path, name: str) -> TextFilePair:
    """Two files of equal length: a stage handles pairs of lines."""
    middle = len(lines) // 2
    for half, part in (("a", lines[:middle]), ("b", lines[middle : 2 * middle])):
        (folder / f"{name}.{half}").write_text(
            "".join(line + "\n" for line in part), encoding="utf-8"
        )
    return TextFile(folder / f"{name}.a"), TextFile(folder / f"{name}.b")


def perl(raw: Path, lang: str) -> None:
    """Moses' own scripts, one after the other in a pipe, as the recipes of others run them."""
    folder = Path(os.environ["MOSES_SCRIPTS"]) / "tokenizer"
    command = (
        f"perl {folder}/normalize-punctuation.perl {lang} < {raw} "
        f"| perl {folder}/remove-non-printing-char.perl "
        f"| perl {folder}/tokenizer.perl -q -a -l {lang} > /dev/null"
    )
    subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True, stderr=subprocess.DEVNULL)


def ratios(rows: dict[str, float]) -> dict[str, float]:
    """Ours against theirs, out of the same run."""
    ours = rows["tokens, our functions, 1 process"]
    best = max(rate for name, rate in rows.items() if name.startswith("tokens, our stage"))
    found = {f"our tokens / {name}": ours / rate for name, rate in rows.items() if "Perl" in name}
    found |= {
        f"our fastest stage / {name}": best / rate for name, rate in rows.items() if "Perl" in name
    }
    theirs = rows["subwords, subword-nmt, 1 process"]
    found |= {
        f"{name} / subword-nmt": rows[name] / theirs
        for name in rows
        if name.startswith("subwords, our")
    }
    found["our tokens / subword-nmt's subwords"] = ours / theirs
    return {name: round(value, 3) for name, value in found.items()}


def processor() -> str:
    """The name of the processor, as far as the system tells."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # only Linux has it
        return platform.processor()
    names = [
        line.partition(":")[2].strip()
        for line in text.splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    """Of Python, Perl and the libraries that do the work."""
    found = {"python": platform.python_version()}
    for name in ("subword-nmt", "sacremoses", "regex"):
        found[name] = importlib.metadata.version(name)
    if shutil.which("perl"):
        told = subprocess.run(
            ["perl", "-e", "print $^V"], capture_output=True, text=True, check=True
        )
        found["perl"] = told.stdout
    return found


if __name__ == "__main__":
    main()
