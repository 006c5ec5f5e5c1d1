"""The papers' tables and the measured runs, read from results/ and laid side by side.

results/papers/*.json holds what is printed, results/measured/*.json what was run; the README of
results/ describes both formats.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from moa_fairseq.errors import UserError
from moa_fairseq.json_files import MAPPING, NUMBER, TEXT, check_kinds, read_json

# What a run can have instead of a number; "no recipe" marks rows for which there is no recipe here.
STATUSES = ("not run", "running", "OOM", "diverged")
MEASURED, COMPUTED, NO_RECIPE = "measured", "computed", "no recipe"


_RUN = {
    **dict.fromkeys(
        ("experiment", "status", "headline", "subset", "hardware", "date", "commit", "command"), TEXT
    ),
    **dict.fromkeys(("epochs", "updates", "checkpoints_averaged", "seed", "parameters"), NUMBER),
    **dict.fromkeys(("metrics", "reproduces", "generation", "evaluation"), MAPPING),
    "train_seconds": NUMBER,
}
_REMEDY = "Restore it, or delete it: results/README.md describes the format."


@dataclass
class Cell:
    """One printed number beside ours.

    quantity: "parameters" or another count as `moa-fairseq complexity --json` names it, the name of a
    metric, or None. ours is the mean over the runs; spread their sample standard deviation where there
    are several. difference is ours minus the paper's. plain: for MACs, every matrix product counted once, in
    the model or in SwitchHead's layer; attention: those of the attentions alone, for a whole model.
    """

    column: str
    quantity: Optional[str]
    paper: float
    ours: Optional[float] = None
    spread: Optional[float] = None
    difference: Optional[float] = None
    status: str = NO_RECIPE
    runs: int = 0
    plain: Optional[int] = None
    attention: Optional[int] = None


@dataclass
class Row:
    """One line of a table: its cells, the architecture counted and the runs that stand for it.

    headline: what its score measures, for the rows that README.md shows.
    """

    row: str
    arch: Optional[str]
    cells: List[Cell]
    runs: List[dict] = field(default_factory=list)
    headline: Optional[str] = None


@dataclass
class Table:
    """One table of one paper."""

    paper: str
    title: str
    citation: str
    table: str
    caption: str
    notes: List[str]
    rows: List[Row]


@dataclass
class Comparison:
    """All tables, and the runs that stand for no row."""

    tables: List[Table]
    other: List[dict]

    def with_runs_only(self) -> Comparison:
        """Without the tables and rows that no run stands for."""
        tables = [replace(table, rows=[row for row in table.rows if row.runs]) for table in self.tables]
        return Comparison([table for table in tables if table.rows], self.other)

    def as_json(self) -> dict:
        """Plain data: {"tables": [...], "other": [...]}."""
        return asdict(self)


def load_comparison(results: Path, run_files: Optional[Sequence[Path]] = None) -> Comparison:
    """Read `results`/papers and the runs, and match them.

    run_files: result.json files of run folders; None takes everything in `results`/measured. A run
    stands for a row when its `reproduces` names paper, table and row, or names another table of the
    paper and the row lists its experiment. Raises UserError for a missing folder or a file that is not
    as described.
    """
    printed = results / "papers"
    if not printed.is_dir():
        raise UserError(f"--results {results}: there is no folder {printed} with the papers' tables.")
    if run_files is None:
        run_files = sorted((results / "measured").glob("*.json"))
    paper_keys = ("paper", "title", "citation", "tables")
    papers = [_read(path, paper_keys) for path in sorted(printed.glob("*.json"))]
    runs = [_read_run(path) for path in run_files]
    tables = [_table(paper, table, runs) for paper in papers for table in paper["tables"]]
    matched = {id(run) for table in tables for row in table.rows for run in row.runs}
    return Comparison(tables, [run for run in runs if id(run) not in matched])


def _read(path: Path, keys: tuple) -> dict:
    try:
        data = read_json(path, _REMEDY)
    except FileNotFoundError as error:
        raise UserError(f"There is no {path}: the run was not scored, or it is another folder.") from error
    missing = [key for key in keys if not isinstance(data, dict) or key not in data]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}: results/README.md describes the format.")
    return data


def _read_run(path: Path) -> dict:
    """One result.json, every value of the kind that the tables need.

    "name" is added: an experiment may have been run more than once, and each run has a file or a folder.
    """
    data = _read(path, ("experiment", "metrics"))
    check_kinds(data, _RUN, str(path), _REMEDY, required=("experiment", "metrics"))
    kinds = {name: TEXT if name.endswith("_signature") else NUMBER for name in data["metrics"]}
    check_kinds(data["metrics"], kinds, f"{path}: metrics", _REMEDY)
    if (data.get("status") or "not run") not in STATUSES:
        raise UserError(f"{path}: status {data['status'][:40]!r} must be one of {', '.join(STATUSES)}.")
    return {"name": path.stem if path.stem != "result" else path.absolute().parent.name, **data}


def _table(paper: dict, table: dict, runs: List[dict]) -> Table:
    rows = []
    for row in table["rows"]:
        stands_for = [run for run in runs if _stands_for(run, paper["paper"], table["table"], row)]
        cells = [
            _cell(row, column, about, value, stands_for)
            for column, value in row["values"].items()
            for about in _abouts(table, row, column)
        ]
        rows.append(Row(_label(row), row.get("arch"), cells, stands_for, row.get("headline")))
    notes = table.get("notes", [])
    return Table(
        paper["paper"], paper["title"], paper["citation"], table["table"], table["caption"], notes, rows
    )


def _abouts(table: dict, row: dict, column: str) -> List[dict]:
    """Where our number comes from: the column's description, with the row's changes.

    More descriptions follow for further metrics that are compared with the same printed number.
    """
    about = {**table["columns"].get(column, {}), **row.get("columns", {}).get(column, {})}
    return [about, *({**about, "metric": metric} for metric in about.get("also", ()))]


def _label(row: dict) -> str:
    """The row's name, with K, E and D where they stand in columns of their own."""
    setting = row.get("setting")
    return row["row"] + (" {K}K{E}E{D}D".format(**setting) if setting else "")


def _stands_for(run: dict, paper: str, table: str, row: dict) -> bool:
    target = run.get("reproduces")
    if not target or target.get("paper") != paper:
        return False
    if str(target.get("table")) == table and "row" in target:
        return target["row"] == row["row"]
    return run["experiment"] in row["experiments"]


def _cell(row: dict, column: str, about: dict, paper: float, runs: List[dict]) -> Cell:
    if "quantity" in about:
        return _computed(row, column, about, paper)
    metric, prefix = about.get("metric"), about.get("experiments", "")
    cell = Cell(column, metric, paper)
    if metric is None or not any(name.startswith(prefix) for name in row["experiments"]):
        return cell
    cell.status = "not run"
    runs = [run for run in runs if run["experiment"].startswith(prefix)]
    values = [run["metrics"][metric] for run in runs if run["metrics"].get(metric) is not None]
    if values:
        cell.ours, cell.runs, cell.status = statistics.mean(values), len(values), MEASURED
        cell.spread = statistics.stdev(values) if len(values) > 1 else None
        cell.difference = cell.ours - paper
    elif runs:
        cell.status = runs[-1].get("status") or "not run"
    return cell


def _computed(row: dict, column: str, about: dict, paper: float) -> Cell:
    cell = Cell(column, about["quantity"], paper)
    if row.get("arch") is None:
        return cell
    lengths = (about.get("src_len", 10), about.get("tgt_len", 10))
    flags = tuple(row.get("model_flags", ()))
    embeddings = about.get("embeddings", "shared")
    counts = _count(row["arch"], about["vocab_size"], *lengths, embeddings, flags)
    cell.ours = counts[about["quantity"]]
    cell.difference, cell.status = cell.ours - paper, COMPUTED
    quantity = about["quantity"]
    if quantity.startswith("macs"):
        cell.plain, cell.attention = counts["macs"], counts["attention_macs"]
    elif quantity == "switchhead_layer_macs":
        cell.plain = counts["switchhead_layer_plain_macs"]
    return cell


@cache
def _count(
    arch: str, vocab_size: int, src_len: int, tgt_len: int, embeddings: str, flags: Tuple[str, ...]
) -> Dict[str, Any]:
    from moa_fairseq.evaluation.complexity import as_json, complexity

    return as_json(complexity(arch, vocab_size, src_len, tgt_len, embeddings, flags))
