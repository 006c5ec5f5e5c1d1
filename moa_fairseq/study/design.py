"""A study file: systems, seeds and contrasts; the runs that follow from them, and what they measured."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import yaml

from moa_fairseq.errors import UserError
from moa_fairseq.json_files import read_json
from moa_fairseq.recipes.loading import build
from moa_fairseq.recipes.rules import fail

DIVERGED = "diverged"


@dataclasses.dataclass(frozen=True)
class System:
    """One line of the tables. set: `section.key: value` over the recipe, as --set takes them."""

    label: str
    recipe: str
    family: str = "dense"
    set: Dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Contrast:
    """first − second, and the question that the difference answers."""

    first: str
    second: str
    question: str


@dataclasses.dataclass(frozen=True)
class Study:
    """What a study file says; recipes and tuned_by are named from the file's folder.

    set: for every system, under its own. grid: each system once for every combination of these values (for
    tuning). tuned_by: the study with a grid whose records choose each system's values: lowest mean loss.
    stage: "train", or "all" to score, too. The measure is the validation loss in bits, mean of the `last`
    validations; differences within ± margin are called equivalent. The first system is the baseline.
    """

    study: str
    question: str
    seeds: int
    systems: Dict[str, Any]
    contrasts: Dict[str, Any] = dataclasses.field(default_factory=dict)
    set: Dict[str, Any] = dataclasses.field(default_factory=dict)
    grid: Dict[str, Any] = dataclasses.field(default_factory=dict)
    tuned_by: Optional[str] = None
    first_seed: int = 1
    stage: str = "train"
    threads: int = 1
    last: int = 5
    margin: float = 0.01


class Run(NamedTuple):
    """One training. record: the file that says how it went; its name is that of the run folder, too."""

    system: str
    seed: int
    recipe: Path
    overrides: Dict[str, Any]
    record: Path


def load_study(path: Path, records: Path) -> Study:
    """Read and check a study file; its systems are those of the grid, with tuned values.

    records: the folder of all studies' records. Raises UserError that names file and key.
    """
    try:
        study = build(Study, yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from error
    if study.seeds < 1 or study.last < 1:
        fail(str(path), "seeds" if study.seeds < 1 else "last", "must be at least 1.")
    if bad := next((key for key in study.systems if not re.fullmatch(r"[\w.+-]+", str(key))), None):
        fail(str(path), f"systems.{bad}", "names files: use letters, digits, and ._+- only.")
    tuned = _tuned(path.parent / study.tuned_by, records) if study.tuned_by else {}
    systems = {}
    for key, row in study.systems.items():
        system = build(System, row, str(path), f"systems.{key}")
        if study.tuned_by and key not in tuned:
            fail(str(path), f"systems.{key}", f"is not in {study.tuned_by}: add it and run that.")
        for name, point in points(study, key).items():
            values = {**study.set, **system.set, **tuned.get(key, {}), **point}
            systems[name] = dataclasses.replace(
                system, label=system.label + name.removeprefix(key), set=values
            )
    contrasts = {}
    for key, row in study.contrasts.items():
        contrasts[key] = contrast = build(Contrast, row, str(path), f"contrasts.{key}")
        if unknown := {contrast.first, contrast.second} - systems.keys():
            fail(str(path), f"contrasts.{key}", f"there is no system {min(unknown)!r}.")
    return dataclasses.replace(study, systems=systems, contrasts=contrasts)


def points(study: Study, system: str) -> Dict[str, Dict[str, Any]]:
    """Name → values, of a system at each point of the grid (without one: the system itself, and nothing)."""
    found = (dict(zip(study.grid, values)) for values in itertools.product(*study.grid.values()))
    return {" ".join([system, *(f"{k.rpartition('.')[2]}={v}" for k, v in p.items())]): p for p in found}


def runs_of(study: Study, folder: Path, records: Path) -> List[Run]:
    """Every run in its order: all systems of one seed, then those of the next. folder: of the study file."""
    seeds = range(study.first_seed, study.first_seed + study.seeds)
    return [
        Run(
            key,
            seed,
            folder / row.recipe,
            row.set,
            records / study.study / f"{key.replace(' ', '-')}-seed{seed}.json",
        )
        for seed, (key, row) in itertools.product(seeds, study.systems.items())
    ]


def losses_of(study: Study, runs: List[Run]) -> Dict[str, Dict[int, float]]:
    """System → seed → loss, of the runs that have a record. A diverged run counts as the worst of all."""
    found: Dict[str, Dict[int, float]] = {key: {} for key in study.systems}
    diverged = []
    for run in runs:
        if record := read_record(run):
            if record["end"] == DIVERGED:
                diverged.append(run)
            else:
                curve = [row["valid"] for row in record["curve"]][-study.last :]
                found[run.system][run.seed] = sum(curve) / len(curve)
    worst = max((loss for row in found.values() for loss in row.values()), default=float("nan"))
    for run in diverged:
        found[run.system][run.seed] = worst
    return found


def read_record(run: Run) -> Dict[str, Any]:
    """The record of a run; {} where there is none yet."""
    try:
        return dict(read_json(run.record, "Delete it, or bring the committed one back with git checkout."))
    except FileNotFoundError:
        return {}


def _tuned(path: Path, records: Path) -> Dict[str, Dict[str, Any]]:
    """System → the values of a tuning study's grid with the lowest mean loss."""
    study = load_study(path, records)
    runs = runs_of(study, path.parent, records)
    if missing := sum(not run.record.is_file() for run in runs):
        raise UserError(f"{path}: {missing} of {len(runs)} runs have no record yet. Finish this study first.")
    losses = losses_of(study, runs)
    names = dict.fromkeys(name.partition(" ")[0] for name in study.systems)
    return {
        key: min((sum(losses[name].values()), point) for name, point in points(study, key).items())[1]
        for key in names
    }
