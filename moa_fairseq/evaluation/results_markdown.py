"""The comparison as Markdown: the generated parts of results/README.md and of README.md."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from typing import Any, Dict, List, Optional, Sequence

from moa_fairseq.evaluation.results import COMPUTED, NO_RECIPE, Cell, Comparison, Row, Table
from moa_fairseq.json_files import is_number

# What a run in results/measured/ may say about itself, in the order in which it is printed.
FACTS = {
    "status": "{}",
    "subset": "subset {}",
    "epochs": "{:,} epochs",
    "updates": "{:,} updates",
    "checkpoints_averaged": "{} checkpoints averaged",
    "seed": "seed {}",
    "hardware": "{}",
    "date": "{}",
}
OTHER_SCORES = {
    "multi_bleu": "multi-bleu",
    "compound_split_bleu": "compound-split",
    "sacrebleu": "sacreBLEU",
    "valid_ppl": "Valid ppl",
}
PAPERS = {"moa": "MoA", "mae": "MAE", "switchhead": "SwitchHead", "moh": "MoH"}
# Columns that only appear where a run has them.
FURTHER_SCORES = {
    "moa_release_bleu": "moa-release",
    "get_ende_bleu": "get-ende-bleu",
    "masked_lm_ppl": "Masked-LM ppl",
    "masked_lm_word_ppl": "word level",
    "lm_ppl": "LM ppl",
    "lm_bits": "bits per token",
    "accuracy": "Accuracy (%)",
}
# What stands beside the count that a paper prints: a field of a cell, and its heading.
FURTHER_COUNTS = {"plain": "plain count", "attention": "of it attention"}
# What the command of a run says that may differ between seeds.
_OF_ONE_RUN = re.compile(r" --(set train\.seed=\S+|save-dir \S+|record( [^-]\S*)?|gpus \S+|restart)(?= |$)")


def render(comparison: Comparison) -> str:
    """Every table that has a number of ours, then the runs that stand for no printed row."""
    blocks: List[str] = []
    paper = None
    for table in comparison.tables:
        parts = [_scores(table), _costs(table)]
        if not any(parts):
            continue
        if table.paper != paper:
            blocks.append(f"### {table.title}\n\n{table.citation}.")
            paper = table.paper
        blocks += [f"**Table {table.table}.** {table.caption}.", *parts, _evidence(_runs(table))]
        blocks += [_baselines(table), " ".join(table.notes)]
    if comparison.other:
        blocks += ["### Other runs", _other(comparison.other), _evidence(comparison.other)]
        blocks += _over_seeds(comparison.other)
    return "\n\n".join(block for block in blocks if block) + "\n"


def render_headlines(comparison: Comparison) -> str:
    """One table: the papers' rows that results/papers calls headlines."""
    lines = [
        _headline(f"{row.row} ({PAPERS.get(table.paper, table.paper)}, Table {table.table})", row)
        for table in comparison.tables
        for row in table.rows
        if row.headline
    ]
    head = ["Model", "Measure", "Paper", "Here", "Parameters: paper", "here"]
    return _grid(head, lines, left=2)


def _headline(name: str, row: Row) -> List[str]:
    score = next(cell for cell in row.cells if cell.status != COMPUTED)
    counts = next((cell for cell in row.cells if cell.quantity == "parameters"), None)
    parameters = ["", ""] if counts is None else _count_fields(counts)[:2]
    return [name, row.headline or "", str(score.paper), _ours(score), *parameters]


def _over_seeds(runs: List[dict]) -> List[str]:
    """Mean and deviation of the runs that differ in their seed alone, and of their scores by group."""
    alike: Dict[tuple, Dict[int, dict]] = defaultdict(dict)
    for run in runs:
        seed, score = run.get("seed"), run["metrics"].get(run.get("headline"))
        if seed is not None and score is not None and not run.get("status"):
            keys = ("subset", "updates", "parameters", "checkpoints_averaged", "generation")
            settings = (str(run.get(key)) for key in keys)
            command = _OF_ONE_RUN.sub("", run.get("command") or "")
            alike[(run["experiment"], run["headline"], command, *settings)].setdefault(seed, run)
    names = {**OTHER_SCORES, **FURTHER_SCORES}
    lines, by_group = [], defaultdict(list)
    for (experiment, metric, *_), by_seed in alike.items():
        group = [by_seed[seed] for seed in sorted(by_seed)]
        if len(group) == 1:
            continue
        scores = [run["metrics"][metric] for run in group]
        each = ", ".join(f"{score:.2f}" for score in scores)
        lines.append([experiment, names.get(metric, metric), _mean(scores), each])
        for kind in group[0].get("evaluation") or {}:
            found: List[Any] = [(run.get("evaluation") or {}).get(kind) for run in group]
            if not all(isinstance(values, dict) and values.keys() == found[0].keys() for values in found):
                continue
            if all(is_number(score) for values in found for score in values.values()):
                means = [_mean([values[value] for values in found]) for value in found[0]]
                by_group[kind, tuple(found[0])].append([experiment, *means])
    if not lines:
        return []
    head = ["Experiment", "Score", "Mean ± standard deviation", "Each seed"]
    blocks = ["**Over seeds.** Runs that differ in their seed alone.", _grid(head, lines, left=2)]
    for (kind, group_values), rows in by_group.items():
        blocks.append(_grid([kind.replace("_", " "), *group_values], rows, left=1))
    return blocks


def _mean(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation."""
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def _scores(table: Table) -> str:
    """One line per printed score that a recipe here can reach."""
    lines = [
        [row.row, _score_name(row, cell), str(cell.paper), _ours(cell), _signed(cell.difference)]
        for row in table.rows
        for cell in row.cells
        if cell.status not in (COMPUTED, NO_RECIPE)
    ]
    return _grid(["Model", "Score", "Paper", "Ours", "Difference"], lines, left=2)


def _score_name(row: Row, cell: Cell) -> str:
    """The column, and the chain if the printed number is compared with several."""
    shared = sum(other.column == cell.column for other in row.cells) > 1
    chain = cell.quantity or ""
    chain = {**OTHER_SCORES, **FURTHER_SCORES}.get(chain, chain)
    return f"{cell.column} ({chain})" if shared else cell.column


def _costs(table: Table) -> str:
    """One line per architecture: what the paper prints and what `moa-fairseq complexity` counts."""
    rows = [row for row in table.rows if any(cell.status == COMPUTED for cell in row.cells)]
    columns = [cell.column for cell in rows[0].cells if cell.status == COMPUTED] if rows else []
    head = ["Model", "Architecture"]
    cells = [cell for row in rows for cell in row.cells]
    further = {  # column → what is counted beside it
        column: [
            name for name in FURTHER_COUNTS if any(getattr(c, name) for c in cells if c.column == column)
        ]
        for column in columns
    }
    for column in columns:
        head += [
            f"{column}, paper",
            "ours",
            "difference",
            *(FURTHER_COUNTS[name] for name in further[column]),
        ]
    lines = []
    for row in rows:
        by_column = {cell.column: cell for cell in row.cells}
        counts = [
            text for column in columns for text in _count_fields(by_column.get(column), further[column])
        ]
        lines.append([row.row, f"`{row.arch}`", *counts])
    return _grid(head, lines, left=2)


def _count_fields(cell: Optional[Cell], further: Sequence[str] = ()) -> List[str]:
    """Paper, ours, difference, and what else is counted."""
    if cell is None or cell.ours is None or cell.difference is None:
        return [""] * (3 + len(further))
    percent = round(100 * cell.difference / cell.paper, 1) or 0.0  # no "-0.0"
    decimals = max(1, len(f"{cell.paper / 1e6:g}".partition(".")[2]))
    fields = [f"{cell.paper / 1e6:g}M", f"{cell.ours / 1e6:.{decimals}f}M", f"{percent:+.1f} %"]
    counts = [getattr(cell, name) for name in further]
    return [*fields, *("" if value is None else f"{value / 1e6:.1f}M" for value in counts)]


def _runs(table: Table) -> List[dict]:
    return list({id(run): run for row in table.rows for run in row.runs}.values())


def _evidence(runs: List[dict]) -> str:
    """How each number came about: a score never travels alone."""
    return "\n".join(f"- `{run['name']}`: {', '.join(_facts(run))}" for run in runs)


def _facts(run: dict) -> List[str]:
    facts = [form.format(run[key]) for key, form in FACTS.items() if run.get(key) is not None]
    for section in ("generation", "evaluation"):
        for key, value in (run.get(section) or {}).items():
            if not isinstance(value, dict):  # those stand in the table over seeds
                facts.append(f"{key.replace('_', ' ')} {value}")
    if run.get("commit"):
        commit, dash, dirty = run["commit"].partition("-")
        facts.append(f"commit {commit[:10]}{dash}{dirty}")
    signature = run["metrics"].get("sacrebleu_signature")
    return facts + ([f"`{signature}`"] if signature else [])


def _baselines(table: Table) -> str:
    names = [row.row for row in table.rows if all(cell.status == NO_RECIPE for cell in row.cells)]
    return f"Printed there too, without a recipe here: {'; '.join(names)}." if names else ""


def _other(runs: List[dict]) -> str:
    present = {key for run in runs for key in run["metrics"]}
    extra = {key: name for key, name in FURTHER_SCORES.items() if key in present}
    columns = {**OTHER_SCORES, **extra}
    head = ["Run", *columns.values(), "#Params", "Training"]
    return _grid(head, [_other_fields(run, list(columns)) for run in runs], left=1)


def _other_fields(run: dict, columns: List[str]) -> List[str]:
    metrics = run["metrics"]
    scores = ["" if metrics.get(key) is None else f"{metrics[key]:.2f}" for key in columns]
    if run.get("status"):
        scores[0] = run["status"]
    parameters, seconds = run.get("parameters"), run.get("train_seconds")
    return [
        run["name"],
        *scores,
        "" if parameters is None else f"{parameters / 1e6:.1f}M",
        "" if seconds is None else _duration(seconds),
    ]


def _ours(cell: Cell) -> str:
    if cell.ours is None:
        return cell.status
    spread = "" if cell.spread is None else f" ± {cell.spread:.2f} ({cell.runs} runs)"
    return f"{cell.ours:.2f}{spread}"


def _signed(difference: Optional[float]) -> str:
    return "" if difference is None else f"{difference:+.2f}"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _grid(head: List[str], lines: List[List[str]], left: int) -> str:
    """A Markdown table whose first `left` columns hold text, the others numbers; "" without lines."""
    rule = ["---"] * left + ["--:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines]) if lines else ""
