"""A study: systems, seeds and contrasts; the runs that follow from them, and what they measured."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.loading import find_recipe, load_recipe
from moa_fairseq.experiments.recipes.schema import EXECUTION_FLAGS, Recipe
from moa_fairseq.experiments.records.json_files import changes, selected
from moa_fairseq.experiments.study.records import DIVERGED, REMEDY, Record, records_of

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

    def values(section: Any, dot: str = "") -> Iterator[tuple[str, Any]]:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            key = f"{dot}{field.name}"
            if dataclasses.is_dataclass(value):
                yield from values(value, f"{key}.")
            elif field.name == "flags":
                for flag, item in value.items():
                    if item is not None:
                        yield f"{key}.{flag}", item
            elif value != field.default:
                yield key, value

    recipe = dataclasses.replace(run.load(), reproduces=None)
    if stage == "train":
        recipe = dataclasses.replace(recipe, average=None, generate=None, score=None)
    settings = {"stage": stage}
    settings.update(_without_free(dict(values(recipe))))
    for key in ("experiment", "summary", "rows"):
        settings.pop(key, None)
    return settings


def _without_free(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in _FREE}


def fitting_records(
    study: Study, runs: list[Run], strict: bool = False
) -> dict[str, dict[str, Any]]:
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
    fitting: dict[str, dict[str, Any]] = {}
    unfit: dict[str, tuple[str, str]] = {}
    settings: dict[str, dict[str, Any]] = {}
    records: dict[tuple[str, int], Record] = {}
    for folder in {run.records for run in runs}:
        records.update(records_of(folder))
    for run in runs:
        if (run.system, run.seed) not in records:
            continue
        location, record = records[run.system, run.seed]
        now = {"study": study.study}
        recorded = {"study": record["study"]}
        # the record of another study was copied here
        remedy = _ANEW if recorded == now else REMEDY
        if recorded == now and record.get("settings"):
            recorded = record["settings"]
            now = settings[run.system] = settings.get(run.system) or settings_of(run, study.stage)
        elif recorded == now:
            now = {"recipe": run.recipe.name, "stage": study.stage} | run.overrides
            recorded = _settings_in(record.get("command") or "")
        if differ := changes(_without_free(recorded), _without_free(now)):
            reasons = itertools.islice(map(": ".join, differ.items()), 5)
            reason = "; ".join(text[:200] for text in reasons)
            unfit[location] = reason, remedy
        else:
            fitting[run.name] = record
    if unfit and strict:
        first, (reason, remedy) = next(iter(unfit.items()))
        raise UserError(
            f"{len(unfit)} of {len(fitting) + len(unfit)} records have other settings than the study has "
            f"now, such as {first} ({reason}). {remedy}"
        )
    for location, (reason, _) in unfit.items():
        log.warning("%s is ignored: its settings differ from the study's (%s)", location, reason)
    return fitting


def _settings_in(command: str) -> dict[str, Any]:
    """Recipe, stage and values in the command of a run."""
    settings: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # an edited command
        words = shlex.split(command)
        for flag, word in itertools.pairwise(words):
            key, _, value = word.partition("=")
            if flag == "--set":
                settings[key] = json.loads(value)
            elif flag in ("recipe", "--stage"):
                settings[flag.lstrip("-")] = Path(word).name
    return settings


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
    losses: dict[str, dict[int, float]] = {key: {} for key in study.systems}
    diverged = []
    for run in runs:
        if record := records.get(run.name):
            if has_diverged(study, record):
                diverged.append(run)
            elif levels is None:
                last = _last(study, record)
                losses[run.system][run.seed] = sum(last) / len(last)
            # on the straight line between the validations beside each level
            elif pairs := pairs_of(record):
                train, valid = np.transpose(sorted(pairs.values()))
                losses[run.system][run.seed] = float(np.interp(levels, train, valid).mean())
    worst = max(itertools.chain(*map(dict.values, losses.values())), default=float("nan"))
    for run in diverged:
        losses[run.system][run.seed] = worst
    return losses


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
    lowest = 0.0
    highest = math.inf
    for record in records:
        pairs = pairs_of(record)
        if record["end"] != DIVERGED and pairs:
            train, _ = zip(*pairs.values())
            lowest = max(lowest, min(train))
            highest = min(highest, max(train))
    highest = min(highest, lowest + 1)
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
    pairs = {}
    for row in record["curve"]:
        updates, train, valid = selected(row, ("updates", "train", "valid")).values()
        if None not in (updates, train, valid):
            pairs[updates] = (train, valid)
    return pairs


def _last(study: Study, record: dict[str, Any]) -> list[Any]:
    """The last validation losses of a run, of which its loss is the mean; None for one that is no number."""
    return [row.get("valid") for row in record["curve"]][-study.last :]


def has_diverged(study: Study, record: dict[str, Any]) -> bool:
    """Whether a run has no loss of its own.

    Args:
        study: gives the number of validations that its loss is the mean of.
        record: of the run.
    """
    last = _last(study, record)
    return record["end"] == DIVERGED or not last or None in last
