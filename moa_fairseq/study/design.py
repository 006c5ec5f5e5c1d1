"""A study file: systems, seeds and contrasts; the runs that follow from them, and what they measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import yaml
from numpy.typing import NDArray

from moa_fairseq.errors import UserError
from moa_fairseq.json_files import read_json
from moa_fairseq.recipes.loading import build, fail, load_recipe
from moa_fairseq.recipes.schema import Recipe

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
class Tuning:
    """The runs that choose values for each system: those of the lowest mean loss, of all points of a grid.

    They have seeds of their own, which are then not counted, and their records lie in a folder NAME_tuning.
    set: over what the systems have, such as a smaller budget.
    """

    grid: Dict[str, List[Any]]
    seeds: int = 1
    first_seed: int = 101
    set: Dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Study:
    """What a study file says; recipes are named from the file's folder.

    set: for every system, under its own. stage: "train", or "all" to score, too. Measured is the validation
    loss in bits, mean of the `last` validations; differences within ± margin are called equivalent. The first
    system is the baseline. levels: the losses are compared at so many equal training losses, too (0: not).
    """

    study: str
    question: str
    seeds: int
    systems: Dict[str, Any]
    contrasts: Dict[str, Any] = dataclasses.field(default_factory=dict)
    set: Dict[str, Any] = dataclasses.field(default_factory=dict)
    tuning: Optional[Dict[str, Any]] = None
    first_seed: int = 1
    stage: str = "train"
    threads: int = 1
    last: int = 5
    margin: float = 0.01
    levels: int = 0


class Run(NamedTuple):
    """One training. record: the file that says how it went; its name is that of the run folder, too."""

    system: str
    seed: int
    recipe: Path
    overrides: Dict[str, Any]
    record: Path

    @property
    def block(self) -> Tuple[int, str]:
        """Runs of one block are compared with each other: those of a seed, in tuning of a system alone."""
        system, is_trial, _ = self.system.partition(" ")
        return self.seed, system if is_trial else ""

    def load(self) -> Recipe:
        """Its recipe with the system's values, still without the seed."""
        overrides = [f"{key}={json.dumps(value)}" for key, value in self.overrides.items()]
        return load_recipe(self.recipe, overrides)


def load_study(path: Path, records: Path, tune: bool = False) -> Study:
    """Read and check a study file. tune: its tuning runs, a system for each point of the grid.

    Without it the systems have the values that the tuning chose. records: the folder of all studies' records.
    Raises UserError that names file and key, and where the tuning is not complete.
    """
    try:
        study = build(Study, yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from error
    if study.seeds < 1 or study.last < 1:
        fail(str(path), "seeds" if study.seeds < 1 else "last", "must be at least 1.")
    if bad := next((key for key in study.systems if not re.fullmatch(r"[\w.+-]+", str(key))), None):
        fail(str(path), f"systems.{bad}", "names files: use letters, digits, and ._+- only.")
    if tune and not study.tuning:
        fail(str(path), "tuning", "is missing: --tune needs its grid, e.g. {grid: {train.flags.lr: [1, 2]}}.")
    tuning = build(Tuning, study.tuning, str(path), "tuning") if study.tuning else None
    rows = {key: build(System, row, str(path), f"systems.{key}") for key, row in study.systems.items()}
    rows = {key: dataclasses.replace(row, set={**study.set, **row.set}) for key, row in rows.items()}
    grids = {key: _grid(key, row, tuning) for key, row in rows.items()} if tuning else {}
    if tuning:
        trials = {name: system for grid in grids.values() for name, (system, _) in grid.items()}
        trial = dataclasses.replace(
            study,
            study=f"{study.study}_tuning",
            seeds=tuning.seeds,
            first_seed=tuning.first_seed,
            systems=trials,
            contrasts={},
            stage="train",
        )
        if tune:
            return trial
        runs = runs_of(trial, path.parent, records)
        if missing := sum(not run.record.is_file() for run in runs):
            raise UserError(
                f"{path}: {missing} of {len(runs)} tuning runs are left. Run it with --tune first."
            )
        losses = losses_of(trial, runs)
        for key, grid in grids.items():
            best = min(grid, key=lambda name: sum(losses[name].values()))
            rows[key] = dataclasses.replace(rows[key], set={**rows[key].set, **grid[best][1]})
    contrasts = {}
    for key, row in study.contrasts.items():
        contrasts[key] = contrast = build(Contrast, row, str(path), f"contrasts.{key}")
        if unknown := {contrast.first, contrast.second} - rows.keys():
            fail(str(path), f"contrasts.{key}", f"there is no system {min(unknown)!r}.")
    return dataclasses.replace(study, systems=rows, contrasts=contrasts)


def _grid(key: str, row: System, tuning: Tuning) -> Dict[str, Tuple[System, Dict[str, Any]]]:
    """Name → system and its point, for every point of the grid."""
    found = {}
    for values in itertools.product(*tuning.grid.values()):
        point = dict(zip(tuning.grid, values))
        suffix = "".join(f" {name.rpartition('.')[2]}={value}" for name, value in point.items())
        values_of_trial = {**row.set, **tuning.set, **point}
        found[key + suffix] = dataclasses.replace(row, label=row.label + suffix, set=values_of_trial), point
    return found


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


def losses_of(
    study: Study, runs: List[Run], levels: Optional[NDArray[np.float64]] = None
) -> Dict[str, Dict[int, float]]:
    """System → seed → loss, of the runs that have a record. A diverged run counts as the worst of all.

    levels: training losses at which the validation loss is read, in place of the last validations.
    """
    found: Dict[str, Dict[int, float]] = {key: {} for key in study.systems}
    diverged = []
    for run in runs:
        if record := read_record(run):
            if record["end"] == DIVERGED:
                diverged.append(run)
            elif levels is None:
                last = [row["valid"] for row in record["curve"]][-study.last :]
                found[run.system][run.seed] = sum(last) / len(last)
            elif pairs := _pairs(record):  # on the straight line between the validations beside each level
                train, valid = np.transpose(sorted(pairs))
                found[run.system][run.seed] = float(np.interp(levels, train, valid).mean())
    worst = max((loss for row in found.values() for loss in row.values()), default=float("nan"))
    for run in diverged:
        found[run.system][run.seed] = worst
    return found


def common_levels(study: Study, runs: List[Run]) -> NDArray[np.float64]:
    """study.levels training losses, spread evenly over one bit from the lowest that all of runs reached."""
    records = [record for run in runs if (record := read_record(run)) and record["end"] != DIVERGED]
    lowest = max((min(pairs)[0] for record in records if (pairs := _pairs(record))), default=0.0)
    return np.linspace(lowest, lowest + 1, study.levels)


def _pairs(record: Dict[str, Any]) -> List[Tuple[float, float]]:
    """(training, validation) loss at each validation before which a training loss was logged."""
    return [(row["train"], row["valid"]) for row in record["curve"] if "train" in row]


def read_record(run: Run) -> Dict[str, Any]:
    """The record of a run; {} where there is none yet."""
    try:
        return dict(read_json(run.record, "Delete it, or bring the committed one back with git checkout."))
    except FileNotFoundError:
        return {}
