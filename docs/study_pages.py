"""The generated parts of results/: the rows of its first page with their picture, claims, set-ups."""

from __future__ import annotations

import functools
import json
import textwrap
from collections import defaultdict
from typing import Any

import yaml
from matplotlib.figure import Figure
from PIL import Image
from recorded_values import RESULTS, ROOT, signed

from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.experiments.study.design import Study, runs_of
from moa_fairseq.experiments.study.loading import load_study
from moa_fairseq.experiments.study.pictures import (
    VERDICTS,
    WIDTH,
    Interval,
    forest,
    height_of,
    title,
    verdict_key,
)
from moa_fairseq.experiments.tables import Column, Table

STUDIES = RESULTS / "studies"
FOREST = RESULTS / "forest.png"


def reported() -> list[str]:
    """The studies that have a report."""
    return sorted(path.parent.name for path in STUDIES.glob("*/report.json"))


@functools.cache
def study_of(name: str) -> Study:
    """A study with the values that its tuning chose."""
    return load_study(ROOT / "configs" / "studies" / f"{name}.yaml", STUDIES)


def read_claims() -> list[dict[str, Any]]:
    """results/claims.yaml, each contrast with `measured`, its row of the study's report, or None."""
    claims = yaml.safe_load((RESULTS / "claims.yaml").read_text(encoding="utf-8"))
    reports = {name: _report_of(name) for name in reported()}
    for claim in claims:
        for row in claim["contrasts"]:
            contrasts = reports.get(row["study"], {}).get("contrasts", [])
            row["measured"] = next(
                (each for each in contrasts if each["contrast"] == row["contrast"]), None
            )
    return claims


def claims() -> str:
    """All contrasts that test a claim, in a section for each paper."""
    of_paper: dict[str, list[list[str]]] = defaultdict(list)
    for claim in read_claims():
        head = [claim["claim"], claim["printed"]]
        for row in claim["contrasts"]:
            of_paper[claim["about"]].append([*head, *_measured(row)])
            head = ["", ""]
    columns = [
        "Claim",
        "In the paper",
        "System",
        "Baseline",
        "Bits (95 % interval)",
        "Seeds; MDE",
        "p",
        "Verdict",
    ]
    sections = [f"## {paper}\n\n{grid(columns, lines)}" for paper, lines in of_paper.items()]
    return "\n\n".join(sections)


def _measured(row: dict[str, Any]) -> list[str]:
    """System, baseline and result of a contrast."""
    measured = row["measured"]
    if not measured:
        return ["", "", "", "", "", f"not run: {row['study']}, {row['contrast']}"]
    systems = study_of(row["study"]).systems
    return [
        systems[measured["first"]].label,
        systems[measured["second"]].label,
        bits(measured),
        f"{measured['n']}; {measured['minimum_detectable_effect']:.3f}",
        _p(measured),
        f"[{measured['verdict']}](studies/{row['study']}/README.md)",
    ]


def first_rows() -> list[dict[str, Any]]:
    """The contrasts that results/README.md begins with, in their order."""
    rows = [row for claim in read_claims() for row in claim["contrasts"] if "first_screen" in row]
    for row in rows:
        if not row["measured"]:
            raise SystemExit(
                f"results/claims.yaml: {row['study']}, {row['contrast']} has no result yet."
            )
    return sorted(rows, key=lambda row: row["first_screen"])


def first_screen() -> str:
    """The table of the first page."""
    lines = []
    for row in first_rows():
        measured = row["measured"]
        lines.append(
            [
                str(row["first_screen"]),
                row["question"],
                f"{row['setting']}; {measured['n']} seeds",
                study_of(row["study"]).systems[measured["second"]].label,
                bits(measured),
                f"[{measured['verdict']}](studies/{row['study']}/README.md)",
                _p(measured),
            ]
        )
    head = [
        "",
        "Question",
        "Setting",
        "Baseline",
        "Difference, bits (95 % interval)",
        "Verdict",
        "p",
    ]
    return grid(head, lines)


def forest_text() -> str:
    """The picture's rows as a text that its file carries: if they differ, the picture is out of date."""
    return json.dumps(
        [{**row, "measured": bits(row["measured"])} for row in first_rows()], ensure_ascii=True
    )


def forest_in_file() -> str | None:
    """The text that the picture carries."""
    if not FOREST.is_file():
        return None
    with Image.open(FOREST) as picture:
        return picture.info.get("Description")


def draw_forest() -> Figure:
    """A forest plot of the rows of the first page, with a panel for each part."""
    parts: dict[str, list[Interval]] = defaultdict(list)
    verdicts = []
    for row in first_rows():
        measured = row["measured"]
        label = textwrap.fill(
            f"{row['first_screen']}. {row['question']}", 30, break_on_hyphens=False
        )
        parts[row["part"]].append(Interval(label, VERDICTS[measured["verdict"]], [], measured))
        verdicts.append(measured["verdict"])
    heights = [height_of(rows) for rows in parts.values()]
    figure = Figure(figsize=(WIDTH, 2.6 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(parts), height_ratios=heights, squeeze=False)[:, 0]
    for panel, (part, rows) in zip(panels, parts.items()):
        forest(panel, rows)
        panel.set_title(part, loc="left", fontsize=10, fontweight="bold")
        panel.set_xlabel(
            "difference in validation loss (bits), 95 % interval\n← system better        system worse →"
        )
    title(figure, "Does a mixture of heads lower the validation loss?")
    verdict_key(figure, verdicts)
    return figure


def studies() -> str:
    """The studies that have a report, with their questions."""
    lines = []
    for name in reported():
        report = _report_of(name)
        systems = len(report["systems"])
        runs = f"{systems} systems, {report['runs'] // systems} seeds"
        lines.append([f"[{name}](studies/{name}/README.md)", study_of(name).question, runs])
    return grid(["Study", "Question", "Runs"], lines)


def set_up(name: str) -> str:
    """Sizes, budget, seeds and rates of a study; its report has commit, machines and precision."""
    study = study_of(name)
    report = _report_of(name)
    recipes = {
        run.system: run.load() for run in runs_of(study, ROOT / "configs" / "studies", STUDIES)
    }
    sizes = sorted(row["parameters"] for row in report["systems"])
    rows = [
        [
            "Systems",
            f"{len(recipes)}, of {_range([f'{size / 1e6:.2f}' for size in sizes])} million parameters, "
            f"with {report['runs'] // len(recipes)} seeds each",
        ],
        ["Data", _text([f"`{recipe.data.recipe}`" for recipe in recipes.values()])],
        ["Budget of a run", _text([_budget(recipe) for recipe in recipes.values()])],
        ["Learning rate", _rates(study, recipes)],
    ]
    return grid(["", ""], rows)


def _p(measured: dict[str, Any]) -> str:
    """The corrected p; the reports have more digits."""
    return f"{measured['p_holm']:.2g}" if measured["p_holm"] >= 0.001 else "< 0.001"


def _budget(recipe: Recipe) -> str:
    return f"{recipe.train.max_update:,} updates of {recipe.train.effective_batch_tokens:,} tokens"


def _rates(study: Study, recipes: dict[str, Recipe]) -> str:
    """The learning rates of the systems; for a tuned study also the grid, and rates at an end of it."""
    of_rate: dict[float, list[str]] = defaultdict(list)
    for system, recipe in recipes.items():
        of_rate[recipe.train.flags["lr"]].append(system)
    if not study.tuning:
        return f"{_text([f'{rate:g}' for rate in of_rate])}; not tuned"
    grid = study.tuning["grid"]["train.flags.lr"]
    usual = max(of_rate, key=lambda rate: len(of_rate[rate]))
    chosen = []
    for rate in sorted(of_rate, key=lambda rate: (rate == usual, rate)):
        end = " (an end of the grid)" if rate in (min(grid), max(grid)) else ""
        systems = ", ".join(of_rate[rate])
        if rate == usual:
            systems = "the others" if len(of_rate) > 1 else "all systems"
        chosen.append(f"{rate:g}{end} for {systems}")
    return f"tuned over {', '.join(f'{rate:g}' for rate in grid)}: {'; '.join(chosen)}"


def _text(values: list[str]) -> str:
    return " or ".join(dict.fromkeys(values))


def _range(texts: list[str]) -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def bits(measured: dict[str, Any]) -> str:
    """A difference with its interval."""
    low, mean, high = (signed(measured[key], 3) for key in ("low", "mean", "high"))
    return f"{mean} ({low} to {high})"


def grid(head: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown.

    Args:
        head: its heading.
        lines: a text for each column.
    """
    columns = [Column(str(place), text) for place, text in enumerate(head)]
    return Table(
        columns, [dict(zip(map(str, range(len(head))), line)) for line in lines]
    ).markdown()


def _report_of(name: str) -> dict[str, Any]:
    return json.loads((STUDIES / name / "report.json").read_text(encoding="utf-8"))
