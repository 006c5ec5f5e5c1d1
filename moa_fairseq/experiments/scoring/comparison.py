"""The papers' tables and our runs, matched; parameters and MACs counted from the models."""

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.experiments.records.json_files import MAPPING, NUMBER, TEXT, check_kinds, read_json
from moa_fairseq.experiments.tables import values_of

# The statuses of a run that has no number
STATUSES = ("not run", "running", "OOM", "diverged")
MEASURED = "measured"
COMPUTED = "computed"
NO_RECIPE = "no recipe"  # for a row that no recipe here reproduces
NOT_PRINTED = "–"
# The kinds of values in a result.json; FACTS say how its number came about, in the order of the output
FACTS = {
    "status": TEXT,
    "subset": TEXT,
    "epochs": NUMBER,
    "updates": NUMBER,
    "checkpoints_averaged": NUMBER,
    "seed": NUMBER,
    "hardware": TEXT,
    "date": TEXT,
    "commit": TEXT,
}
_KINDS = FACTS | {
    "experiment": TEXT,
    "headline": TEXT,
    "command": TEXT,
    "row": TEXT,
    "parameters": NUMBER,
    "train_seconds": NUMBER,
    "metrics": MAPPING,
    "reproduces": MAPPING,
    "generation": MAPPING,
    "evaluation": MAPPING,
}
_REMEDY = "Restore it, or delete it: results/FORMAT.md describes the format."


@dataclasses.dataclass
class Cell:
    """One printed number and ours.

    Args:
        column: the heading of its column in the paper.
        quantity: the name of a metric, or of a count such as "parameters" in `moa-fairseq complexity --json`;
            None if there is nothing to compare.
        paper: the number in the paper; None for a count that the paper does not print.
        printed: the text of the number in the paper.
        ours: the mean over our runs, or our count; None without either.
        spread: the sample standard deviation of our runs; None for fewer than two.
        difference: our number minus the paper's.
        status: MEASURED, COMPUTED, or why there is no number: one of STATUSES or NO_RECIPE.
        runs: the number of our runs with this metric.
        plain: for MACs, our count of every matrix product once, in the model or in SwitchHead's layer.
        attention: for the MACs of a whole model, our count for the attentions alone.
        cache: for MACs, the bytes that a decoder's layer caches for a token, with 16 bits per number.
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
        row: the name of the row in the paper, with K, E and D if the paper has columns for them.
        arch: the name of the architecture, or None.
        cells: the numbers of the row.
        runs: the result.json of each run of this row.
        headline: the name of the task in README.md's table, or None.
    """

    row: str
    arch: str | None
    cells: list[Cell]
    runs: list[dict]
    headline: str | None = None

    def cells_of(self, column: str) -> list[Cell]:
        """The numbers of a column, of which there are several if several metrics are compared."""
        return [cell for cell in self.cells if cell.column == column]


@dataclasses.dataclass
class PaperTable:
    """One table of one paper.

    Args:
        paper: the name of the paper for --paper.
        name: the short name of the paper in texts.
        title: the title of the paper.
        citation: the citation of the paper.
        table: the number of the table in the paper.
        caption: the caption of the table.
        notes: sentences below the table.
        rows: the rows in the order of the paper.
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
    """The papers' tables with our numbers.

    Args:
        tables: the tables of all papers.
        other: the result.json of each run that belongs to no row; empty if only one paper was asked for.
    """

    tables: list[PaperTable]
    other: list[dict]


def load_comparison(
    results: Path, run_files: Sequence[Path] = (), paper: str | None = None, measured: bool = False
) -> Comparison:
    """Read the papers and the runs, match them, and count the parameters and MACs that the papers print.

    A run belongs to a row if its `reproduces` names paper, table and row, or if it names another table of the
    paper and the row lists its experiment.

    Args:
        results: the folder with papers/ and measured/.
        run_files: the result.json files of run folders, which are compared instead of those in measured/.
        paper: the only paper whose tables are read; None: all papers.
        measured: whether rows without a run are left out; with run_files they always are.

    Raises:
        UserError: for a missing folder, and for a file that has another format than results/FORMAT.md says.
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
    tables: list[PaperTable] = []
    line = "counting parameters and MACs, paper {n_fmt} of {total_fmt}"
    for content in tqdm(papers, bar_format=line, disable=None, leave=False):  # only on a terminal
        tables += _tables(content, runs, only_measured=bool(measured or run_files))
    if paper is not None:
        return Comparison(tables, [])
    matched: set[int] = set()
    for table in tables:
        for row in table.rows:
            matched.update(map(id, row.runs))
    return Comparison(tables, [run for run in runs if id(run) not in matched])


def _tables(content: dict, runs: list[dict], only_measured: bool) -> list[PaperTable]:
    """The tables of a paper that have rows."""
    paper = content["paper"]
    tables = []
    for table in content["tables"]:
        rows = []
        for row in table["rows"]:
            runs_of_row = [run for run in runs if _stands_for(run, paper, table, row)]
            if runs_of_row or not only_measured:
                rows.append(_row(table, row, runs_of_row))
        if rows:
            tables.append(
                PaperTable(
                    paper=paper,
                    name=content.get("name", paper),
                    title=content["title"],
                    citation=content["citation"],
                    table=table["table"],
                    caption=table["caption"],
                    notes=table.get("notes", []),
                    rows=rows,
                )
            )
    return tables


def _row(table: dict, row: dict, runs: list[dict]) -> Row:
    """A row of a table with the scores of its runs and the counts of its model."""
    texts = _printed_texts(row)
    cells = []
    for column, number in row["values"].items():
        # The column says where our number comes from; the row may change it
        source = table["columns"].get(column, {}) | row.get("columns", {}).get(column, {})
        if quantity := source.get("quantity"):
            cell = Cell(column, quantity, number, texts[column])
            if row.get("arch"):
                _fill_in_count(cell, row, source)
            cells.append(cell)
        else:
            prefix = source.get("experiments", "")
            has_recipe = any(name.startswith(prefix) for name in row["experiments"])
            scored = [run for run in runs if run["experiment"].startswith(prefix)]
            # Several metrics may be compared with one printed number
            for metric in (source.get("metric"), *source.get("also", ())):
                cell = Cell(column, metric, number, texts[column])
                if metric and has_recipe:
                    _fill_in_score(cell, scored)
                cells.append(cell)
    label = row["row"]
    if setting := row.get("setting"):  # the columns K, E and D of the paper
        label += " {K}K{E}E{D}D".format(**setting)
    return Row(label, row.get("arch"), cells, runs, row.get("headline"))


def _printed_texts(row: dict) -> dict[str, str]:
    """Column → text of its number in the paper."""
    texts = {}
    for column, number in row["values"].items():
        texts[column] = NOT_PRINTED if number is None else f"{number}"
    columns = [column for column, number in row["values"].items() if number is not None]
    fields = [field for field in row.get("printed", "").split(" | ") if field not in ("", "-")]
    # The printed row may begin with K, E and D, which are not among the columns
    return texts | dict(zip(reversed(columns), reversed(fields)))


def _fill_in_count(cell: Cell, row: dict, source: dict) -> None:
    """Count the model of a row, and put its numbers into a cell."""
    names = ("src_len", "tgt_len", "embeddings")
    setting = {name: source[name] for name in names if name in source}
    flags = tuple(row.get("model_flags", ()))
    counts = _count(row["arch"], source["vocab_size"], model_flags=flags, **setting)
    quantity = source["quantity"]
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


@functools.cache
def _count(*arguments: Any, **settings: Any) -> dict[str, Any]:
    """The counts of a model, see `as_json`; the arguments are those of `complexity`."""
    from moa_fairseq.experiments.scoring.complexity import as_json, complexity

    return as_json(complexity(*arguments, **settings))


def _read(path: Path, *keys: str) -> dict:
    """The mapping in a JSON file that has these keys."""
    try:
        data = read_json(path, _REMEDY)
    except FileNotFoundError as error:
        raise UserError(
            f"There is no {path}: the run was not scored, or it is another folder."
        ) from error
    check_kinds(data, {}, str(path), _REMEDY, required=keys)
    return data


def _read_run(path: Path) -> dict:
    """Read a result.json, and check that every value has the type that the tables need.

    "name" is added, the name of the file or run folder, because several runs may have one experiment.
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
    """Whether a run reproduces a row, by the row that it names or by its experiment."""
    target = run.get("reproduces") or {}
    if target.get("paper") != paper:
        return False
    if str(target.get("table")) == table["table"] and "row" in target:
        return target["row"] == row["row"]
    # "EXPERIMENT: ROW" for a run of one of the recipe's `rows`
    name = run["experiment"] + (f": {run['row']}" if run.get("row") else "")
    return name in row["experiments"]


def _fill_in_score(cell: Cell, runs: list[dict]) -> None:
    """Put the mean of the runs' scores into a cell; without a score, the status of the last run."""
    scores = [run["metrics"].get(cell.quantity) for run in runs]
    values = [score for score in scores if score is not None]
    if not values:
        last = runs[-1] if runs else {}
        cell.status = last.get("status") or "not run"
        return
    cell.ours = statistics.mean(values)
    cell.runs = len(values)
    cell.status = MEASURED
    cell.spread = statistics.stdev(values) if len(values) > 1 else None
    if cell.paper is not None:
        cell.difference = cell.ours - cell.paper
