"""A study file, read and checked: its base, its systems with tuned values, and its contrasts."""

import dataclasses
import hashlib
import itertools
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.loading import build, fail, read_mapping
from moa_fairseq.experiments.records.json_files import is_number
from moa_fairseq.experiments.study.design import (
    Contrast,
    Settings,
    Study,
    System,
    Tuning,
    fitting_records,
    runs_of,
)
from moa_fairseq.experiments.study.losses import has_diverged, losses_of

STAGES = ("train", "all")
MOST_RUNS = 100_000
# Numbers in a study file and in its tuning → lowest and highest value
_LIMITS = {
    "seeds": (1, MOST_RUNS),
    "first_seed": (0, 2**31),
    "threads": (1, 1024),
    "last": (1, 10_000),
    "margin": (0, 100),
    "levels": (0, 10_000),
}
_NAME = re.compile(r"\w[\w.+-]{0,63}")  # of a study or system: part of names of folders and files


class Trial(NamedTuple):
    """A system with values to try.

    Args:
        system: the system with the values.
        point: the values, a point of the tuning's grid.
    """

    system: System
    point: Settings


Trials = dict[str, Trial]  # name of a trial → the trial


def load_study(path: Path, records: Path, tune: bool = False) -> Study:
    """Read and check a study file.

    Args:
        path: the file.
        records: the folder of all studies' records.
        tune: whether the study of the tuning runs is returned, with a system for each point of the grid;
            otherwise the systems have the values selected by the tuning.

    Raises:
        UserError: for a mistake, with file and key; also if the tuning is not complete, or if all tuning runs
            of a system diverged.
    """
    file = str(path)
    study = build(Study, _with_base(path), file)
    _check_study(study, file)
    systems = {}
    for key, mapping in study.systems.items():
        system = build(System, mapping, file, f"systems.{key}")
        systems[key] = dataclasses.replace(system, set=study.set | system.set)
    if study.tuning is not None:
        tuning = build(Tuning, study.tuning, file, "tuning")
        _check_tuning(tuning, study, file)
        trials = {key: _trials(key, system, tuning, file) for key, system in systems.items()}
        tuning_study = _tuning_study(study, tuning, trials)
        if tune:
            return tuning_study
        for key, point in _best_points(tuning_study, trials, path, records).items():
            system = systems[key]
            systems[key] = dataclasses.replace(system, set=system.set | point)
    elif tune:
        problem = "is missing: --tune needs its grid, e.g. {grid: {train.flags.lr: [1, 2]}}."
        fail(file, "tuning", problem)
    contrasts = {}
    for key, mapping in study.contrasts.items():
        contrasts[key] = contrast = build(Contrast, mapping, file, f"contrasts.{key}")
        if unknown := {contrast.first, contrast.second} - systems.keys():
            fail(file, f"contrasts.{key}", f"there is no system {min(unknown)!r}.")
        if contrast.first == contrast.second:
            fail(file, f"contrasts.{key}", f"first and second are both {contrast.first!r}.")
    return dataclasses.replace(study, systems=systems, contrasts=contrasts)


def _tuning_study(study: Study, tuning: Tuning, trials: dict[str, Trials]) -> Study:
    """The study of the tuning runs, in which each trial is a system."""
    systems = {}
    for trials_of_system in trials.values():
        for name, trial in trials_of_system.items():
            systems[name] = trial.system
    return dataclasses.replace(
        study,
        study=f"{study.study}_tuning",
        seeds=tuning.seeds,
        first_seed=tuning.first_seed,
        systems=systems,
        contrasts={},
        stage="train",
    )


def _best_points(
    tuning_study: Study, trials: dict[str, Trials], path: Path, records: Path
) -> dict[str, Settings]:
    """System → the point of its best trial; a UserError if the tuning is not complete."""
    runs = runs_of(tuning_study, path.parent, records)
    fitting = fitting_records(tuning_study, runs)
    if missing := len(runs) - len(fitting):
        raise UserError(
            f"{path}: {missing} of {len(runs)} tuning runs are missing. Run it with --tune first."
        )
    losses = losses_of(tuning_study, runs, fitting)
    diverged = Counter(run.system for run in runs if has_diverged(tuning_study, fitting[run.name]))
    points = {}
    for key, of_system in trials.items():
        best = min(of_system, key=lambda name: (diverged[name], sum(losses[name].values())))
        if diverged[best] == tuning_study.seeds:
            problem = (
                f"every tuning run of system {key} diverged, so there is no best point of its grid"
            )
            remedy = "Give lower values, and run it with --tune again."
            fail(str(path), "tuning.grid", f"{problem}. {remedy}")
        points[key] = of_system[best].point
    return points


def _with_base(path: Path) -> dict[str, Any]:
    """The mapping in a study file, merged with that of its `base:`, a path from the folder of the file.

    If both files have a mapping for a key (set, systems, contrasts, tuning), the entries are merged, and an
    entry of the file replaces that of the base. Other values of the file replace those of the base.
    """
    mapping = read_mapping(path, "study")
    name = mapping.pop("base", None)
    if name is None:
        return mapping
    if not isinstance(name, str):
        fail(str(path), "base", "must be the path of a study file.")
    base = read_mapping(path.parent / name, "study")
    if "base" in base:
        fail(str(path), "base", f"is {name}, which has a base itself, but a study has only one.")
    merged = base | mapping
    for key in base.keys() & mapping.keys():
        if isinstance(base[key], dict) and isinstance(mapping[key], dict):
            merged[key] = base[key] | mapping[key]
    return merged


def _check_study(study: Study, file: str) -> None:
    """Raise UserError for an invalid name, number or stage, and for too many runs."""
    _check_limits(study, file)
    if study.stage not in STAGES:
        fail(file, "stage", f"{study.stage[:80]!r} is not one of {', '.join(STAGES)}.")
    if not study.systems:
        fail(file, "systems", "is empty. Give at least one.")
    names = {"study": study.study} | {f"systems.{key}": key for key in study.systems}
    for key, name in names.items():
        if not _NAME.fullmatch(name):
            rule = "must start with a letter or digit, and have at most 64 letters, digits, and ._+- only."
            fail(file, key, rule)
    _check_num_runs("seeds", study.seeds * len(study.systems), file)


def _check_tuning(tuning: Tuning, study: Study, file: str) -> None:
    """Raise UserError for an invalid number, an empty grid, too many runs, and a seed that the study has."""
    _check_limits(tuning, file, "tuning.")
    points = math.prod(map(len, tuning.grid.values()))
    if not points or not tuning.grid:
        fail(file, "tuning.grid", "has no point. Give each key at least one value.")
    _check_num_runs("tuning.grid", points * tuning.seeds * len(study.systems), file)
    seeds = range(study.first_seed, study.first_seed + study.seeds)
    tuning_seeds = range(tuning.first_seed, tuning.first_seed + tuning.seeds)
    if shared := set(seeds).intersection(tuning_seeds):
        rule = f"makes seed {min(shared)} a tuning seed, but it is also one of the study's seeds"
        remedy = f"Give {seeds.stop} or more, or give the study another first_seed."
        fail(file, "tuning.first_seed", f"is {tuning.first_seed}, which {rule}. {remedy}")


def _check_limits(section: Study | Tuning, file: str, prefix: str = "") -> None:
    """Raise UserError for a number that is too small or too large."""
    for name, (low, high) in _LIMITS.items():
        value = getattr(section, name, low)  # a tuning has only some of them
        if not (is_number(value) and low <= value <= high):
            fail(file, prefix + name, f"must be between {low} and {high:,}, not {value}.")


def _check_num_runs(key: str, number: int, file: str) -> None:
    if number > MOST_RUNS:
        problem = f"makes {number:,} runs, but a study has at most {MOST_RUNS:,}. Give fewer."
        fail(file, key, problem)


def _trials(key: str, system: System, tuning: Tuning, file: str) -> Trials:
    """The trials of a system, one for each point of the grid."""
    trials: Trials = {}
    for values in itertools.product(*tuning.grid.values()):
        point = dict(zip(tuning.grid, values))
        name = key
        label = system.label
        for setting, value in point.items():
            flag = setting.rpartition(".")[2]
            name += f" {_file_name(flag)}={_file_name(str(value))}"
            label += f" {flag}={value}"
        if name in trials:
            problem = f"has {name.partition(' ')[2]} twice, so its runs would share a record."
            fail(file, "tuning.grid", problem)
        settings = system.set | tuning.set | point
        trials[name] = Trial(dataclasses.replace(system, label=label, set=settings), point)
    return trials


def _file_name(text: str) -> str:
    """The text if it can be part of a file's name, else its letters and digits with a hash of the text."""
    if re.fullmatch(r"[\w.+-]{1,40}", text):
        return text
    return re.sub(r"[^\w.+-]+", "_", text)[:30] + hashlib.sha256(text.encode()).hexdigest()[:8]
