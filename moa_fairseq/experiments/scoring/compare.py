"""The papers' numbers beside ours: paper, ours, difference, or why there is none.

  moa-fairseq compare --paper moa                       the tables of one paper
  moa-fairseq compare --measured                        only what was run
  moa-fairseq compare runs/quickstart_moa runs/B        only these runs

Scores come from results/measured/, where `moa-fairseq recipe ... --record` puts them, or from run folders;
parameters and MACs are counted from the models. results/FORMAT.md describes the files and --json.

MoA's BLEU on WMT14 is compared twice. Its text is tokenised with split hyphens, so (multi-bleu), plain
multi-bleu.perl, is the score after one compound split, which the paper describes. (moa-release) is the score
that the script of MoA's release would print for the same output: it splits those hyphens a second time, which
adds about 0.9 BLEU for German and 0.8 for French.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.experiments.json_files import MAPPING, NUMBER, TEXT, check_kinds, read_json
from moa_fairseq.experiments.tables import Column, Table, page
from moa_fairseq.files import shipped

SCHEMA = {"name": "moa-fairseq compare", "version": 1}  # of --json: results/FORMAT.md
# What a run can have instead of a number; "no recipe" marks rows for which there is no recipe here.
STATUSES = ("not run", "running", "OOM", "diverged")
MEASURED = "measured"
COMPUTED = "computed"
NO_RECIPE = "no recipe"
NOT_PRINTED = "–"
_NOT_RUN = "–"  # in Markdown, where most cells of a paper's page have it
_LEGEND = (
    "In brackets: ours, with – for not run. No brackets: no recipe here, or, in the columns after the "
    "paper's, a further count of ours. Cache: bytes per token and layer."
)

# What a run may say about itself: how its number came about, in this order, and more.
_FACTS = {
    **dict.fromkeys(("status", "subset"), TEXT),
    **dict.fromkeys(("epochs", "updates", "checkpoints_averaged", "seed"), NUMBER),
    **dict.fromkeys(("hardware", "date", "commit"), TEXT),
}
_KINDS = {
    **dict.fromkeys(("experiment", "headline", "command", "row"), TEXT),
    **dict.fromkeys(("parameters", "train_seconds"), NUMBER),
    **dict.fromkeys(("metrics", "reproduces", "generation", "evaluation"), MAPPING),
    **_FACTS,
}
_REMEDY = "Restore it, or delete it: results/FORMAT.md describes the format."
SCORES = {  # metric → heading
    "multi_bleu": "multi-bleu",
    "compound_split_bleu": "compound-split",
    "sacrebleu": "sacreBLEU",
    "valid_ppl": "Valid ppl",
    "moa_release_bleu": "moa-release",
    "get_ende_bleu": "get-ende-bleu",
    "masked_lm_ppl": "Masked-LM ppl",
    "masked_lm_word_ppl": "word level",
    "lm_ppl": "LM ppl",
    "lm_bits": "bits per token",
    "accuracy": "Accuracy (%)",
    "lambada_acc": "LAMBADA (%)",
    "blimp_acc": "BLiMP (%)",
    "cbt_acc": "CBT (%)",
}
# What the command of a run says that may differ between seeds.
_OF_ONE_RUN = re.compile(r" --(set train\.seed=\S+|save-dir \S+|record( [^-]\S*)?|gpus \S+|restart)(?= |$)")
_FILE_OF_A_RECIPE = re.compile(r"(?<=recipe )configs/(?:\w+/)?(\w+)\.yaml")  # which may be called by its name


@dataclasses.dataclass
class Cell:
    """One printed number beside ours.

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
        raise UserError(f"--results {results}: there is no folder {printed} with the papers' tables.")
    papers = [_read(path, "paper", "title", "citation", "tables") for path in sorted(printed.glob("*.json"))]
    if paper is not None:
        check_choice("--paper", paper, [each["paper"] for each in papers])
        papers = [each for each in papers if each["paper"] == paper]
    runs = [_read_run(path) for path in run_files or sorted((results / "measured").glob("*.json"))]
    tables = []
    counted = []
    for each in papers:
        about = {key: each.get(key, each["paper"]) for key in ("paper", "name", "title", "citation")}
        for table in each["tables"]:
            rows = []
            for row in table["rows"]:
                own = [run for run in runs if _stands_for(run, each["paper"], table, row)]
                if own or not (measured or run_files):
                    cells = [*_cells(table, row, own)]
                    counted += [(cell, model) for cell, model in cells if model]
                    setting = row.get("setting")  # K, E and D where they stand in columns of their own
                    label = row["row"] + (" {K}K{E}E{D}D".format(**setting) if setting else "")
                    plain = [cell for cell, _ in cells]
                    rows.append(Row(label, row.get("arch"), plain, own, row.get("headline")))
            if rows:
                names = {
                    "table": table["table"],
                    "caption": table["caption"],
                    "notes": table.get("notes", []),
                }
                tables.append(PaperTable(**about, **names, rows=rows))
    line = "counting parameters and MACs, {n_fmt} of {total_fmt}{postfix}"  # on a terminal only
    with tqdm(
        dict.fromkeys(model for _, model in counted), bar_format=line, disable=None, leave=False
    ) as bar:
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
        elif cell.quantity == "switchhead_layer_macs":
            cell.plain = counts["switchhead_layer_plain_macs"]
            cell.cache = counts["cache_bytes"]
    matched = {id(run) for table in tables for row in table.rows for run in row.runs}
    return Comparison(tables, [run for run in runs if id(run) not in matched] if paper is None else [])


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
    check_kinds(data, _KINDS, str(path), _REMEDY)
    kinds = {name: TEXT if name.endswith("_signature") else NUMBER for name in data["metrics"]}
    check_kinds(data["metrics"], kinds, f"{path}: metrics", _REMEDY)
    if (data.get("status") or "not run") not in STATUSES:
        raise UserError(f"{path}: status {data['status'][:40]!r} must be one of {', '.join(STATUSES)}.")
    return {"name": path.stem if path.stem != "result" else path.absolute().parent.name, **data}


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
    shown = [column for column, paper in row["values"].items() if paper is not None]
    texts = dict(zip(reversed(shown), reversed(fields)))  # before them stand K, E and D, if anything
    for column, paper in row["values"].items():
        text = texts.get(column, NOT_PRINTED if paper is None else f"{paper}")
        # Where our number comes from: the column's description, with the row's changes.
        about = {**table["columns"].get(column, {}), **row.get("columns", {}).get(column, {})}
        if quantity := about.get("quantity"):
            model: tuple = ()
            if row.get("arch") is not None:
                names = ("src_len", "tgt_len", "embeddings")
                setting = tuple((name, about[name]) for name in names if name in about)
                model = (row["arch"], about["vocab_size"], tuple(row.get("model_flags", ())), setting)
            yield Cell(column, quantity, paper, text), model
            continue
        prefix = about.get("experiments", "")
        for metric in (about.get("metric"), *about.get("also", ())):  # compared with the same printed number
            cell = Cell(column, metric, paper, text)
            if metric and any(name.startswith(prefix) for name in row["experiments"]):
                own = [run for run in runs if run["experiment"].startswith(prefix)]
                cell.status = (own[-1].get("status") if own else None) or "not run"
                scores = [run["metrics"].get(metric) for run in own]
                if values := [score for score in scores if score is not None]:
                    cell.ours = statistics.mean(values)
                    cell.runs = len(values)
                    cell.status = MEASURED
                    if len(values) > 1:
                        cell.spread = statistics.stdev(values)
                    else:
                        cell.spread = None
                    cell.difference = cell.ours - paper
            yield cell, ()


@functools.cache
def _count(arch: str, vocab_size: int, flags: tuple[str, ...], setting: tuple) -> dict[str, Any]:
    from moa_fairseq.experiments.scoring.complexity import as_json, complexity

    return as_json(complexity(arch, vocab_size, model_flags=flags, **dict(setting)))


def render(comparison: Comparison, markdown: bool = False) -> str:
    """Every table, what has no recipe as the paper prints it, then the runs that stand for no row.

    Args:
        comparison: as of `load_comparison`.
        markdown: for Markdown instead of a terminal.
    """
    blocks: list[str | Table] = []
    columns = [Column("model", "Model", once=True), Column("measure", "Measure")]
    columns += [Column(head.lower(), head, ">") for head in ("Paper", "Ours", "Difference")]
    for table in comparison.tables:
        if f"### {table.title}" not in blocks:
            blocks += [f"### {table.title}", f"{table.citation}.", _LEGEND if markdown else ""]
        runs = list({id(run): run for row in table.rows for run in row.runs}.values())
        blocks.append(f"**Table {table.table}.** {table.caption}.")
        if markdown:
            blocks += _line_per_row(table)
        else:
            pairs = [(row, cell) for row in table.rows for cell in row.cells if cell.status != NO_RECIPE]
            blocks.append(Table(columns, [line for row, cell in pairs for line in lines_of(row, cell)]))
            blocks += _without_recipe(table)
        blocks += [_evidence(runs), " ".join(table.notes)]
    if runs := comparison.other:
        note = "Runs that differ only in their seed have one line: mean ± standard deviation."
        blocks += ["### Other runs", note, *_other(runs), _evidence(runs)]
    return page(blocks, markdown)


def _line_per_row(table: PaperTable) -> list[str | Table]:
    """A line for each row of a paper's table: its numbers with ours in brackets, then our further counts.

    A value that is the same in all lines stands in a sentence above them.
    """
    lines = []
    heads = {"row": "Model", "arch": "Architecture"}
    for row in table.rows:
        line = {"row": row.row, "arch": f"`{row.arch}`" if row.arch else ""}
        ours = defaultdict(list)  # column of the paper → ours, of each metric
        further = {}
        for cell in row.cells:
            first, *more = lines_of(row, cell)
            heads.setdefault(cell.column, cell.column)
            line[cell.column] = first["paper"]
            if cell.status != NO_RECIPE:
                ours[cell.column].append((first["measure"], first["ours"]))
            further.update({count["measure"]: count["ours"] for count in more})
        for column, scores in ours.items():
            texts = [_NOT_RUN if text == "not run" else text for _, text in scores]
            if len(scores) > 1:
                chains = [measure.removeprefix(f"{column} (").rstrip(")") for measure, _ in scores]
                heads[column] = f"{column} ({', '.join(chains)})"
            line[column] += f" ({', '.join(texts if set(texts) != {_NOT_RUN} else texts[:1])})"
        heads.update((measure, measure) for measure in further)
        lines.append({**line, **further})
    alike = [key for key in heads if len(lines) > 1 and len({line.get(key) for line in lines}) == 1]
    said = [f"{heads[key]} {text}" for key in alike if (text := lines[0].get(key))]
    columns = [Column(key, heads[key], "" if key in ("row", "arch") else ">") for key in heads]
    return [
        f"In all rows: {'; '.join(said)}." if said else "",
        Table([column for column in columns if column.key not in alike], lines),
    ]


def _without_recipe(table: PaperTable) -> list[str | Table]:
    """The numbers of a paper's table for which there is no recipe."""
    heads = dict.fromkeys(cell.column for row in table.rows for cell in row.cells)
    lines = []
    for row in table.rows:
        if printed := {cell.column: cell.printed for cell in row.cells if cell.status == NO_RECIPE}:
            lines.append({"model": row.row, **printed})
    columns = [Column("model", "Model"), *(Column(head, head, ">") for head in heads)]
    return ["Printed there, without a recipe here:", Table(columns, lines)] if lines else []


def lines_of(row: Row, cell: Cell) -> list[dict[str, str]]:
    """A printed number beside ours: the values of Model, Measure, Paper, Ours and Difference.

    Of MACs the plain count, that of the attention and the cache follow. Counts but the cache's are in
    millions, their differences in per cent.

    Args:
        row: for the model's name, and whether several metrics are compared with one number.
        cell: the number.
    """
    line = {"model": row.row, "measure": cell.column, "paper": cell.printed, "ours": cell.status}
    if cell.status == COMPUTED and cell.ours is not None:
        paper = cell.paper or 0
        decimals = max(1, len(f"{paper / 1e6:g}".partition(".")[2]))
        line["ours"] = f"{cell.ours / 1e6:.{decimals}f}M"
        if cell.difference is not None:
            percent = round(100 * cell.difference / paper, 1) or 0.0  # no "-0.0"
            line.update(paper=f"{paper / 1e6:g}M", difference=f"{percent:+.1f} %")
        beside = {"plain count": cell.plain, "attention alone": cell.attention}
        more = [
            {"model": row.row, "measure": f"{cell.column}, {name}", "ours": f"{count / 1e6:.1f}M"}
            for name, count in beside.items()
            if count
        ]
        if cell.cache is not None:
            measure = "cache, bytes per token and layer"
            more.append({"model": row.row, "measure": measure, "ours": f"{cell.cache:,}"})
        return [line, *more]
    if [other.column for other in row.cells].count(cell.column) > 1:
        # The printed number is compared with several chains.
        line["measure"] += f" ({SCORES.get(cell.quantity or '', cell.quantity)})"
    if cell.ours is not None:
        if cell.spread is None:
            spread = ""
        else:
            spread = f" ± {cell.spread:.2f} ({cell.runs} runs)"
        line.update(ours=f"{cell.ours:.2f}{spread}", difference=f"{cell.difference:+.2f}")
    return [line]


def _other(runs: list[dict]) -> list[Table]:
    """A table for each set of metrics; runs that differ in their seed alone have one line."""
    alike: dict[tuple, list[dict]] = defaultdict(list)
    for run in runs:
        keys = ("subset", "status", "updates", "parameters", "checkpoints_averaged", "generation")
        command = _OF_ONE_RUN.sub("", run.get("command") or "")
        command = _FILE_OF_A_RECIPE.sub(r"\1", command)
        group = alike[(run["experiment"], command, *(str(run.get(key)) for key in keys))]
        seeds = {None, *(other.get("seed") for other in group)} if group else {}
        (alike[(id(run),)] if run.get("seed") in seeds else group).append(run)
    tables: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for group in alike.values():
        first = group[0]
        line = {"run": first["name"] if len(group) == 1 else f"{first['experiment']} ({len(group)} seeds)"}
        line["status"] = first.get("status")
        found = []
        for metric in SCORES:
            values = [score for run in group if (score := run["metrics"].get(metric)) is not None]
            if values:
                if len(values) > 1:
                    spread = f" ± {statistics.stdev(values):.2f}"
                else:
                    spread = ""
                line[metric] = f"{statistics.mean(values):.2f}{spread}"
                found.append(metric)
        if first.get("parameters"):
            line["size"] = f"{first['parameters'] / 1e6:.1f}M"
        if first.get("train_seconds") is not None:
            minutes = statistics.mean(run.get("train_seconds") or 0 for run in group) / 60
            if minutes < 60:
                line["time"] = f"{minutes:.1f} min"
            else:
                line["time"] = f"{minutes / 60:.1f} h"
        tables[tuple(found)].append(line)
    columns = [Column("run", "Run"), *(Column(key, head, ">") for key, head in SCORES.items())]
    columns += [Column("size", "#Params", ">"), Column("time", "Training", ">"), Column("status", "Status")]
    return [Table(columns, lines) for lines in tables.values()]


def _evidence(runs: list[dict]) -> str:
    """How each number came about; runs that differ only in score and seed have one line."""
    alike: dict[tuple[str, ...], list[dict]] = defaultdict(list)
    for run in runs:
        metrics = run["metrics"]
        headline = run.get("headline") or ""
        facts = {key: run.get(key) for key in _FACTS if key != "seed"}
        facts["commit"] = re.sub(r"^(\w{10})\w+", r"\1", run.get("commit") or "")
        facts.update({**(run.get("generation") or {}), **(run.get("evaluation") or {})})
        facts["sacreBLEU"] = metrics.get("sacrebleu_signature")
        said = [SCORES.get(headline, headline)] if metrics.get(headline) else []
        for key, value in facts.items():
            if value not in (None, "") and not isinstance(value, dict):  # dicts are of groups of sentences
                said.append(f"{key.replace('_', ' ')} {value}")
        alike[tuple(said)].append(run)
    lines = []
    for shared, group in alike.items():
        said = list(shared)
        seeds = [run.get("seed") for run in group]
        names = []
        for run, seed in zip(group, seeds):
            score = run["metrics"].get(run.get("headline"))
            parts = [f"{score:.2f}"] if score else []
            parts += [f"seed {seed}"] if len(set(seeds)) > 1 else []
            names.append(f"`{run['name']}`" + (f" ({', '.join(parts)})" if parts else ""))
        if len(set(seeds)) == 1 and seeds[0] is not None:
            said.append(f"seed {seeds[0]}")
        lines.append(f"- {', '.join(names)}: {', '.join(said) or 'nothing else is recorded'}")
    return "\n".join(lines)


def default_results() -> Path:
    """results/ of this package, else of the working directory."""
    if shipped("results").is_dir():
        return shipped("results")
    return Path("results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq compare`."""
    add = parser.add_argument
    add("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help="show only these runs")
    add("--paper", metavar="NAME", help="only the tables of this paper: moa, mae, switchhead, moh, ...")
    add("--measured", action="store_true", help="only rows that were measured")
    add("--results", type=Path, metavar="DIR", help="folder with papers/ and measured/")
    add("--markdown", action="store_true", help="print Markdown")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Read, match, and print."""
    files = [folder / "result.json" for folder in args.run_dirs]
    comparison = load_comparison(args.results or default_results(), files, args.paper, args.measured)
    if args.json:
        print(json.dumps({"schema": SCHEMA, **dataclasses.asdict(comparison)}, indent=2, ensure_ascii=False))
    else:
        print(render(comparison, args.markdown), end="")
    return 0
