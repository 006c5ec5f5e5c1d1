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
from moa_fairseq.experiments.tables import Column, Table, page, values_of
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
# Flags of a run's command that may differ between the seeds of an experiment
_OF_ONE_RUN = re.compile(
    r" --(set train\.seed=\S+|save-dir \S+|record( [^-]\S*)?|gpus \S+|restart)(?= |$)"
)
# The file of a shipped recipe, which a command may also name without folder and ending
_FILE_OF_A_RECIPE = re.compile(r"(?<=recipe )configs/(?:\w+/)?(\w+)\.yaml")


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
        by_id: dict[int, dict] = {}
        for row in table.rows:
            by_id.update(zip(map(id, row.runs), row.runs))
        blocks += [_evidence([*by_id.values()]), " ".join(table.notes)]
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
    lines = []
    heads = {"row": "Model", "arch": "Architecture"}
    for row in table.rows:
        line = {"row": row.row, "arch": f"`{row.arch}`" if row.arch else ""}
        ours = defaultdict(list)  # column of the paper → (measure, our number) for each metric
        further: dict[str, str] = {}
        for cell in row.cells:
            first, *more = lines_of(row, cell)
            heads.setdefault(cell.column, cell.column)
            line[cell.column] = first["paper"]
            if cell.status != NO_RECIPE:
                ours[cell.column].append((first["measure"], first["ours"]))
            further.update(zip(values_of(more, "measure"), values_of(more, "ours")))
        for column, scores in ours.items():
            texts = []
            chains = []
            for measure, text in scores:
                texts.append(_NOT_RUN if text == "not run" else text)
                chains.append(measure.removeprefix(f"{column} (").rstrip(")"))
            if len(scores) > 1:
                heads[column] = f"{column} ({', '.join(chains)})"
            line[column] += f" ({', '.join(texts if set(texts) != {_NOT_RUN} else texts[:1])})"
        heads.update(zip(further, further))
        lines.append(line | further)
    columns = []
    shared = []
    for key, head in heads.items():
        if len(lines) == 1 or len({line.get(key) for line in lines}) > 1:
            columns.append(Column(key, head, "" if key in ("row", "arch") else ">"))
        elif lines[0].get(key):
            shared.append(f"{head} {lines[0][key]}")
    return [f"In all rows: {'; '.join(shared)}." if shared else "", Table(columns, lines)]


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
    line = {"model": row.row, "measure": cell.column, "paper": cell.printed, "ours": cell.status}
    if cell.status == COMPUTED and cell.ours is not None:
        paper = cell.paper or 0
        decimals = max(1, len(f"{paper / 1e6:g}".partition(".")[2]))
        line["ours"] = f"{cell.ours / 1e6:.{decimals}f}M"
        if cell.difference is not None:
            percent = round(100 * cell.difference / paper, 1) or 0.0  # no "-0.0"
            line.update(paper=f"{paper / 1e6:g}M", difference=f"{percent:+.1f} %")
        further = {}
        for name, count in (("plain count", cell.plain), ("attention alone", cell.attention)):
            if count:
                further[f"{cell.column}, {name}"] = f"{count / 1e6:.1f}M"
        if cell.cache is not None:
            further["cache, bytes per token and layer"] = f"{cell.cache:,}"
        lines = [{"model": row.row, "measure": key, "ours": text} for key, text in further.items()]
        return [line, *lines]
    if sum(sibling.column == cell.column for sibling in row.cells) > 1:
        # The printed number is compared with several metrics
        line["measure"] += f" ({SCORES.get(cell.quantity or '', cell.quantity)})"
    if cell.ours is not None:
        spread = "" if cell.spread is None else f" ± {cell.spread:.2f} ({cell.runs} runs)"
        line["ours"] = f"{cell.ours:.2f}{spread}"
        if cell.difference is not None:
            line["difference"] = f"{cell.difference:+.2f}"
    return [line]


def _other(runs: list[dict]) -> list[Table]:
    """A table for each set of metrics; runs that differ only in their seed have one line."""
    alike: dict[tuple, list[dict]] = defaultdict(list)
    for run in runs:
        keys = ("subset", "status", "updates", "parameters", "checkpoints_averaged", "generation")
        command = _OF_ONE_RUN.sub("", run.get("command") or "")
        command = _FILE_OF_A_RECIPE.sub(r"\1", command)
        facts = map(str, selected(run, keys).values())
        group = alike[(run["experiment"], command, *facts)]
        # A run without a seed, or with the same seed, has a line of its own
        if group and run.get("seed") in {None, *(other.get("seed") for other in group)}:
            group = alike[(id(run),)]
        group.append(run)
    tables: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for group in alike.values():
        first = group[0]
        name = first["name"]
        if len(group) > 1:
            name = f"{first['experiment']} ({len(group)} seeds)"
        line = {"run": name, "status": first.get("status")}
        metrics = []
        for metric in SCORES:
            scores = [run["metrics"].get(metric) for run in group]
            if values := [score for score in scores if score is not None]:
                spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
                line[metric] = f"{statistics.mean(values):.2f}{spread}"
                metrics.append(metric)
        if first.get("parameters"):
            line["size"] = f"{first['parameters'] / 1e6:.1f}M"
        if first.get("train_seconds") is not None:
            minutes = statistics.mean(run.get("train_seconds") or 0 for run in group) / 60
            line["time"] = f"{minutes:.1f} min" if minutes < 60 else f"{minutes / 60:.1f} h"
        tables[tuple(metrics)].append(line)
    columns = [
        Column("run", "Run"),
        *(Column(key, head, ">") for key, head in SCORES.items()),
        Column("size", "#Params", ">"),
        Column("time", "Training", ">"),
        Column("status", "Status"),
    ]
    return [Table(columns, lines) for lines in tables.values()]


def _evidence(runs: list[dict]) -> str:
    """A list of how the runs were made and scored; runs that differ only in score and seed have one line."""
    alike: dict[tuple[str, ...], list[dict]] = defaultdict(list)
    for run in runs:
        metrics = run["metrics"]
        headline = run.get("headline") or ""
        facts = selected(run, FACTS)
        facts.pop("seed")
        facts["commit"] = re.sub(r"^(\w{10})\w+", r"\1", run.get("commit") or "")
        facts.update((run.get("generation") or {}) | (run.get("evaluation") or {}))
        facts["sacreBLEU"] = metrics.get("sacrebleu_signature")
        notes = [SCORES.get(headline, headline)] if metrics.get(headline) else []
        for key, value in facts.items():
            # A dict has the scores of groups of sentences
            if value not in (None, "") and not isinstance(value, dict):
                notes.append(f"{key.replace('_', ' ')} {value}")
        alike[tuple(notes)].append(run)
    lines = []
    for shared, group in alike.items():
        notes = list(shared)
        seeds = [run.get("seed") for run in group]
        names = []
        for run, seed in zip(group, seeds):
            details = []
            if score := run["metrics"].get(run.get("headline")):
                details.append(f"{score:.2f}")
            if len(set(seeds)) > 1:
                details.append(f"seed {seed}")
            name = f"`{run['name']}`"
            names.append(f"{name} ({', '.join(details)})" if details else name)
        if len(set(seeds)) == 1 and seeds[0] is not None:
            notes.append(f"seed {seeds[0]}")
        lines.append(f"- {', '.join(names)}: {', '.join(notes) or 'nothing else is recorded'}")
    return "\n".join(lines)


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
