"""Numbers in the text of a document, filled in from the records.

    MoA is <!-- frontier/MoA/size -->0.17<!-- / --> bits worse.

A page on GitHub shows "MoA is 0.17 bits worse.": comments are not shown. `python docs/generate.py --values`
writes what is between two comments anew, and a test compares it, so no text disagrees with a report.

The first comment names a value, with the number of decimals where it is not the usual one:

    STUDY/CONTRAST/FIELD[:DECIMALS]         a contrast of results/studies/STUDY/report.json
    STUDY/TABLE/ROW/FIELD[:DECIMALS]        TABLE: systems, cache, at_equal_training_loss, BLEU or chrF
    FOLDER/FILE/KEY/…[:DECIMALS]            results/FOLDER/FILE.json, such as measured or benchmarks

FIELD is any number of the row, or one of these:

    difference   +0.17              the mean, first − second
    size         0.17               the same without its sign
    interval     +0.15 to +0.20     of 95 %
    range        0.15 to 0.20       the same without signs; both ends must have the same sign
    verdict      worse              in words
    p            1.2e-07            corrected by Holm's method
    n            12                 seeds
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import moa_fairseq

ROOT = Path(moa_fairseq.__file__).resolve().parents[1]
RESULTS = ROOT / "results"
METRICS = ("BLEU", "chrF")
DECIMALS = 2
END = "<!-- / -->"
_BEGIN = re.compile(r"<!-- ([^\s/<>]+/[^<>\n]+?) -->")
_VALUE = re.compile(rf"{_BEGIN.pattern}[^<\n]*{END}")
_HTML_BLOCK = re.compile(r"^\s*(?:[-*+>]\s+|\d+\.\s+)*<!-- [^\s/<>]+/[^<>\n]+? -->", re.M)


def documents() -> list[Path]:
    """All Markdown files that may have values."""
    folders = ("benchmarks", "configs", "data-prep", "docs", "results")
    return sorted(
        [*ROOT.glob("*.md"), *(path for name in folders for path in (ROOT / name).rglob("*.md"))]
    )


def fill_values(text: str, document: str) -> str:
    """The text with every value as the records have it.

    Args:
        text: of a document.
        document: its name, for errors.

    Raises:
        SystemExit: names the document and a value that cannot be filled in.
    """
    if match := _HTML_BLOCK.search(text):
        problem = f"{match.group().strip()} begins a line, which Markdown then shows as it is"
        raise SystemExit(f"{document}: {problem}. Put a word before it.")
    names = _BEGIN.findall(text)
    if len(names) != len(_VALUE.findall(text)) or len(names) != text.count(END):
        raise SystemExit(f"{document}: each <!-- NAME --> needs a {END} on its line, and no other.")

    def filled(match: re.Match[str]) -> str:
        try:
            return f"<!-- {match[1]} -->{value(match[1])}{END}"
        except (KeyError, ValueError, OSError, TypeError) as error:  # of a name that no record has
            raise SystemExit(f"{document}: {match[1]} cannot be filled in: {error}.") from error

    return _VALUE.sub(filled, text)


def value(name: str) -> str:
    """The value of a name as text; see above for names."""
    path, _, decimals = name.partition(":")
    folder, *keys = path.split("/")
    if not (RESULTS / "studies" / folder).is_dir():
        found: Any = _read(RESULTS / folder / f"{keys[0]}.json")
        for key in keys[1:]:
            found = _choose(found, key)
        return _number(found, decimals)
    table, row, field = ["contrasts", *keys][-3:]
    return _field(_row(folder, table, row), field, decimals)


def signed(number: float, decimals: int) -> str:
    """A difference with its sign, for text: a minus is no hyphen."""
    return f"{number:+.{decimals}f}".replace("-", "−")


def _row(study: str, table: str, name: str) -> Mapping[str, Any]:
    """The row of a study's table. Translations have their fields under the names of contrasts'."""
    report = _read(RESULTS / "studies" / study / "report.json")
    rows = report["translations" if table in METRICS else table]
    if table in METRICS:
        translated = [row for row in rows if row["metric"] == table]
        rows = [
            {**row, "mean": row["difference"], "p_holm": row["p_seeds_holm"]} for row in translated
        ]
    return _choose({row.get("contrast", row.get("system")): row for row in rows}, name)


def _field(row: Mapping[str, Any], field: str, decimals: str) -> str:
    places = int(decimals or DECIMALS)
    if field == "difference":
        return signed(row["mean"], places)
    if field == "size":
        return f"{abs(row['mean']):.{places}f}"
    if field == "interval":
        return " to ".join(signed(row[end], places) for end in ("low", "high"))
    if field == "range":
        if row["low"] * row["high"] < 0:
            raise ValueError("its interval has both signs: use interval")
        return " to ".join(
            f"{end:.{places}f}" for end in sorted((abs(row["low"]), abs(row["high"])))
        )
    if field == "p":
        return f"{row['p_holm']:.{decimals or 2}g}"
    found = _choose(row, field)
    return found if isinstance(found, str) else _number(found, decimals)


def _number(number: Any, decimals: str) -> str:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"{str(number)[:80]!r} is no number")
    if isinstance(number, int) and not decimals:
        return f"{number:,}"
    return f"{number:,.{decimals or DECIMALS}f}".replace("-", "−")


def _choose(mapping: Mapping[str, Any], key: str) -> Any:
    if key not in mapping:
        raise ValueError(f"there is no {key!r}; there are {', '.join(map(str, mapping))}")
    return mapping[key]


@functools.cache
def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
