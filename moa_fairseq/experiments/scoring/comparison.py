"""The papers' tables and our runs, matched; parameters and MACs counted from the models."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.experiments.records.json_files import MAPPING, NUMBER, TEXT, check_kinds, read_json
from moa_fairseq.experiments.tables import values_of

# What a run can have instead of a number; "no recipe" marks rows for which there is no recipe here.
STATUSES = ("not run", "running", "OOM", "diverged")
MEASURED = "measured"
COMPUTED = "computed"
NO_RECIPE = "no recipe"
NOT_PRINTED = "–"
# What a run may say about itself: how its number came about, in this order, and more.
FACTS = dict.fromkeys(("status", "subset"), TEXT)
FACTS |= dict.fromkeys(("epochs", "updates", "checkpoints_averaged", "seed"), NUMBER)
FACTS |= dict.fromkeys(("hardware", "date", "commit"), TEXT)
_KINDS = dict.fromkeys(("experiment", "headline", "command", "row"), TEXT)
_KINDS |= dict.fromkeys(("parameters", "train_seconds"), NUMBER)
_KINDS |= dict.fromkeys(("metrics", "reproduces", "generation", "evaluation"), MAPPING)
_KINDS |= FACTS
_REMEDY = "Restore it, or delete it: results/FORMAT.md describes the format."


@dataclasses.dataclass
class Cell:
    """One printed number and ours.

    Args:
        column: its heading in the paper.
        quantity: "parameters" or another count as `moa-fairseq complexity --json` names it, the name of a
            metric, or None.
        paper: the printed number; None for a count that the paper does not print.
        printed: the number as it stands in the paper.
        ours: the mean over the runs, or the count.
        spread: the runs' sample standard deviation where there are several.
        difference: ours minus the paper's.
        status: MEASURED, COMPUTED, or why there is no number: one of STATUSES or NO_RECIPE.
        runs: how many have such a number.
        plain: for MACs, every matrix product counted once, in the model or in SwitchHead's layer.
        attention: MACs of the attentions alone, for a whole model.
        cache: bytes of a decoder's cache a token and layer, in 16 bits.
    """

    column: str
    quantity: str | None
    paper: float | None
    printed: str
    ours: float | None = None
    spread: float | None = None
    difference: float | None = None
    status: str = NO_RECIPE
    runs: int = 0
    plain: int | None = None
    attention: int | None = None
    cache: int | None = None


@dataclasses.dataclass
class Row:
    """One line of a table.

    Args:
        row: its name in the paper, with K, E and D where they stand in columns of their own.
        arch: the architecture that is counted.
        cells: its numbers.
        runs: the result.json of each run that stands for it.
        headline: the task, in README.md's table.
    """

    row: str
    arch: str | None
    cells: list[Cell]
    runs: list[dict]
    headline: str | None = None


@dataclasses.dataclass
class PaperTable:
    """One table of one paper.

    Args:
        paper: as --paper names it.
        name: the paper's short name.
        title, citation: of the paper.
        table: the table's number there.
        caption: what it shows.
        notes: sentences below it.
        rows: in the paper's order.
    """

    paper: str
    name: str
    title: str
    citation: str
    table: str
    caption: str
    notes: list[str]
    rows: list[Row]


@dataclasses.dataclass
class Comparison:
    """What is compared.

    Args:
        tables: of all papers.
        other: the result.json of each run that stands for no row; empty where one paper alone was asked for.
    """

    tables: list[PaperTable]
    other: list[dict]


def load_comparison(
    results: Path, run_files: Sequence[Path] = (), paper: str | None = None, measured: bool = False
) -> Comparison:
    """Read the papers and the runs, match them, and count what the papers print of the models' costs.

    A run stands for a row when its `reproduces` names paper, table and row, or names another table of the
    paper and the row lists its experiment.

    Args:
        results: the folder with papers/ and measured/.
        run_files: result.json files of run folders, compared instead of all that is in measured/.
        paper: only this one's tables.
        measured: only rows for which a run stands, as always with run_files.

    Raises:
        UserError: for a missing folder or a file that is not as described.
    """
    printed = results / "papers"
    if not printed.is_dir():
        raise UserError(
            f"--results {results}: there is no folder {printed} with the papers' tables."
        )
    papers = []
    for path in sorted(printed.glob("*.json")):
        papers.append(_read(path, "paper", "title", "citation", "tables"))
    if paper is not None:
        check_choice("--paper", paper, values_of(papers, "paper"))
        papers = [content for content in papers if content["paper"] == paper]
    runs = list(map(_read_run, run_files or sorted((results / "measured").glob("*.json"))))
    counted: list[tuple[Cell, tuple]] = []
    tables = []
    for content in papers:
        about = {}
        for key in ("paper", "name", "title", "citation"):
            about[key] = content.get(key, content["paper"])
        for table in content["tables"]:
            rows = []
            for row in table["rows"]:
                of_row = [run for run in runs if _stands_for(run, content["paper"], table, row)]
                if of_row or not (measured or run_files):
                    rows.append(_row(table, row, of_row, counted))
            if rows:
                about.update(
                    table=table["table"], caption=table["caption"], notes=table.get("notes", [])
                )
                tables.append(PaperTable(**about, rows=rows))
    _fill_in_counts(counted)
    if paper is not None:
        return Comparison(tables, [])
    matched = {id(run) for table in tables for row in table.rows for run in row.runs}
    return Comparison(tables, [run for run in runs if id(run) not in matched])


def _row(table: dict, row: dict, runs: list[dict], counted: list[tuple[Cell, tuple]]) -> Row:
    """A row of a table; its cells that are counted are added to `counted`, with the arguments of `_count`."""
    cells = []
    for cell, model in _cells(table, row, runs):
        cells.append(cell)
        if model:
            counted.append((cell, model))
    label = row["row"]
    if setting := row.get("setting"):  # K, E and D where they stand in columns of their own
        label += " {K}K{E}E{D}D".format(**setting)
    return Row(label, row.get("arch"), cells, runs, row.get("headline"))


def _fill_in_counts(counted: list[tuple[Cell, tuple]]) -> None:
    line = "counting parameters and MACs, {n_fmt} of {total_fmt}{postfix}"  # on a terminal only
    models = dict.fromkeys(model for _, model in counted)
    with tqdm(models, bar_format=line, disable=None, leave=False) as bar:
        for model in bar:
            bar.set_postfix_str(model[0])
            _count(*model)
    for cell, model in counted:
        counts = _count(*model)
        quantity = cell.quantity or ""
        cell.ours = counts[quantity]
        cell.status = COMPUTED
        if cell.paper is not None:
            cell.difference = counts[quantity] - cell.paper
        if quantity.startswith("macs"):
            cell.plain = counts["macs"]
            cell.attention = counts["attention_macs"]
            cell.cache = counts["cache_bytes"]
        elif quantity == "switchhead_layer_macs":
            cell.plain = counts["switchhead_layer_plain_macs"]
            cell.cache = counts["cache_bytes"]


def _read(path: Path, *keys: str) -> dict:
    try:
        data = read_json(path, _REMEDY)
    except FileNotFoundError as error:
        raise UserError(
            f"There is no {path}: the run was not scored, or it is another folder."
        ) from error
    check_kinds(data, {}, str(path), _REMEDY, required=keys)
    return data


def _read_run(path: Path) -> dict:
    """One result.json, every value of the kind that the tables need.

    "name" is added: an experiment may have been run more than once, and each run has a file or a folder.
    """
    data = _read(path, "experiment", "metrics")
    check_kinds(data, _KINDS, str(path), _REMEDY)
    kinds = {name: TEXT if name.endswith("_signature") else NUMBER for name in data["metrics"]}
    check_kinds(data["metrics"], kinds, f"{path}: metrics", _REMEDY)
    if (data.get("status") or "not run") not in STATUSES:
        raise UserError(
            f"{path}: status {data['status'][:40]!r} must be one of {', '.join(STATUSES)}."
        )
    name = path.stem if path.stem != "result" else path.absolute().parent.name
    return {"name": name} | data


def _stands_for(run: dict, paper: str, table: dict, row: dict) -> bool:
    target = run.get("reproduces") or {}
    same_table = str(target.get("table")) == table["table"] and "row" in target
    if same_table:
        stands = target.get("row") == row["row"]
    else:  # one of the recipe's `rows` is named with it
        name = run["experiment"] + (f": {run['row']}" if run.get("row") else "")
        stands = name in row["experiments"]
    return stands and target.get("paper") == paper


def _cells(table: dict, row: dict, runs: list[dict]) -> Iterator[tuple[Cell, tuple]]:
    """The cells of a row, with scores filled in; of those that are counted, the arguments of `_count`."""
    fields = [field for field in row.get("printed", "").split(" | ") if field not in ("", "-")]
    columns = [column for column, paper in row["values"].items() if paper is not None]
    # Before them stand K, E and D, if anything
    texts = dict(zip(reversed(columns), reversed(fields)))
    for column, paper in row["values"].items():
        text = texts.get(column, NOT_PRINTED if paper is None else f"{paper}")
        # Where our number comes from: the column's description, with the row's changes.
        about = table["columns"].get(column, {}) | row.get("columns", {}).get(column, {})
        if quantity := about.get("quantity"):
            model: tuple = ()
            if row.get("arch") is not None:
                names = ("src_len", "tgt_len", "embeddings")
                setting = tuple((name, about[name]) for name in names if name in about)
                model = (
                    row["arch"],
                    about["vocab_size"],
                    tuple(row.get("model_flags", ())),
                    setting,
                )
            yield Cell(column, quantity, paper, text), model
            continue
        prefix = about.get("experiments", "")
        # Compared with the same printed number
        for metric in (
            about.get("metric"),
            *about.get("also", ()),
        ):
            cell = Cell(column, metric, paper, text)
            if metric and any(name.startswith(prefix) for name in row["experiments"]):
                of_cell = [run for run in runs if run["experiment"].startswith(prefix)]
                cell.status = (of_cell[-1].get("status") if of_cell else None) or "not run"
                scores = [run["metrics"].get(metric) for run in of_cell]
                if values := [score for score in scores if score is not None]:
                    cell.ours = statistics.mean(values)
                    cell.runs = len(values)
                    cell.status = MEASURED
                    cell.spread = statistics.stdev(values) if len(values) > 1 else None
                    cell.difference = cell.ours - paper
            yield cell, ()


@functools.cache
def _count(arch: str, vocab_size: int, flags: tuple[str, ...], setting: tuple) -> dict[str, Any]:
    from moa_fairseq.experiments.scoring.complexity import as_json, complexity

    return as_json(complexity(arch, vocab_size, model_flags=flags, **dict(setting)))
