"""The comparison as Markdown: the generated parts of results/README.md and of README.md."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from typing import Any, Dict, List, Mapping, Optional, Sequence

from moa_fairseq.evaluation.results import COMPUTED, NO_RECIPE, Cell, Comparison, Table
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
SCORES = {**OTHER_SCORES, **FURTHER_SCORES}
# What stands beside the count that a paper prints: a field of a cell, and its heading.
FURTHER_COUNTS = {"plain": "plain count", "attention": "of it attention"}
# What the command of a run says that may differ between seeds.
_OF_ONE_RUN = re.compile(r" --(set train\.seed=\S+|save-dir \S+|record( [^-]\S*)?|gpus \S+|restart)(?= |$)")


def grid(lines: Sequence[Mapping[Any, str]], left: int) -> str:
    """A Markdown table whose first `left` columns hold text, the others numbers; "" without lines.

    lines: heading → text, alike in order; a tuple's last part is the heading. What a line lacks is empty.
    """
    keys = list(dict.fromkeys(key for line in lines for key in line))
    head = [key[-1] if isinstance(key, tuple) else key for key in keys]
    rule = ["---"] * left + ["--:"] * (len(head) - left)
    rows = [head, rule, *([line.get(key, "") for key in keys] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) if lines else ""


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
        runs = list({id(run): run for row in table.rows for run in row.runs}.values())
        blocks += [f"**Table {table.table}.** {table.caption}.", *parts, _evidence(runs)]
        names = [row.row for row in table.rows if all(cell.status == NO_RECIPE for cell in row.cells)]
        blocks.append(f"Printed there too, without a recipe here: {'; '.join(names)}." if names else "")
        blocks.append(" ".join(table.notes))
    if runs := comparison.other:
        blocks += ["### Other runs", _runs(runs), _evidence(runs), *_over_seeds(runs)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def render_headlines(comparison: Comparison) -> str:
    """One table: the papers' rows that results/papers calls headlines."""
    lines = []
    for table in comparison.tables:
        for row in (row for row in table.rows if row.headline):
            score = next(cell for cell in row.cells if cell.status != COMPUTED)
            counts = next((cell for cell in row.cells if cell.quantity == "parameters"), None)
            parameters = _count_fields(counts)
            lines.append(
                {
                    "Model": f"{row.row} ({PAPERS.get(table.paper, table.paper)}, Table {table.table})",
                    "Measure": row.headline or "",
                    "Paper": str(score.paper),
                    "Here": _ours(score),
                    "Parameters: paper": parameters["paper"],
                    "here": parameters["ours"],
                }
            )
    return grid(lines, left=2)


def _scores(table: Table) -> str:
    """One line per printed score that a recipe here can reach."""
    lines = []
    for row in table.rows:
        columns = [cell.column for cell in row.cells]
        for cell in row.cells:
            if cell.status in (COMPUTED, NO_RECIPE):
                continue
            several = columns.count(cell.column) > 1  # the printed number is compared with several chains
            chain = f" ({SCORES.get(cell.quantity or '', cell.quantity)})" if several else ""
            line = {"Model": row.row, "Score": cell.column + chain, "Paper": str(cell.paper)}
            difference = "" if cell.difference is None else f"{cell.difference:+.2f}"
            lines.append({**line, "Ours": _ours(cell), "Difference": difference})
    return grid(lines, left=2)


def _costs(table: Table) -> str:
    """One line per architecture: what the paper prints and what `moa-fairseq complexity` counts."""
    rows = [row for row in table.rows if any(cell.status == COMPUTED for cell in row.cells)]
    names = [cell.column for cell in rows[0].cells if cell.status == COMPUTED] if rows else []
    lines: List[Dict[Any, str]] = [{"Model": row.row, "Architecture": f"`{row.arch}`"} for row in rows]
    for name in names:
        cells = [next((cell for cell in row.cells if cell.column == name), None) for row in rows]
        for line, cell in zip(lines, cells):
            fields = _count_fields(cell)
            line[f"{name}, paper"] = fields.pop("paper")
            line.update({(name, heading): text for heading, text in fields.items()})
            for field, heading in FURTHER_COUNTS.items():
                if any(getattr(other, field, None) for other in cells):
                    line[name, heading] = _millions(getattr(cell, field, None))
    return grid(lines, left=2)


def _count_fields(cell: Optional[Cell]) -> Dict[str, str]:
    if cell is None or cell.ours is None or cell.difference is None:
        return dict.fromkeys(("paper", "ours", "difference"), "")
    percent = round(100 * cell.difference / cell.paper, 1) or 0.0  # no "-0.0"
    decimals = max(1, len(f"{cell.paper / 1e6:g}".partition(".")[2]))
    ours = f"{cell.ours / 1e6:.{decimals}f}M"
    return {"paper": f"{cell.paper / 1e6:g}M", "ours": ours, "difference": f"{percent:+.1f} %"}


def _ours(cell: Cell) -> str:
    if cell.ours is None:
        return cell.status
    spread = "" if cell.spread is None else f" ± {cell.spread:.2f} ({cell.runs} runs)"
    return f"{cell.ours:.2f}{spread}"


def _millions(count: Optional[float]) -> str:
    return "" if count is None else f"{count / 1e6:.1f}M"


def _runs(runs: List[dict]) -> str:
    present = {key for run in runs for key in run["metrics"]}
    lines = []
    for run in runs:
        scores = {k: run["metrics"].get(k) for k in SCORES if k in OTHER_SCORES or k in present}
        line = {SCORES[key]: "" if score is None else f"{score:.2f}" for key, score in scores.items()}
        if run.get("status"):
            line[next(iter(OTHER_SCORES.values()))] = run["status"]
        seconds = run.get("train_seconds") or 0.0
        hours = f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
        time = "" if run.get("train_seconds") is None else hours
        lines.append(
            {"Run": run["name"], **line, "#Params": _millions(run.get("parameters")), "Training": time}
        )
    return grid(lines, left=1)


def _evidence(runs: List[dict]) -> str:
    """How each number came about: a score never travels alone."""
    lines = []
    for run in runs:
        facts = [form.format(run[key]) for key, form in FACTS.items() if run.get(key) is not None]
        for section in ("generation", "evaluation"):
            for key, value in (run.get(section) or {}).items():
                if not isinstance(value, dict):  # those stand in the table over seeds
                    facts.append(f"{key.replace('_', ' ')} {value}")
        if run.get("commit"):
            commit, dash, dirty = run["commit"].partition("-")
            facts.append(f"commit {commit[:10]}{dash}{dirty}")
        if signature := run["metrics"].get("sacrebleu_signature"):
            facts.append(f"`{signature}`")
        lines.append(f"- `{run['name']}`: {', '.join(facts)}")
    return "\n".join(lines)


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
    lines, by_group = [], defaultdict(list)
    for (experiment, metric, *_), by_seed in alike.items():
        group = [by_seed[seed] for seed in sorted(by_seed)]
        if len(group) == 1:
            continue
        scores = [run["metrics"][metric] for run in group]
        line = {"Experiment": experiment, "Score": SCORES.get(metric, metric)}
        each = ", ".join(f"{score:.2f}" for score in scores)
        lines.append({**line, "Mean ± standard deviation": _mean(scores), "Each seed": each})
        for kind in group[0].get("evaluation") or {}:
            found: List[Any] = [(run.get("evaluation") or {}).get(kind) for run in group]
            if not all(isinstance(values, dict) and values.keys() == found[0].keys() for values in found):
                continue
            if all(is_number(score) for values in found for score in values.values()):
                means = {value: _mean([values[value] for values in found]) for value in found[0]}
                by_group[kind, tuple(means)].append({kind.replace("_", " "): experiment, **means})
    if not lines:
        return []
    blocks = ["**Over seeds.** Runs that differ in their seed alone.", grid(lines, left=2)]
    return [*blocks, *(grid(rows, left=1) for rows in by_group.values())]


def _mean(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation."""
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
