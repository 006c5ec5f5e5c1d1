"""A study: systems, seeds and contrasts; the runs that follow from them, and their records."""

import contextlib
import dataclasses
import itertools
import json
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.loading import find_recipe, load_recipe
from moa_fairseq.experiments.recipes.schema import EXECUTION_FLAGS, Recipe
from moa_fairseq.experiments.records.json_files import changes
from moa_fairseq.experiments.study.records import REMEDY, Content, Record, records_of

# Not part of a record's settings: the seed and the precision, which are separate fields of the record, and
# settings that change only how a training is executed
_IGNORED_KEYS = (
    *("train.seed", "train.precision", "train.keep_last_epochs"),
    *(f"{section}.flags.{flag}" for section in ("model", "train") for flag in EXECUTION_FLAGS),
)
Settings = dict[str, Any]  # section.key → value
Records = dict[str, Content]  # name of a run → the content of its record
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class System:
    """One line of the tables.

    Args:
        label: the name of the system in tables and pictures.
        recipe: a path from the study file's folder, or the name of a shipped recipe.
        family: the family of its attention; systems of one family share a colour.
        set: `section.key` → value that replaces the recipe's, as --set takes them.
    """

    label: str
    recipe: str
    family: str = "dense"
    set: Settings = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Contrast:
    """A comparison of two systems by the difference first − second.

    Args:
        first, second: the keys of the two systems.
        question: the question that the difference answers.
    """

    first: str
    second: str
    question: str


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The runs that choose values for each system: the point of a grid with the lowest mean loss.

    Their seeds are not those of the study, and their records are in a folder NAME_tuning. A point with fewer
    diverged runs is better, whatever its loss is.

    Args:
        grid: `section.key` → the values to try.
        seeds: the number of seeds for each point.
        first_seed: the first seed; the others follow it.
        set: `section.key` → value that replaces the systems', such as a smaller budget.
    """

    grid: dict[str, list[Any]]
    seeds: int = 1
    first_seed: int = 101
    set: Settings = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Study:
    """A study file, merged over its `base:`, if any. The first system is the baseline.

    Args:
        study: the name of the study, which is that of the file.
        question: the question to decide, one sentence.
        seeds: the number of seeds for each system.
        systems: name → a `System`, as a mapping in the file.
        contrasts: name → a `Contrast`, as a mapping in the file.
        set: `section.key` → value for all systems; a system's own value replaces it.
        tuning: a `Tuning`, or None.
        first_seed: the first seed; the others follow it.
        stage: "train", or "all", which also scores each run.
        threads: the number of threads of a run on a CPU.
        last: a run's loss is the mean of the losses, in bits, of this number of last validations.
        margin: differences within ± margin are called equivalent, in bits.
        levels: the number of equal training losses at which validation losses are also compared; 0: none.
    """

    study: str
    question: str
    seeds: int
    systems: dict[str, Any]
    contrasts: dict[str, Any] = dataclasses.field(default_factory=dict)
    set: Settings = dataclasses.field(default_factory=dict)
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
        system: the name of the system in the study; in a tuning "SYSTEM FLAG=VALUE …".
        seed: the seed of the training.
        recipe: the file of the recipe.
        overrides: `section.key` → value of the system that replaces the recipe's.
        records: the folder with the study's records.
    """

    system: str
    seed: int
    recipe: Path
    overrides: Settings
    records: Path

    @property
    def name(self) -> str:
        """The name of the run folder, and of its translations."""
        return f"{self.system.replace(' ', '-')}-seed{self.seed}"

    @property
    def block(self) -> tuple[int, str]:
        """The block of runs that are compared: those of one seed; in a tuning, only those of one system."""
        system, space, _ = self.system.partition(" ")
        return self.seed, system if space else ""

    def load(self) -> Recipe:
        """The recipe with the system's values, but without the seed."""
        overrides = [f"{key}={json.dumps(value)}" for key, value in self.overrides.items()]
        return load_recipe(self.recipe, overrides)


def runs_of(study: Study, folder: Path, records: Path) -> list[Run]:
    """All runs of a study in their order: all systems with one seed, then all with the next.

    Args:
        study: the study.
        folder: the folder of the study file.
        records: the folder of all studies' records.
    """
    seeds = range(study.first_seed, study.first_seed + study.seeds)
    return [
        Run(key, seed, find_recipe(Path(row.recipe), folder), row.set, records / study.study)
        for seed, (key, row) in itertools.product(seeds, study.systems.items())
    ]


def settings_of(run: Run, stage: str) -> Settings:
    """The settings that a record keeps: the stage, and the recipe's values that are not defaults.

    Args:
        run: the run.
        stage: the stage of the study, "train" or "all".

    Returns:
        Key → value, without the seed and other keys of _IGNORED_KEYS.
    """
    recipe = dataclasses.replace(run.load(), reproduces=None)
    if stage == "train":
        recipe = dataclasses.replace(recipe, average=None, generate=None, score=None)
    settings = {"stage": stage} | _compared(dict(_non_defaults(recipe)))
    for key in ("experiment", "summary", "rows"):
        settings.pop(key, None)
    return settings


def _non_defaults(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each field of a recipe or section that is not a default, and of each flag."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _non_defaults(value, f"{key}.")
        elif field.name == "flags":
            for flag, item in value.items():
                if item is not None:
                    yield f"{key}.{flag}", item
        elif value != field.default:
            yield key, value


def _compared(settings: Settings) -> Settings:
    """The settings without those that are ignored."""
    return {key: value for key, value in settings.items() if key not in _IGNORED_KEYS}


class Misfit(NamedTuple):
    """A record that does not fit its run.

    Args:
        where: the file and the line of the record.
        reason: the settings that differ.
        remedy: what to do, as a sentence.
    """

    where: str
    reason: str
    remedy: str


def fitting_records(study: Study, runs: list[Run], strict: bool = False) -> Records:
    """The records that fit the runs of a study.

    A record fits a run if it has the study, system and seed of the run, and the settings that the study and
    its recipe have now. If a record has no settings, those in its command are compared. A warning names each
    of the others.

    Args:
        study: the study.
        runs: all runs of the study.
        strict: whether a record that does not fit is an error.

    Returns:
        Name of a run → its record.

    Raises:
        UserError: for a damaged record, and with `strict` for a record that does not fit.
    """
    recorded: dict[tuple[str, int], Record] = {}
    for folder in {run.records for run in runs}:
        recorded.update(records_of(folder))
    fitting: Records = {}
    misfits = []
    settings: dict[str, Settings] = {}  # of each system: they do not depend on the seed
    for run in runs:
        record = recorded.get((run.system, run.seed))
        if record is None:
            continue
        if run.system not in settings and record.content.get("settings"):
            settings[run.system] = settings_of(run, study.stage)
        misfit = _misfit(study, run, record, settings.get(run.system, {}))
        if misfit:
            misfits.append(misfit)
        else:
            fitting[run.name] = record.content
    if misfits and strict:
        first = misfits[0]
        raise UserError(
            f"{len(misfits)} of {len(fitting) + len(misfits)} records have other settings than the study has "
            f"now, such as {first.where} ({first.reason}). {first.remedy}"
        )
    for misfit in misfits:
        log.warning(
            "%s is ignored: its settings differ from the study's (%s)", misfit.where, misfit.reason
        )
    return fitting


def _misfit(study: Study, run: Run, record: Record, settings: Settings) -> Misfit | None:
    """Why a record does not fit a run with these settings, or None."""
    content = record.content
    remedy = "Take the change back, or give the study another name, under which it starts over."
    if content["study"] != study.study:  # copied from another folder
        before = {"study": content["study"]}
        settings = {"study": study.study}
        remedy = REMEDY
    elif content.get("settings"):
        before = content["settings"]
    else:
        before = _settings_in_command(content.get("command") or "")
        settings = {"recipe": run.recipe.name, "stage": study.stage} | run.overrides
    differences = changes(_compared(before), _compared(settings))
    if not differences:
        return None
    reasons = [f"{key}: {change}"[:200] for key, change in differences.items()]
    return Misfit(record.where, "; ".join(reasons[:5]), remedy)


def _settings_in_command(command: str) -> Settings:
    """The recipe, the stage and the values of --set in the command of a run."""
    settings: Settings = {}
    with contextlib.suppress(ValueError):  # an edited command
        words = shlex.split(command)
        for flag, word in itertools.pairwise(words):
            key, _, value = word.partition("=")
            if flag == "--set":
                settings[key] = json.loads(value)
            elif flag in ("recipe", "--stage"):
                settings[flag.lstrip("-")] = Path(word).name
    return settings
