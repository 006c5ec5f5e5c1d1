"""The papers' tables and the measured runs, read from results/ and laid side by side.

results/FORMAT.md describes the files: papers/*.json holds what is printed, measured/*.json what was run.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
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
    **dict.fromkeys(
        ("epochs", "updates", "checkpoints_averaged", "seed", "parameters", "train_seconds"), NUMBER
    ),
    **dict.fromkeys(("metrics", "reproduces", "generation", "evaluation"), MAPPING),
}
_REMEDY = "Restore it, or delete it: results/FORMAT.md describes the format."


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
    """One line of a table. arch: the one that is counted; headline: the task, in README.md's table."""

    row: str
    arch: Optional[str]
    cells: List[Cell]
    runs: List[dict]
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


def load_comparison(results: Path, run_files: Sequence[Path] = ()) -> Comparison:
    """Read `results`/papers and the runs, and match them.

    run_files: result.json files of run folders, compared instead of all that is in `results`/measured; rows
    that none of them stands for are left out. A run stands for a row when its `reproduces` names paper, table
    and row, or names another table of the paper and the row lists its experiment. Raises UserError for a
    missing folder or a file that is not as described.
    """
    printed = results / "papers"
    if not printed.is_dir():
        raise UserError(f"--results {results}: there is no folder {printed} with the papers' tables.")
    papers = [_read(path, "paper", "title", "citation", "tables") for path in sorted(printed.glob("*.json"))]
    runs = [_read_run(path) for path in run_files or sorted((results / "measured").glob("*.json"))]
    tables = []
    for paper in papers:
        about = {key: paper[key] for key in ("paper", "title", "citation")}
        for table in paper["tables"]:
            rows = [_row(paper["paper"], table, row, runs) for row in table["rows"]]
            names = {"table": table["table"], "caption": table["caption"], "notes": table.get("notes", [])}
            if rows := [row for row in rows if row.runs or not run_files]:
                tables.append(Table(**about, **names, rows=rows))
    matched = {id(run) for table in tables for row in table.rows for run in row.runs}
    return Comparison(tables, [run for run in runs if id(run) not in matched])


def _read(path: Path, *keys: str) -> dict:
    try:
        data = read_json(path, _REMEDY)
    except FileNotFoundError as error:
        raise UserError(f"There is no {path}: the run was not scored, or it is another folder.") from error
    check_kinds(data, {}, str(path), _REMEDY, required=keys)
    return data


def _read_run(path: Path) -> dict:
    """One result.json, every value of the kind that the tables need.

    "name" is added: an experiment may have been run more than once, and each run has a file or a folder.
    """
    data = _read(path, "experiment", "metrics")
    check_kinds(data, _RUN, str(path), _REMEDY)
    kinds = {name: TEXT if name.endswith("_signature") else NUMBER for name in data["metrics"]}
    check_kinds(data["metrics"], kinds, f"{path}: metrics", _REMEDY)
    if (data.get("status") or "not run") not in STATUSES:
        raise UserError(f"{path}: status {data['status'][:40]!r} must be one of {', '.join(STATUSES)}.")
    return {"name": path.stem if path.stem != "result" else path.absolute().parent.name, **data}


def _row(paper: str, table: dict, row: dict, runs: List[dict]) -> Row:
    """A row of a paper's table, and of all runs those that stand for it."""
    own = []
    for run in runs:
        target = run.get("reproduces") or {}
        same_table = str(target.get("table")) == table["table"] and "row" in target
        stands = target.get("row") == row["row"] if same_table else run["experiment"] in row["experiments"]
        own += [run] if stands and target.get("paper") == paper else []
    cells = []
    for column, value in row["values"].items():
        # Where our number comes from: the column's description, with the row's changes. Further metrics may
        # be compared with the same printed number.
        about = {**table["columns"].get(column, {}), **row.get("columns", {}).get(column, {})}
        for metric in (about.get("metric"), *about.get("also", ())):
            cells.append(_cell(row, column, {**about, "metric": metric}, value, own))
    setting = row.get("setting")  # K, E and D where they stand in columns of their own
    label = row["row"] + (" {K}K{E}E{D}D".format(**setting) if setting else "")
    return Row(label, row.get("arch"), cells, own, row.get("headline"))


def _cell(row: dict, column: str, about: dict, paper: float, runs: List[dict]) -> Cell:
    quantity, prefix = about.get("quantity"), about.get("experiments", "")
    cell = Cell(column, quantity or about["metric"], paper)
    if quantity and row.get("arch") is not None:
        names = ("src_len", "tgt_len", "embeddings")
        setting = {name: about[name] for name in names if name in about}
        counts = _count(row["arch"], about["vocab_size"], tuple(row.get("model_flags", ())), **setting)
        cell.ours, cell.status = counts[quantity], COMPUTED
        if quantity.startswith("macs"):
            cell.plain, cell.attention = counts["macs"], counts["attention_macs"]
        elif quantity == "switchhead_layer_macs":
            cell.plain = counts["switchhead_layer_plain_macs"]
    elif cell.quantity and not quantity and any(name.startswith(prefix) for name in row["experiments"]):
        runs = [run for run in runs if run["experiment"].startswith(prefix)]
        scores = [run["metrics"].get(cell.quantity) for run in runs]
        values = [score for score in scores if score is not None]
        cell.status = (runs[-1].get("status") if runs else None) or "not run"
        if values:
            cell.ours, cell.runs, cell.status = statistics.mean(values), len(values), MEASURED
            cell.spread = statistics.stdev(values) if len(values) > 1 else None
    if cell.ours is not None:
        cell.difference = cell.ours - paper
    return cell


@cache
def _count(arch: str, vocab_size: int, model_flags: Tuple[str, ...], **setting: Any) -> Dict[str, Any]:
    from moa_fairseq.evaluation.complexity import as_json, complexity

    return as_json(complexity(arch, vocab_size, model_flags=model_flags, **setting))
