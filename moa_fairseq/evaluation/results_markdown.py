"""The comparison as Markdown: what `moa-fairseq compare` prints, and the headlines of README.md."""

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
# Metric → heading. Those after ALWAYS have a column only where a run has them.
SCORES = {
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
}
ALWAYS = ("multi_bleu", "compound_split_bleu", "sacrebleu", "valid_ppl")
PAPERS = {"moa": "MoA", "mae": "MAE", "switchhead": "SwitchHead", "moh": "MoH", "gqe": "GQE"}
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
    """One table of sizes: the papers' rows that results/papers calls headlines."""
    lines = []
    for table in comparison.tables:
        for row in (row for row in table.rows if row.headline):
            counts = [_count_fields(cell) for cell in row.cells if cell.quantity == "parameters"]
            parameters = counts[0] if counts else {}
            paper = f"{PAPERS.get(table.paper, table.paper)}, Table {table.table}"
            lines.append(
                {
                    "Model": f"{row.row}, {row.headline} ({paper})",
                    "Architecture": f"`{row.arch}`",
                    "Parameters printed": parameters.get("paper", ""),
                    "counted": parameters.get("ours", ""),
                }
            )
    return grid(lines, left=2)


def _scores(table: Table) -> str:
    """One line per printed score that a recipe here can reach."""
    lines = []
    for row in table.rows:
        columns = [cell.column for cell in row.cells]
        for cell in row.cells:
            if cell.status not in (COMPUTED, NO_RECIPE):
                # The printed number may be compared with several chains.
                several = columns.count(cell.column) > 1
                chain = f" ({SCORES.get(cell.quantity or '', cell.quantity)})" if several else ""
                line = {"Model": row.row, "Score": cell.column + chain, "Paper": str(cell.paper)}
                difference = "" if cell.difference is None else f"{cell.difference:+.2f}"
                lines.append({**line, "Ours": _ours(cell), "Difference": difference})
    return grid(lines, left=2)


def _costs(table: Table) -> str:
    """One line per architecture: what the paper prints and what `moa-fairseq complexity` counts."""
    lines = []
    for row in table.rows:
        line: Dict[Any, str] = {"Model": row.row, "Architecture": f"`{row.arch}`"}
        computed = [cell for cell in row.cells if cell.status == COMPUTED]
        for cell in computed:
            fields = _count_fields(cell)
            line[f"{cell.column}, paper"] = fields.pop("paper")
            line.update({(cell.column, heading): text for heading, text in fields.items() if text})
        lines += [line] if computed else []
    return grid(lines, left=2)


def _count_fields(cell: Cell) -> Dict[str, str]:
    """Heading → text: the count that the paper prints, ours, and what stands beside them."""
    if cell.ours is None or cell.difference is None:
        return {}
    percent = round(100 * cell.difference / cell.paper, 1) or 0.0  # no "-0.0"
    decimals = max(1, len(f"{cell.paper / 1e6:g}".partition(".")[2]))
    return {
        "paper": f"{cell.paper / 1e6:g}M",
        "ours": f"{cell.ours / 1e6:.{decimals}f}M",
        "difference": f"{percent:+.1f} %",
        "plain count": _millions(cell.plain),
        "of it attention": _millions(cell.attention),
    }


def _ours(cell: Cell) -> str:
    if cell.ours is None:
        return cell.status
    spread = "" if cell.spread is None else f" ± {cell.spread:.2f} ({cell.runs} runs)"
    return f"{cell.ours:.2f}{spread}"


def _millions(count: Optional[float]) -> str:
    return f"{count / 1e6:.1f}M" if count else ""


def _runs(runs: List[dict]) -> str:
    present = {key for run in runs for key in run["metrics"]} | set(ALWAYS)
    lines = []
    for run in runs:
        line = {"Run": run["name"]}
        for key in (key for key in SCORES if key in present):
            score = run["metrics"].get(key)
            line[SCORES[key]] = "" if score is None else f"{score:.2f}"
        if run.get("status"):
            line[SCORES[ALWAYS[0]]] = run["status"]
        seconds = run.get("train_seconds")
        line["#Params"], line["Training"] = _millions(run.get("parameters")), ""
        if seconds is not None:
            hours = seconds >= 3600
            line["Training"] = f"{seconds / 3600:.1f} h" if hours else f"{seconds / 60:.1f} min"
        lines.append(line)
    return grid(lines, left=1)


def _evidence(runs: List[dict]) -> str:
    """How each number came about: a score never travels alone."""
    lines = []
    for run in runs:
        facts = [form.format(run[key]) for key, form in FACTS.items() if run.get(key) is not None]
        for key, value in [*(run.get("generation") or {}).items(), *(run.get("evaluation") or {}).items()]:
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
        if len(by_seed) == 1:
            continue
        group = [by_seed[seed] for seed in sorted(by_seed)]
        scores = [run["metrics"][metric] for run in group]
        line = {"Experiment": experiment, "Score": SCORES.get(metric, metric)}
        each = ", ".join(f"{score:.2f}" for score in scores)
        lines.append({**line, "Mean ± standard deviation": _mean(scores), "Each seed": each})
        for kind in group[0].get("evaluation") or {}:
            by_run: List[Any] = [(run.get("evaluation") or {}).get(kind) for run in group]
            if not all(isinstance(values, dict) and values.keys() == by_run[0].keys() for values in by_run):
                continue
            if all(is_number(score) for values in by_run for score in values.values()):
                means = {value: _mean([values[value] for values in by_run]) for value in by_run[0]}
                by_group[kind, tuple(means)].append({kind.replace("_", " "): experiment, **means})
    tables = [grid(lines, left=2), *(grid(rows, left=1) for rows in by_group.values())]
    return ["**Over seeds.** Runs that differ in their seed alone.", *tables] if lines else []


def _mean(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation."""
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
