"""A study file: systems, seeds and contrasts; the runs that follow from them, and what they measured."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.json_files import is_number
from moa_fairseq.experiments.make import changes
from moa_fairseq.experiments.recipes.loading import build, fail, find_recipe, load_recipe, read_mapping
from moa_fairseq.experiments.recipes.schema import EXECUTION_FLAGS, Recipe
from moa_fairseq.experiments.study.records import DIVERGED, REMEDY, Record, records_of

STAGES = ("train", "all")
MOST_RUNS = 100_000
# The numbers of a study file, and of its tuning: lowest and highest.
_LIMITS = {
    "seeds": (1, MOST_RUNS),
    "first_seed": (0, 2**31),
    "threads": (1, 1024),
    "last": (1, 10_000),
    "margin": (0, 100),
    "levels": (0, 10_000),
}
_NAME = re.compile(r"\w[\w.+-]{0,63}")  # of folders and files
_ANEW = "Take the change back, or give the study another name, under which it starts over."
# Not part of a record's settings: the seed and the precision, which it has in separate fields, and how a
# training runs.
_FREE = (
    *("train.seed", "train.precision", "train.keep_last_epochs"),
    *(f"{section}.flags.{flag}" for section in ("model", "train") for flag in EXECUTION_FLAGS),
)
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class System:
    """One line of the tables.

    Args:
        label: its name for people.
        recipe: a path from the study file's folder, or the name of a shipped recipe.
        family: of its attention; systems of one family share a colour.
        set: `section.key: value` over the recipe, as --set takes them.
    """

    label: str
    recipe: str
    family: str = "dense"
    set: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Contrast:
    """first − second, and the question that the difference answers."""

    first: str
    second: str
    question: str


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The runs that choose values for each system: the point of a grid with the lowest mean loss.

    They have separate seeds, which do not count later, and their records are in a folder NAME_tuning.
    A point with fewer diverged runs is better, whatever its loss is.

    Args:
        grid: `section.key` → the values to try.
        seeds: number per point.
        first_seed: the others follow it.
        set: overrides of the systems' values, such as a smaller budget.
    """

    grid: dict[str, list[Any]]
    seeds: int = 1
    first_seed: int = 101
    set: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Study:
    """A study file, merged over its `base:`, if any. The first system is the baseline.

    Args:
        study: its name, which is the file's.
        question: the question to decide, one sentence.
        seeds: number per system.
        systems: name → a `System`.
        contrasts: name → a `Contrast`.
        set: for every system, overridden by its own.
        tuning: a `Tuning`, or None.
        first_seed: the others follow it.
        stage: "train", or "all" to score as well.
        threads: per run on a CPU.
        last: the loss is the mean of so many last validations, in bits.
        margin: differences within ± this are called equivalent, in bits.
        levels: number of equal training losses at which the losses are also compared; 0: none.
    """

    study: str
    question: str
    seeds: int
    systems: dict[str, Any]
    contrasts: dict[str, Any] = dataclasses.field(default_factory=dict)
    set: dict[str, Any] = dataclasses.field(default_factory=dict)
    tuning: dict[str, Any] | None = None
    first_seed: int = 1
    stage: str = "train"
    threads: int = 1
    last: int = 5
    margin: float = 0.01
    levels: int = 0


class Run(NamedTuple):
    """One training.

    Args:
        system: its name in the study.
        seed: of the training.
        recipe: the file.
        overrides: the system's `section.key: value`.
        records: the folder with the study's records.
    """

    system: str
    seed: int
    recipe: Path
    overrides: dict[str, Any]
    records: Path

    @property
    def name(self) -> str:
        """The name of the run folder, and of its translations."""
        return f"{self.system.replace(' ', '-')}-seed{self.seed}"

    @property
    def block(self) -> tuple[int, str]:
        """The block of runs to compare with each other: all of one seed, in tuning only of one system."""
        system, is_trial, _ = self.system.partition(" ")
        return self.seed, system if is_trial else ""

    def load(self) -> Recipe:
        """Its recipe with the system's values, still without the seed."""
        overrides = [f"{key}={json.dumps(value)}" for key, value in self.overrides.items()]
        return load_recipe(self.recipe, overrides)


def load_study(path: Path, records: Path, tune: bool = False) -> Study:
    """Read and check a study file.

    Args:
        path: the file.
        records: the folder of all studies' records.
        tune: its tuning runs, a system for each point of the grid; otherwise the systems have the values
            selected by the tuning.

    Raises:
        UserError: with file and key; also if the tuning is not complete, or every run of a system in it
            diverged.
    """
    file = str(path)
    study = build(Study, _with_base(path), file)
    if study.tuning is None:
        tuning = None
    else:
        tuning = build(Tuning, study.tuning, file, "tuning")
    _check(study, tuning, file)
    if tune and not tuning:
        fail(file, "tuning", "is missing: --tune needs its grid, e.g. {grid: {train.flags.lr: [1, 2]}}.")
    rows = {key: build(System, row, file, f"systems.{key}") for key, row in study.systems.items()}
    rows = {key: dataclasses.replace(row, set={**study.set, **row.set}) for key, row in rows.items()}
    if tuning:
        grids = {key: _grid(key, row, tuning, file) for key, row in rows.items()}
    else:
        grids = {}
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
        found = fitting_records(trial, runs)
        if missing := len(runs) - len(found):
            raise UserError(
                f"{path}: {missing} of {len(runs)} tuning runs are missing. Run it with --tune first."
            )
        losses = losses_of(trial, runs, found)
        diverged = Counter(run.system for run in runs if _has_diverged(trial, found[run.name]))
        for key, grid in grids.items():
            best = min(grid, key=lambda name: (diverged[name], sum(losses[name].values())))
            if diverged[best] == tuning.seeds:
                why = f"every tuning run of system {key} diverged, so there is no best point of its grid"
                remedy = "Give lower values, and run it with --tune again."
                fail(file, "tuning.grid", f"{why}. {remedy}")
            rows[key] = dataclasses.replace(rows[key], set={**rows[key].set, **grid[best][1]})
    contrasts = {}
    for key, row in study.contrasts.items():
        contrasts[key] = contrast = build(Contrast, row, file, f"contrasts.{key}")
        if unknown := {contrast.first, contrast.second} - rows.keys():
            fail(file, f"contrasts.{key}", f"there is no system {min(unknown)!r}.")
        if contrast.first == contrast.second:
            fail(file, f"contrasts.{key}", f"first and second are both {contrast.first!r}.")
    return dataclasses.replace(study, systems=rows, contrasts=contrasts)


def _with_base(path: Path) -> dict[str, Any]:
    """The mapping of a study file over that of its `base:`, a study file whose path begins in its folder.

    If both have a mapping for a key (set, systems, contrasts, tuning), it has the entries of both; otherwise
    the file's own value counts. So a system or a contrast in both files is the file's.
    """
    mapping = read_mapping(path, "study")
    name = mapping.pop("base", None)
    if name is None:
        return mapping
    if not isinstance(name, str):
        fail(str(path), "base", "must be the path of a study file.")
    below = read_mapping(path.parent / name, "study")
    if "base" in below:
        fail(str(path), "base", f"is {name}, which has a base itself, but a study has only one.")
    for key, value in below.items():
        above = mapping.get(key, value)
        if isinstance(value, dict) and isinstance(above, dict):
            mapping[key] = {**value, **above}
        else:
            mapping[key] = above
    return mapping


def _check(study: Study, tuning: Tuning | None, file: str) -> None:
    """Raise UserError for an invalid name, number or stage.

    Also for too many runs, and for seeds of the tuning that are also seeds of the study.
    """
    for key, values in {"": study, **({"tuning.": tuning} if tuning else {})}.items():
        for name, (low, high) in _LIMITS.items():
            value = getattr(values, name, low)
            if not (is_number(value) and low <= value <= high):
                fail(file, key + name, f"must be between {low} and {high:,}, not {value}.")
    if study.stage not in STAGES:
        fail(file, "stage", f"{study.stage[:80]!r} is not one of {', '.join(STAGES)}.")
    names = {"study": study.study, **{f"systems.{key}": key for key in study.systems}}
    if bad := next((key for key, name in names.items() if not _NAME.fullmatch(name)), None):
        why = "must start with a letter or digit, and have at most 64 letters, digits, and ._+- only."
        fail(file, bad, why)
    if not study.systems:
        fail(file, "systems", "is empty. Give at least one.")
    runs = {"seeds": study.seeds * len(study.systems)}
    if tuning:
        points = math.prod(map(len, tuning.grid.values()))
        if not points or not tuning.grid:
            fail(file, "tuning.grid", "has no point. Give each key at least one value.")
        runs["tuning.grid"] = points * tuning.seeds * len(study.systems)
        shared = max(study.first_seed, tuning.first_seed)
        end = study.first_seed + study.seeds
        if shared < min(end, tuning.first_seed + tuning.seeds):
            why = f"makes seed {shared} a tuning seed, but it is also one of the study's seeds"
            remedy = f"Give {end} or more, or give the study another first_seed."
            fail(file, "tuning.first_seed", f"is {tuning.first_seed}, which {why}. {remedy}")
    for key, number in runs.items():
        if number > MOST_RUNS:
            fail(file, key, f"makes {number:,} runs, but a study has at most {MOST_RUNS:,}. Give fewer.")


def _grid(key: str, row: System, tuning: Tuning, file: str) -> dict[str, tuple[System, dict[str, Any]]]:
    """Name → system and its point, for every point of the grid."""
    found: dict[str, tuple[System, dict[str, Any]]] = {}
    for values in itertools.product(*tuning.grid.values()):
        point = dict(zip(tuning.grid, values))
        texts = [(name.rpartition(".")[2], str(value)) for name, value in point.items()]
        name = key + "".join(f" {_file_name(flag)}={_file_name(text)}" for flag, text in texts)
        if name in found:
            fail(
                file, "tuning.grid", f"has {name.partition(' ')[2]} twice, so its runs would share a record."
            )
        label = row.label + "".join(f" {flag}={text}" for flag, text in texts)
        values_of_trial = {**row.set, **tuning.set, **point}
        found[name] = dataclasses.replace(row, label=label, set=values_of_trial), point
    return found


def _file_name(text: str) -> str:
    """The text if it can be part of a file's name, else its letters and digits with a hash of the whole."""
    if re.fullmatch(r"[\w.+-]{1,40}", text):
        return text
    return re.sub(r"[^\w.+-]+", "_", text)[:30] + hashlib.sha256(text.encode()).hexdigest()[:8]


def runs_of(study: Study, folder: Path, records: Path) -> list[Run]:
    """Every run in its order: all systems of one seed, then those of the next.

    Args:
        study: of which runs.
        folder: of the study file.
        records: the folder of all studies' records.
    """
    seeds = range(study.first_seed, study.first_seed + study.seeds)
    return [
        Run(key, seed, find_recipe(Path(row.recipe), folder), row.set, records / study.study)
        for seed, (key, row) in itertools.product(seeds, study.systems.items())
    ]


def settings_of(run: Run, stage: str) -> dict[str, Any]:
    """The settings of a result except the seed: the stage, and the recipe's values that are not defaults."""

    def said(section: Any, dot: str = "") -> Iterator[tuple[str, Any]]:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            key = f"{dot}{field.name}"
            if dataclasses.is_dataclass(value):
                yield from said(value, f"{key}.")
            elif field.name == "flags":
                yield from ((f"{key}.{flag}", item) for flag, item in value.items() if item is not None)
            elif value != field.default:
                yield key, value

    recipe = dataclasses.replace(run.load(), reproduces=None)
    if stage == "train":
        recipe = dataclasses.replace(recipe, average=None, generate=None, score=None)
    found = {
        key: value for key, value in said(recipe) if key not in ("experiment", "summary", "rows", *_FREE)
    }
    return {"stage": stage, **found}


def fitting_records(study: Study, runs: list[Run], strict: bool = False) -> dict[str, dict[str, Any]]:
    """Name → record, of the runs whose record fits them.

    A record fits if it is of the study, system and seed, and its settings are those of the study and its
    recipes now; a record without settings needs a command with the study's part of them. A warning lists the
    others.

    Args:
        study: of which records.
        runs: all of its runs.
        strict: the others are an error.

    Raises:
        UserError: for a damaged record, and with `strict` for a record that does not fit.
    """
    found: dict[str, dict[str, Any]] = {}
    others: dict[str, tuple[str, str]] = {}
    settings: dict[str, dict[str, Any]] = {}
    records: dict[tuple[str, int], Record] = {}
    for folder in {run.records for run in runs}:
        records.update(records_of(folder))
    for run in runs:
        if (run.system, run.seed) not in records:
            continue
        where, record = records[run.system, run.seed]
        now = {"study": study.study}
        made = {"study": record["study"]}
        # the record of another study was copied here
        if made == now:
            remedy = _ANEW
        else:
            remedy = REMEDY
        if made == now and record.get("settings"):
            made = record["settings"]
            now = settings[run.system] = settings.get(run.system) or settings_of(run, study.stage)
        elif made == now:
            now = {"recipe": run.recipe.name, "stage": study.stage, **run.overrides}
            made = _settings_in(record.get("command") or "")
        before, after = ({k: v for k, v in said.items() if k not in _FREE} for said in (made, now))
        if different := changes(before, after):
            why = "; ".join(": ".join(each)[:200] for each in list(different.items())[:5])
            others[where] = why, remedy
        else:
            found[run.name] = record
    if others and strict:
        first, (why, remedy) = next(iter(others.items()))
        raise UserError(
            f"{len(others)} of {len(found) + len(others)} records have other settings than the study has "
            f"now, such as {first} ({why}). {remedy}"
        )
    for where, (why, _) in others.items():
        log.warning("%s is ignored: its settings differ from the study's (%s)", where, why)
    return found


def _settings_in(command: str) -> dict[str, Any]:
    """Recipe, stage and values in the command of a run."""
    found: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # an edited command
        words = shlex.split(command)
        for flag, word in itertools.pairwise(words):
            key, _, value = word.partition("=")
            if flag == "--set":
                found[key] = json.loads(value)
            elif flag in ("recipe", "--stage"):
                found[flag.lstrip("-")] = Path(word).name
    return found


def losses_of(
    study: Study,
    runs: list[Run],
    records: dict[str, dict[str, Any]],
    levels: NDArray[np.float64] | None = None,
) -> dict[str, dict[int, float]]:
    """System → seed → loss, of the runs that have a record. A diverged run counts as the worst of all.

    Args:
        study: gives the number of validations to average.
        runs: the runs to read.
        records: name of a run → its record.
        levels: training losses, in bits, at which the validation loss is read, instead of the last
            validations.
    """
    found: dict[str, dict[int, float]] = {key: {} for key in study.systems}
    diverged = []
    for run in runs:
        if record := records.get(run.name):
            if _has_diverged(study, record):
                diverged.append(run)
            elif levels is None:
                last = _last(study, record)
                found[run.system][run.seed] = sum(last) / len(last)
            # on the straight line between the validations beside each level
            elif pairs := pairs_of(record):
                train, valid = np.transpose(sorted(pairs.values()))
                found[run.system][run.seed] = float(np.interp(levels, train, valid).mean())
    worst = max((loss for row in found.values() for loss in row.values()), default=float("nan"))
    for run in diverged:
        found[run.system][run.seed] = worst
    return found


def common_levels(study: Study, records: list[dict[str, Any]]) -> NDArray[np.float64]:
    """study.levels training losses that all records have, spread evenly.

    They go from the lowest that all records reached to one bit above, and no higher than the highest of any
    record: above that it has no validation loss.

    Args:
        study: says how many levels.
        records: of the runs that are compared; those that diverged move no level.

    Returns:
        The levels; none where no training loss lies between the lowest and the highest of every record.
    """
    trained = [
        [train for train, _ in pairs.values()]
        for record in records
        if record["end"] != DIVERGED and (pairs := pairs_of(record))
    ]
    lowest = max(map(min, trained), default=0.0)
    highest = min([lowest + 1, *map(max, trained)])
    if highest < lowest:
        return np.empty(0)
    return np.linspace(lowest, highest, study.levels)


def pairs_of(record: dict[str, Any]) -> dict[float, tuple[float, float]]:
    """The training and the validation loss of each validation that has both numbers.

    Args:
        record: of a run.

    Returns:
        Updates → (training loss, validation loss).
    """
    keys = ("updates", "train", "valid")
    rows = [[row.get(key) for key in keys] for row in record["curve"]]
    return {updates: (train, valid) for updates, train, valid in rows if None not in (updates, train, valid)}


def _last(study: Study, record: dict[str, Any]) -> list[Any]:
    """The last validation losses of a run, of which its loss is the mean; None for one that is no number."""
    return [row.get("valid") for row in record["curve"]][-study.last :]


def _has_diverged(study: Study, record: dict[str, Any]) -> bool:
    """Whether a run has no loss of its own."""
    last = _last(study, record)
    return record["end"] == DIVERGED or not last or None in last
