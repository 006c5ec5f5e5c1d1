"""Writes the generated parts of the documents: tables of results, flags and more, and numbers in their text.

    python docs/generate.py            rewrite what is out of date
    python docs/generate.py --values   only the numbers in the text, in a second
    python docs/generate.py --check    only say what is out of date; exit status 1 if anything is

A generated part is between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. A number of the records is between
`<!-- STUDY/CONTRAST/FIELD -->` and `<!-- / -->` (see docs/recorded_values.py). All else is written by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from fairseq.models import ARCH_MODEL_INV_REGISTRY
from recorded_values import RESULTS, ROOT, documents, fill_values
from study_pages import (
    FOREST,
    claims,
    draw_forest,
    first_screen,
    forest_in_file,
    forest_text,
    grid,
    reported,
    set_up,
    studies,
)

from moa_fairseq.cli import VERBS
from moa_fairseq.experiments.analysis.command import KINDS
from moa_fairseq.experiments.analysis.plots import save
from moa_fairseq.experiments.recipes.loading import load_recipe, shipped_recipes
from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.experiments.scoring.compare import lines_of, render
from moa_fairseq.experiments.scoring.comparison import Comparison, load_comparison
from moa_fairseq.experiments.tables import Column, Table
from moa_fairseq.files import atomic_write
from moa_fairseq.layers.head_gate import HEAD_GATES
from moa_fairseq.layers.settings import FamilySettings
from moa_fairseq.layers.sigma_moe import SigmaMoESettings
from moa_fairseq.plugin.causal_lm import SWITCHES
from moa_fairseq.plugin.coordinate_descent.task import BlockCoordinateDescentConfig
from moa_fairseq.plugin.criterions.routing_loss import RoutingLossConfig
from moa_fairseq.plugin.fairseq_compat import PATCHES
from moa_fairseq.plugin.families import FAMILIES
from moa_fairseq.plugin.model import (
    BRANCH_SCALE_HELP,
    HEAD_GATE_HELP,
    INITIALIZATION_HELP,
    INITIALIZATIONS,
    KERNEL_CHECK_HELP,
    OUTPUT_SCALE_HELP,
    POSITIONS,
)
from moa_fairseq.plugin.patches.compile_flag import FLAG as COMPILE
from moa_fairseq.plugin.patches.compile_flag import HELP as COMPILE_HELP
from moa_fairseq.plugin.tasks.language_modeling_truncated_bptt import TruncatedBPTTConfig

DOCUMENTS = (
    "results/README.md",
    "results/claims.md",
    "results/tables/README.md",
    *(f"results/tables/{path.stem}.md" for path in sorted((RESULTS / "papers").glob("*.json"))),
    "results/tables/other_runs.md",
    *(f"results/studies/{study}/README.md" for study in reported()),
    "configs/README.md",
    "docs/flags.md",
    "docs/patches.md",
    "docs/recipe.yaml",
)

# The paper of a recipe that stands for no row of one, by the beginning of its architecture's name.
FAMILY_PAPERS = {
    "moa": "moa",
    "mae": "mae",
    "switch": "switchhead",
    "moh": "moh",
    "gqe": "gqe",
    "namoh": "namoh",
}

RECIPE_HEAD = """# Every key of a recipe, with its meaning, choices and default. Written by docs/generate.py.
# `base: NAME.yaml`, a path from this file's folder or a recipe of configs/, or a list of them, lies under it.
"""


def parts() -> dict[str, str]:
    """Every generated part by its name, as Markdown."""
    comparison = load_comparison(ROOT / "results")
    return {
        **paper_tables(comparison),
        "headlines": headlines(comparison),
        "claims": claims(),
        "first-screen": first_screen(),
        "studies": studies(),
        **{f"{study}-set-up": set_up(study) for study in reported()},
        "experiments": experiments(comparison),
        "flags": flags(),
        "architectures": architectures(),
        "verbs": verbs(),
        "patches": patch_table(),
        "docs/recipe.yaml": RECIPE_HEAD + "\n".join(recipe_keys()) + "\n",
    }


def paper_tables(comparison: Comparison) -> dict[str, str]:
    """A page of results/tables for each paper, one for the runs that reproduce no row, and a list of them."""
    titles = {table.paper: table.title for table in comparison.tables}
    pages = {}
    lines = []
    for paper, title in titles.items():
        tables = [table for table in comparison.tables if table.paper == paper]
        pages[f"results/tables/{paper}.md"] = render(Comparison(tables, []), markdown=True)
        rows = [row for table in tables for row in table.rows]
        measured = sum(bool(row.runs) for row in rows)
        lines.append([f"[{title}]({paper}.md)", str(len(tables)), str(len(rows)), str(measured)])
    pages["results/tables/other_runs.md"] = render(Comparison([], comparison.other), markdown=True)
    for name, text in pages.items():
        head, _, rest = text.partition("\n\n")
        pages[name] = f"{head.removeprefix('##')}\n\n[All papers](README.md).\n\n{rest}"
    lines.append(["[Other runs](other_runs.md)", "", "", str(len(comparison.other))])
    return {**pages, "tables": grid(["Paper", "Tables", "Rows", "Measured here"], lines)}


def headlines(comparison: Comparison) -> str:
    """The sizes of the models in the papers' rows that results/papers calls headlines."""
    lines = []
    for table in comparison.tables:
        for row in (row for row in table.rows if row.headline):
            size = next(
                lines_of(row, cell)[0] for cell in row.cells if cell.quantity == "parameters"
            )
            model = f"{row.row}, {row.headline} ({table.name}, Table {table.table})"
            lines.append({**size, "model": model, "arch": f"`{row.arch}`"})
    columns = [Column("model", "Model"), Column("arch", "Architecture")]
    columns += [Column("paper", "Parameters printed", ">"), Column("ours", "counted", ">")]
    return Table(columns, lines).markdown()


def experiments(comparison: Comparison) -> str:
    """A line per recipe of configs/, by paper: what it trains, and the row that it stands for."""
    groups: dict[str, list[list[str]]] = {paper: [] for paper in [*FAMILY_PAPERS.values(), "dense"]}
    for name, path in sorted(shipped_recipes().items()):
        recipe = load_recipe(path)
        families = (
            paper for start, paper in FAMILY_PAPERS.items() if recipe.model.arch.startswith(start)
        )
        paper, printed, row = next(families, "dense"), recipe.reproduces, ""
        if printed:
            source = (
                "Wu et al. 2021" if printed.paper == "revisit_mmt" else f"Table {printed.table}"
            )
            paper, row = (
                (printed.paper if printed.paper in groups else paper),
                f"{source}: {printed.value}",
            )
        groups[paper].append([f"[{name}]({path.parent.name}/{path.name})", recipe.summary, row])
    titles = {table.paper: table.name for table in comparison.tables}
    titles["dense"] = "Other dense models"
    head = ["Experiment", "What it trains", "Paper's score"]
    return "\n\n".join(
        f"### {titles.get(paper, paper.upper())}\n\n{grid(head, lines)}"
        for paper, lines in groups.items()
    )


def recipe_keys(section: Any = Recipe, indent: str = "") -> Iterator[str]:
    """The lines of a recipe that says every key: a comment (meaning, choices, default), then a value."""
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        kinds = typing.get_args(hints[field.name]) or [hints[field.name]]
        kind = next(kind for kind in kinds if kind is not type(None))
        said = field.metadata
        if dataclasses.is_dataclass(kind):
            if field.name != "reproduces":  # which is for rows of papers alone
                yield from ("", f"# {kind.__doc__}", f"{field.name}:", *recipe_keys(kind, "  "))
            continue
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        default = None if required else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        value = said["example"] if said["example"] is not None else default
        about = [said["text"]] if said["text"] else []
        about += [f"one of {', '.join(said['choices'])}"] if said["choices"] else []
        about += ["required" if required else f"default: {_yaml(default)}"]
        yield from (f"{indent}# {line}" for line in textwrap.wrap("; ".join(about), 100))
        yield f"{indent}{field.name}: {_yaml(value)}"


def _yaml(value: Any) -> str:
    line = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return line.removesuffix("...\n").strip()


def flags() -> str:
    """A table of flags for each family, and for what goes with all of them."""
    sections = [(f"`--arch {name}_*`", settings) for name, settings in FAMILIES.items()]
    sections += [
        ("σ-MoE, in the feed-forward of any family", SigmaMoESettings),
        ("Criteria with routing: `--criterion *_with_routing`", RoutingLossConfig),
        (
            "Block coordinate descent: `--task translation_bcd`, `language_modeling_bcd`",
            BlockCoordinateDescentConfig,
        ),
        ("Carried context: `--task language_modeling_truncated_bptt`", TruncatedBPTTConfig),
    ]
    head = ["Flag", "Default", "Meaning"]
    tables = [
        f"### {title}\n\n{grid(head, list(_flags(settings)))}" for title, settings in sections
    ]
    positions = ["`--positions`", "of the arch", f"{_choices(POSITIONS)}; position encoding"]
    start = [
        "`--initialization`",
        "of the arch",
        f"{_choices(INITIALIZATIONS)}; {INITIALIZATION_HELP}",
    ]
    branch = ["`--attention-branch-scale`", "–", BRANCH_SCALE_HELP]
    scale = ["`--attention-output-scale`", "–", OUTPUT_SCALE_HELP]
    gates = ["`--head-gate`", "`none`", f"{_choices(HEAD_GATES)}; {HEAD_GATE_HELP}"]
    check = ["`--no-kernel-check`", "off", KERNEL_CHECK_HELP]
    compiles = [f"`{COMPILE}`", "off", COMPILE_HELP]
    switches = [[f"`{flag}`", "off", text] for flag, text in SWITCHES.items()]
    for title, lines in (
        (
            "Every architecture here",
            [positions, *_flags(FamilySettings), start, branch, scale, gates, check],
        ),
        ("Every training of a Transformer, fairseq's included", [compiles]),
        ("Causal language models", switches),
    ):
        tables.append(f"### {title}\n\n{grid(head, lines)}")
    return "\n\n".join(tables)


def _flags(settings: Any) -> Iterator[list[str]]:
    fairseqs = {field.name for base in settings.__bases__ for field in _fields(base)}
    for field in _fields(settings):
        if field.name in fairseqs or "help" not in field.metadata:
            continue
        flag = "--" + field.name.replace("_", "-")
        negated = (
            f", `--no-{flag[2:]}`"
            if settings in FAMILIES.values() and field.default is False
            else ""
        )
        choices = field.metadata.get("choices") or (
            list(field.type)
            if isinstance(field.type, enum.EnumMeta)
            else _annotated_choices(settings, field)
        )
        text = (f"{_choices(choices)}; " if choices else "") + field.metadata["help"]
        default = (
            "off"
            if field.default is False
            else "–"
            if field.default is None
            else f"`{field.default}`"
        )
        yield [f"`{flag}`{negated}", default, text.replace("|", "\\|")]


def _fields(settings: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ()


def _annotated_choices(settings: Any, field: dataclasses.Field) -> list[str]:
    """The choices of a fairseq flag, whose type is an enum."""
    kind = settings.__annotations__.get(field.name)
    return [str(member.value) for member in kind] if isinstance(kind, enum.EnumMeta) else []


def _choices(values: Any) -> str:
    return " ".join(f"`{value}`" for value in values)


def architectures() -> str:
    """Every `--arch` that the plugin registers, by the model it belongs to."""
    from fairseq.models import MODEL_REGISTRY

    lines = [
        [f"`{model}`", " ".join(f"`{arch}`" for arch in archs if arch != model) or "–"]
        for model, archs in sorted(ARCH_MODEL_INV_REGISTRY.items())
        if MODEL_REGISTRY[model].__module__.startswith("moa_fairseq.")
    ]
    dense = sorted(
        arch
        for model, archs in ARCH_MODEL_INV_REGISTRY.items()
        if not MODEL_REGISTRY[model].__module__.startswith("moa_fairseq.")
        for arch in archs
        if _registered_here(arch)
    )
    if dense:
        lines.append(["of fairseq's own models", " ".join(f"`{arch}`" for arch in dense)])
    return grid(["Model", "Architectures"], lines)


def _registered_here(arch: str) -> bool:
    from fairseq.models import ARCH_CONFIG_REGISTRY

    return ARCH_CONFIG_REGISTRY[arch].__module__.startswith("moa_fairseq.")


def verbs() -> str:
    """The verbs of `moa-fairseq`, and what can be analysed."""
    lines = [[f"`moa-fairseq {verb}`", summary] for verb, (_, summary) in VERBS.items()]
    lines += [[f"`moa-fairseq analyze {kind.NAME}`", kind.SUMMARY] for kind in KINDS]
    return grid(["Command", "What it does"], lines)


def patch_table() -> str:
    """The table of `moa_fairseq.plugin.fairseq_compat.PATCHES`: what is changed, why, and the test."""
    lines = []
    for patch in PATCHES:
        what = ", ".join(
            f"`{each}`"
            for each in patch.target.replace("fairseq.", "").replace(":", ".").split(", ")
        )
        file, _, test = patch.test.partition("::")
        lines.append([what, patch.reason.replace("|", "\\|"), f"[{test}](../tests/{file})"])
    return grid(["What is changed", "Why", "Test"], lines)


def fill(text: str, parts: Mapping[str, str]) -> str:
    """`text`, with what stands between the markers of each part replaced by that part.

    A document need not have all parts; where it has a marker, both stand in it once and in order.
    """
    for name, part in parts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if begin in text or end in text:
            if (
                text.count(begin) != 1
                or text.count(end) != 1
                or text.index(begin) > text.index(end)
            ):
                raise SystemExit(f"{begin} and {end} must stand there once, in this order.")
            before, rest = text.split(begin)
            text = f"{before}{begin}\n\n{part.strip()}\n\n{end}{rest.split(end)[1]}"
    return text


def fresh(name: str, parts: Mapping[str, str]) -> str:
    """The text of a document with these parts; a file that is a part is generated as a whole."""
    if name in parts:
        return parts[name]
    if not (ROOT / name).is_file():
        raise SystemExit(f"{name} is missing. Write it with the markers of its generated parts.")
    return fill((ROOT / name).read_text(encoding="utf-8"), parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--values", action="store_true", help="only numbers in the text, no tables")
    args = parser.parse_args()
    texts = {}
    if not args.values:
        generated = parts()
        texts = {name: fresh(name, generated) for name in DOCUMENTS}
    for path in documents():
        name = path.relative_to(ROOT).as_posix()
        texts[name] = fill_values(texts.get(name) or path.read_text(encoding="utf-8"), name)
    stale = []
    for name, wanted in texts.items():
        path = ROOT / name
        if not path.is_file() or path.read_text(encoding="utf-8") != wanted:
            stale.append(name)
            if not args.check:
                with atomic_write(path) as stream:
                    stream.write(wanted)
    if not args.values and forest_in_file() != forest_text():
        stale.append(FOREST.relative_to(ROOT).as_posix())
        if not args.check:
            save(draw_forest(), FOREST, forest_text())
    print(f"{'out of date' if args.check else 'rewritten'}: {', '.join(stale) or 'nothing'}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
