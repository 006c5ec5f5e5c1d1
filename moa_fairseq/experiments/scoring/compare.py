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

import argparse
import dataclasses
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from moa_fairseq.experiments.records.json_files import selected
from moa_fairseq.experiments.scoring.comparison import (
    COMPUTED,
    FACTS,
    NO_RECIPE,
    Cell,
    Comparison,
    PaperTable,
    Row,
    load_comparison,
)
from moa_fairseq.experiments.tables import Column, Table, page
from moa_fairseq.files import shipped

SCHEMA = {"name": "moa-fairseq compare", "version": 1}  # in --json; see results/FORMAT.md
_NOT_RUN = "–"  # short for "not run" in Markdown, because most cells of a paper's page have it
_LEGEND = (
    "In brackets: ours, with – for not run. No brackets: no recipe here, or, in the columns after the "
    "paper's, a further count of ours. Cache: bytes per token and layer."
)

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


def render(comparison: Comparison, markdown: bool = False) -> str:
    """The text of a comparison: every table, the numbers without a recipe, and the runs of no row.

    Args:
        comparison: what `load_comparison` returns.
        markdown: whether the text is Markdown, not for a terminal.
    """
    blocks: list[str | Table] = []
    for table in comparison.tables:
        if f"### {table.title}" not in blocks:
            blocks += [f"### {table.title}", f"{table.citation}.", _LEGEND if markdown else ""]
        blocks.append(f"**Table {table.table}.** {table.caption}.")
        blocks += _line_per_row(table) if markdown else _line_per_cell(table)
        runs: list[dict] = []
        for row in table.rows:
            runs += [run for run in row.runs if not any(run is other for other in runs)]
        blocks += [_evidence(runs), " ".join(table.notes)]
    if runs := comparison.other:
        note = "Runs that differ only in their seed have one line: mean ± standard deviation."
        blocks += ["### Other runs", note, *_other(runs), _evidence(runs)]
    return page(blocks, markdown)


def _line_per_cell(table: PaperTable) -> list[str | Table]:
    """A line for each number of a paper's table, and the numbers without a recipe below."""
    columns = [
        Column("model", "Model", once=True),
        Column("measure", "Measure"),
        Column("paper", "Paper", ">"),
        Column("ours", "Ours", ">"),
        Column("difference", "Difference", ">"),
    ]
    lines = []
    for row in table.rows:
        for cell in row.cells:
            if cell.status != NO_RECIPE:
                lines += lines_of(row, cell)
    return [Table(columns, lines), *_without_recipe(table)]


def _line_per_row(table: PaperTable) -> list[str | Table]:
    """A line for each row of a paper's table: the paper's numbers, ours in brackets, and our further counts.

    A value that is the same in all lines stands in a sentence above the table.
    """
    heads = {"row": "Model", "arch": "Architecture"}
    lines = []
    for row in table.rows:
        line = {"row": row.row, "arch": f"`{row.arch}`" if row.arch else ""}
        further: dict[str, str] = {}
        for cell in row.cells:
            cells = row.cells_of(cell.column)
            heads.setdefault(cell.column, cell.column)
            if cell.status != NO_RECIPE and len(cells) > 1:
                heads[cell.column] = f"{cell.column} ({', '.join(map(_metric_name, cells))})"
            line[cell.column] = _paper_and_ours(cells)
            further |= _further_counts(cell)
        for measure in further:
            heads[measure] = measure
        lines.append(line | further)
    columns = []
    shared = []
    for key, head in heads.items():
        if len(lines) == 1 or len({line.get(key) for line in lines}) > 1:
            columns.append(Column(key, head, "" if key in ("row", "arch") else ">"))
        elif lines[0].get(key):
            shared.append(f"{head} {lines[0][key]}")
    return [f"In all rows: {'; '.join(shared)}." if shared else "", Table(columns, lines)]


def _paper_and_ours(cells: list[Cell]) -> str:
    """The text of a printed number, and of ours by each metric in brackets: "27.3 (27.1, 27.9)"."""
    paper = _paper_text(cells[0])
    statuses = {cell.status for cell in cells}
    if statuses == {NO_RECIPE}:
        return paper
    if statuses == {"not run"}:
        return f"{paper} ({_NOT_RUN})"
    ours = ", ".join(map(_our_text, cells))
    return f"{paper} ({ours.replace('not run', _NOT_RUN)})"


def _without_recipe(table: PaperTable) -> list[str | Table]:
    """The numbers of a paper's table for which there is no recipe."""
    columns = {"model": Column("model", "Model")}
    lines = []
    for row in table.rows:
        printed = {}
        for cell in row.cells:
            columns[cell.column] = Column(cell.column, cell.column, ">")
            if cell.status == NO_RECIPE:
                printed[cell.column] = cell.printed
        if printed:
            lines.append({"model": row.row} | printed)
    if not lines:
        return []
    return ["Printed there, without a recipe here:", Table(list(columns.values()), lines)]


def lines_of(row: Row, cell: Cell) -> list[dict[str, str]]:
    """The lines of a table for a printed number: model, measure, paper, ours and difference.

    For MACs, further lines have the plain count, the count of the attention alone, and the cache. Counts are
    in millions and their differences in per cent, except for the cache, which is in bytes.

    Args:
        row: the row, which names the model; its other cells show whether several metrics are compared with
            the printed number.
        cell: the printed number.
    """
    line = {"model": row.row, "measure": cell.column}
    if len(row.cells_of(cell.column)) > 1:
        line["measure"] += f" ({_metric_name(cell)})"
    line |= {"paper": _paper_text(cell), "ours": _our_text(cell)}
    if cell.difference is not None:
        line["difference"] = f"{cell.difference:+.2f}"
        if cell.paper and cell.status == COMPUTED:
            percent = round(100 * cell.difference / cell.paper, 1) or 0.0  # no "-0.0"
            line["difference"] = f"{percent:+.1f} %"
    lines = [line]
    for measure, text in _further_counts(cell).items():
        lines.append({"model": row.row, "measure": measure, "ours": text})
    return lines


def _metric_name(cell: Cell) -> str:
    """The name of the metric that is compared with a printed number."""
    return SCORES.get(cell.quantity or "", str(cell.quantity))


def _paper_text(cell: Cell) -> str:
    """The text of a printed number; a count that is compared is in millions."""
    if cell.status == COMPUTED and cell.paper is not None:
        return f"{cell.paper / 1e6:g}M"
    return cell.printed


def _our_text(cell: Cell) -> str:
    """The text of our number, or why there is none. A count has as many decimals as the paper's, or one."""
    if cell.ours is None:
        return cell.status
    if cell.status == COMPUTED:
        decimals = _paper_text(cell).rstrip("M").partition(".")[2]
        return f"{cell.ours / 1e6:.{max(1, len(decimals))}f}M"
    spread = "" if cell.spread is None else f" ± {cell.spread:.2f} ({cell.runs} runs)"
    return f"{cell.ours:.2f}{spread}"


def _further_counts(cell: Cell) -> dict[str, str]:
    """Measure → text of each of our counts other than MACs."""
    texts = {}
    if cell.plain:
        texts[f"{cell.column}, plain count"] = f"{cell.plain / 1e6:.1f}M"
    if cell.attention:
        texts[f"{cell.column}, attention alone"] = f"{cell.attention / 1e6:.1f}M"
    if cell.cache is not None:
        texts["cache, bytes per token and layer"] = f"{cell.cache:,}"
    return texts


def _other(runs: list[dict]) -> list[Table]:
    """A table for each set of metrics; runs that differ only in their seed have one line."""
    alike: dict[tuple, list[dict]] = defaultdict(list)
    for run in runs:
        names = ("subset", "status", "updates", "parameters", "checkpoints_averaged", "generation")
        facts = map(str, selected(run, names).values())
        key: tuple[Any, ...] = (run["experiment"], _command_of_experiment(run), *facts)
        seeds = {other.get("seed") for other in alike[key]}
        if seeds and run.get("seed") in seeds | {None}:
            key += (id(run),)  # a run without a seed, or with the same seed, has its own line
        alike[key].append(run)
    tables: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for group in alike.values():
        line = _line_of(group)
        tables[tuple(metric for metric in SCORES if metric in line)].append(line)
    columns = [
        Column("run", "Run"),
        *(Column(key, head, ">") for key, head in SCORES.items()),
        Column("size", "#Params", ">"),
        Column("time", "Training", ">"),
        Column("status", "Status"),
    ]
    return [Table(columns, lines) for lines in tables.values()]


def _command_of_experiment(run: dict) -> str:
    """A run's command without the flags that may differ between the seeds of an experiment."""
    own_flags = r" --(set train\.seed=\S+|save-dir \S+|record( [^-]\S*)?|gpus \S+|restart)(?= |$)"
    command = re.sub(own_flags, "", run.get("command") or "")
    # A command may also name a shipped recipe without folder and ending
    return re.sub(r"(?<=recipe )configs/(?:\w+/)?(\w+)\.yaml", r"\1", command)


def _line_of(runs: list[dict]) -> dict[str, str]:
    """A line of a table for runs that differ only in their seed."""
    first = runs[0]
    line = {"run": first["name"], "status": first.get("status") or ""}
    if len(runs) > 1:
        line["run"] = f"{first['experiment']} ({len(runs)} seeds)"
    for metric in SCORES:
        scores = [run["metrics"].get(metric) for run in runs]
        if values := [score for score in scores if score is not None]:
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            line[metric] = f"{statistics.mean(values):.2f}{spread}"
    if first.get("parameters"):
        line["size"] = f"{first['parameters'] / 1e6:.1f}M"
    if first.get("train_seconds") is not None:
        minutes = statistics.mean(run.get("train_seconds") or 0 for run in runs) / 60
        line["time"] = f"{minutes:.1f} min" if minutes < 60 else f"{minutes / 60:.1f} h"
    return line


def _evidence(runs: list[dict]) -> str:
    """A list of how the runs were made and scored; runs that differ only in score and seed have one line."""
    alike: dict[tuple[str, ...], list[dict]] = defaultdict(list)
    for run in runs:
        alike[_facts_of(run)].append(run)
    lines = []
    for facts, group in alike.items():
        seeds = {run.get("seed") for run in group}
        names = [_name_and_score(run, with_seed=len(seeds) > 1) for run in group]
        if len(seeds) == 1 and seeds != {None}:
            facts += (f"seed {group[0]['seed']}",)
        lines.append(f"- {', '.join(names)}: {', '.join(facts) or 'nothing else is recorded'}")
    return "\n".join(lines)


def _facts_of(run: dict) -> tuple[str, ...]:
    """How a run was made and scored, apart from its seed."""
    facts = selected(run, FACTS)
    del facts["seed"]
    facts["commit"] = re.sub(r"^(\w{10})\w+", r"\1", run.get("commit") or "")
    facts |= (run.get("generation") or {}) | (run.get("evaluation") or {})
    facts["sacreBLEU"] = run["metrics"].get("sacrebleu_signature")
    headline = run.get("headline") or ""
    texts = [SCORES.get(headline, headline)] if run["metrics"].get(headline) else []
    for key, value in facts.items():
        # A dict has the scores of groups of sentences
        if value not in (None, "") and not isinstance(value, dict):
            texts.append(f"{key.replace('_', ' ')} {value}")
    return tuple(texts)


def _name_and_score(run: dict, with_seed: bool) -> str:
    """A run's name, with its headline score, if it has one, and its seed, if requested, in brackets."""
    score = run["metrics"].get(run.get("headline"))
    details = [f"{score:.2f}"] if score else []
    if with_seed:
        details.append(f"seed {run.get('seed')}")
    return f"`{run['name']}`" + (f" ({', '.join(details)})" if details else "")


def default_results() -> Path:
    """The folder results/ of this package, or else that of the working directory."""
    if shipped("results").is_dir():
        return shipped("results")
    return Path("results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq compare`."""
    add = parser.add_argument
    add("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help="show only these runs")
    add(
        "--paper",
        metavar="NAME",
        help="only the tables of this paper: moa, mae, switchhead, moh, ...",
    )
    add("--measured", action="store_true", help="only rows that were measured")
    add("--results", type=Path, metavar="DIR", help="folder with papers/ and measured/")
    add("--markdown", action="store_true", help="print Markdown")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Read, match, and print."""
    files = [folder / "result.json" for folder in args.run_dirs]
    comparison = load_comparison(
        args.results or default_results(), files, args.paper, args.measured
    )
    if args.json:
        content = {"schema": SCHEMA} | dataclasses.asdict(comparison)
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return 0
    print(render(comparison, args.markdown), end="")
    return 0
