"""The runs of a study: each is a run of its recipe, with a record of its result."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import portalocker

from moa_fairseq.errors import Diverged, UserError
from moa_fairseq.experiments.data.binarised import is_binarised
from moa_fairseq.experiments.data.prepare import content_digest
from moa_fairseq.experiments.data.unknown import count_symbols
from moa_fairseq.experiments.make import read_step_records
from moa_fairseq.experiments.recipes.batch import fit
from moa_fairseq.experiments.recipes.checkpoints import prepared_data
from moa_fairseq.experiments.recipes.hardware import choose_devices, detect_hardware, precision_name
from moa_fairseq.experiments.recipes.loading import check_flags
from moa_fairseq.experiments.recipes.result import data_differences, maker
from moa_fairseq.experiments.recipes.train_log import finite, read_records, summarise, updates_of
from moa_fairseq.experiments.recipes.workload import workload
from moa_fairseq.experiments.records.json_files import saved_json, selected
from moa_fairseq.experiments.records.provenance import commit
from moa_fairseq.experiments.scoring.generate_log import read_generate_log
from moa_fairseq.experiments.study.design import Run, Study, fitting_records, settings_of
from moa_fairseq.experiments.study.records import (
    DIVERGED,
    FINISHED,
    Record,
    append_record,
    check_records,
    records_of,
    write_output,
)
from moa_fairseq.files import disk_errors
from moa_fairseq.process import Executor, flags, refuse_without_locks, to_shell
from moa_fairseq.process.signals import terminate_as_interrupt

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """The folders, data and devices of a study.

    Args:
        study: the study.
        folders: the folder of its run folders.
        data: --data of its recipes.
        gpus: of each run; 0 for the CPU.
    """

    study: Study
    folders: Path
    data: Path | None
    gpus: int

    def conditions(self, run: Run) -> dict[str, str]:
        """Properties that all runs of one block share: devices with threads, and the precision."""
        devices = choose_devices(detect_hardware(), self.gpus, dry_run=False)
        recipe = run.load()
        if devices.gpus > 1:  # as many as can share its updates
            recipe, devices, _ = fit(recipe, devices, prepared_data(self.folders / run.name))
        precision = precision_name(recipe.train.precision, devices, recipe.model)
        return {
            "hardware": f"{devices.describe()}, {self.study.threads} threads",
            "precision": precision,
        }

    def trained(self, run: Run) -> dict[str, Any] | None:
        """Provenance of the training in a run's folder, from its record; None if there is nothing yet."""
        checkpoints = self.folders / run.name / "checkpoints"
        if not any(checkpoints.glob("*.pt")):
            return None
        return _made_by(maker(self.folders / run.name, run.load(), checkpoints))


def open_runs(runs: list[Run], place: Place) -> list[Run]:
    """The runs that have no record yet and can be made here.

    Compared runs differ in one thing only: runs of a block that was started on another kind of machine, or in
    another precision, are left out, with a warning. Raises UserError if another commit made the records,
    if they are of data with another content, if --data was prepared with other values than a recipe's, and
    if a remaining system has an unknown flag, or flags that make no model: a mistake in a later system is
    found before the first is trained.
    """
    prepared = place.data.parent if place.data and place.data.name == "binarised" else place.data
    binarised = prepared and prepared / "binarised"
    if place.data and is_binarised(place.data):
        binarised = place.data
    if prepared and (prepared / "manifest.json").is_file():
        _check_values(runs, place, prepared)
    records = fitting_records(place.study, runs, strict=True)
    finished = []
    for run in runs:
        made_by = records.get(run.name) or place.trained(run)
        if made_by is not None:
            finished.append((run, made_by))
    current_commit = commit()
    digest = content_digest(binarised) if binarised and is_binarised(binarised) else None
    for run, made_by in finished:
        _check_commit(run, made_by, place, current_commit)
        _check_text(run.name, made_by, place, digest)
    incomplete = {run.block for run in runs if run.name not in records}
    incomplete_runs = [(run, made) for run, made in finished if run.block in incomplete]
    elsewhere = _made_elsewhere(incomplete_runs, place)
    remaining = [run for run in runs if run.block not in elsewhere and run.name not in records]
    for run in {run.system: run for run in remaining}.values():
        try:
            recipe = run.load()
            check_flags(recipe)
            workload(recipe, None)  # builds the model, without weights
        except UserError as error:  # any: the system is named with it
            raise UserError(f"System {run.system} of {place.study.study}: {error}") from error
    return remaining


def _made_by(made: dict[str, Any]) -> dict[str, Any]:
    """The part of a record that says what made the run, as of `maker`."""
    record = selected(made, ("precision", "data", "versions", "commit", "date"))
    if made.get("hardware"):
        record["hardware"] = f"{made['hardware']}, {made.get('threads')} threads"
    return {key: value for key, value in record.items() if value is not None}


def _check_values(runs: list[Run], place: Place, prepared: Path) -> None:
    """Check that --data was prepared with the values of each recipe."""
    for run in {run.recipe: run for run in runs}.values():
        if differ := data_differences(run.load(), prepared, {}):
            problem = f"--data {place.data} differs from the data of {run.recipe}"
            remedy = "Prepare it with the recipe's values: moa-fairseq prepare --help"
            raise UserError(f"{problem}: {'; '.join(map(': '.join, differ.items()))}. {remedy}.")


def _check_commit(
    run: Run, made_by: dict[str, Any], place: Place, current_commit: str | None
) -> None:
    """Raise UserError if a run's training is of another commit, by its record or folder."""
    recorded = made_by.get("commit")
    if recorded == current_commit:
        return
    folders = f"--runs {place.folders.parent.resolve()} --records {run.records.parent.resolve()}"
    remedy = "It cannot be resumed, because no single commit made it. "
    if recorded and re.fullmatch(r"[0-9a-f]{40}", recorded):
        remedy = (
            f"To resume, make a worktree (git worktree add ../study {recorded}), run `bash scripts/setup.sh` "
            f"there without an active environment, and give its moa-fairseq {folders}. "
        )
    raise UserError(
        f"{run.name} of {place.study.study} was trained at commit {recorded or 'unknown'}, but this is "
        f"{current_commit}: all runs of a study need one commit. {remedy}To start over, give other folders "
        "to --runs and --records."
    )


def _check_text(
    name: str, made_by: dict[str, Any], place: Place, digest: str | None, remedy: str = ""
) -> None:
    """Raise UserError if a run, by its record or folder, was trained on text of another digest."""
    recorded = made_by.get("data")
    if recorded and digest and recorded != digest:
        raise UserError(
            f"{name} of {place.study.study} was trained on data of the digest {recorded}, and "
            f"--data {place.data} has {digest}: all runs of a study need one text. Name the data of that run "
            f"with --data{remedy}. To begin anew, give other folders to --runs and --records."
        )


def run_pending(runs: list[Run], place: Place) -> None:
    """Run every run that has no record and no other worker, here or elsewhere.

    Runs whose block got a record from another kind of machine in the meantime are left out.

    Args:
        runs: without a record when the work began.
        place: folders, data and devices.

    Raises:
        UserError: a training failed, and did not diverge; or the source tree has another commit than that of
            a training or record, or the prepared data another digest.
    """
    with disk_errors(place.folders):
        place.folders.mkdir(parents=True, exist_ok=True)
    for folder in {run.records for run in runs}:
        check_records(folder)
    elsewhere: set[tuple[int, str]] = set()
    with terminate_as_interrupt():
        for number, run in enumerate(runs, 1):
            with _alone(place.folders / f"{run.name}.lock") as alone:
                if not alone:
                    log.info("%d of %d: another worker runs %s", number, len(runs), run.name)
                    continue
                records = records_of(run.records)
                if run.block in elsewhere or (run.system, run.seed) in records:
                    continue
                elsewhere |= _block_elsewhere(run, runs, records, place)
                if run.block not in elsewhere:
                    log.info("%d of %d: %s", number, len(runs), run.name)
                    _carry_out(run, place)


def _block_elsewhere(
    run: Run, runs: list[Run], records: Mapping[tuple[str, int], Record], place: Place
) -> set[tuple[int, str]]:
    """The run's block, if it cannot be continued here. Raises UserError if a run is of another commit."""
    finished = []
    for other_run in runs:
        if record := records.get((other_run.system, other_run.seed)):
            finished.append((other_run, record.content))
    if (trained := place.trained(run)) is not None:
        finished.append((run, trained))
    current_commit = commit()
    for other_run, made_by in finished:
        _check_commit(other_run, made_by, place, current_commit)
    of_block = [(other, made_by) for other, made_by in finished if other.block == run.block]
    return _made_elsewhere(of_block, place)


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[bool]:
    """Hold a file's lock; yields False if another worker has it. Raises UserError if locks do not work."""
    with contextlib.ExitStack() as stack:
        try:
            with disk_errors(file):
                stack.enter_context(portalocker.Lock(file, "a", timeout=0))
            alone = True
        except portalocker.LockException as error:  # held by another, or no locks at all
            refuse_without_locks(file, error)
            alone = False
        yield alone


def _made_elsewhere(made: list[tuple[Run, dict[str, Any]]], place: Place) -> set[tuple[int, str]]:
    """The blocks of these runs with records that cannot be continued here; a warning lists each.

    Compared runs differ in one thing only, so a block has one kind of machine and one precision.
    """
    elsewhere: set[tuple[int, str]] = set()
    conditions: dict[str, dict[str, str]] = {}
    for run, record in made:
        if run.block in elsewhere:
            continue
        if run.system not in conditions:  # they are the same with every seed
            conditions[run.system] = place.conditions(run)
        current = conditions[run.system]
        before = {key: record.get(key, current[key]) for key in current}
        if before != current:
            elsewhere.add(run.block)
            words = (", ".join(before.values()), ", ".join(current.values()))
            log.warning(
                "seed %d %s was started on %s and is not continued on %s", *run.block, *words
            )
    return elsewhere


def _carry_out(run: Run, place: Place) -> None:
    """Train, and write the record. Raises UserError if training fails, unless it diverged."""
    command = _command(run, place)
    environment = {"OMP_NUM_THREADS": str(place.study.threads)}
    settings = settings_of(run, place.study.stage)
    made_by, curve, diverged = _train(run, place, command, environment, settings)
    folder = place.folders / run.name
    scores = {}
    if place.study.stage == "all" and not diverged:
        scores = saved_json(folder / "result.json")
    data = prepared_data(folder)
    for path in folder.glob("generate-*.txt") if scores else ():
        subset = path.stem.removeprefix("generate-")
        write_output(run.records, run.name, subset, read_generate_log(path).hypotheses)
    record: dict[str, Any] = {"study": place.study.study, "system": run.system, "seed": run.seed}
    record["settings"] = settings
    record["end"] = DIVERGED if diverged or curve[-1]["valid"] is None else FINISHED
    record["metrics"] = {}
    if scores:
        record["metrics"] = {scores["subset"]: scores["metrics"]} | scores["other_subsets"]
    record["curve"] = curve
    training = read_step_records(folder).get("train", {}).get("facts") or {}
    record["parameters"] = training.get("parameters")
    record.update(summarise(folder / "train.jsonl"))
    record.update(made_by)
    if data:
        record["unknown"] = _unknown(run, data)
    record["command"] = to_shell(list(map(_without_machine, command)), environment)
    append_record(run.records, record)


def _command(run: Run, place: Place) -> list[str]:
    values = {
        "gpus": place.gpus,
        "data": place.data,
        "save-dir": str(place.folders / run.name),
        "stage": place.study.stage,
    }
    command = ["moa-fairseq", "recipe", str(run.recipe), *flags(values)]
    for key, value in (run.overrides | {"train.seed": run.seed}).items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    return command


def _train(
    run: Run,
    place: Place,
    command: list[str],
    environment: dict[str, str],
    settings: dict[str, Any],
) -> tuple[dict[str, Any], list[dict[str, Any]], bool]:
    """Run the command, and check what it made.

    The digest of raw text is known only when the recipe has prepared it.

    Returns:
        Provenance of the training, its validations, and whether it diverged.

    Raises:
        UserError: if training fails without diverging, the commit changed, runs with the same data settings
            have records of other text, or no validation was logged.
    """
    folder = place.folders / run.name
    diverged = False
    start_commit = commit()
    try:
        Executor(environment).run(command, folder / "study.log")
    except Diverged:
        diverged = True
    except UserError as error:  # of the recipe; a study adds the remedy for the run
        remedy = f"To start {run.name} over, delete {folder}, or give another folder to --runs."
        raise UserError(f"{error}\n{remedy}") from error
    made_by = _made_by(maker(folder, run.load()))
    _check_commit(run, made_by, place, start_commit)
    for (system, seed), before in records_of(run.records).items():
        if _of_data(before.content.get("settings", {})) == _of_data(settings):
            name = f"{system}-seed{seed}"
            _check_text(name, before.content, place, made_by.get("data"), f", and delete {folder}")
    curve = curve_of(folder / "train.jsonl")
    if not (curve or diverged):
        problem = f"{folder / 'train.jsonl'} has no validation, by which a study compares its runs"
        raise UserError(f"{problem}. Restore the file, or start this run over without {folder}.")
    return made_by, curve, diverged


def _of_data(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key.startswith("data.")}


def _without_machine(word: str) -> str:
    """A word of a command; of a folder outside the working one the name, for no other machine has it."""
    path = Path(word)
    if not path.is_absolute():
        return word
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return path.name


def _unknown(run: Run, data: Path) -> float:
    """The share of <unk> in the validation text of the losses."""
    section = run.load().data
    languages = tuple(filter(None, (section.source, section.target)))
    *_, target = count_symbols(data, languages, ["valid"]).values()
    return round(target.share, 6)


def curve_of(path: Path) -> list[dict[str, Any]]:
    """The validations of a train.jsonl: updates, loss in bits, mean training loss since the one before."""
    rows: list[dict[str, Any]] = []
    train: list[float] = []
    for record in read_records(path):
        name = "loss"
        if any(key.endswith("nll_loss") for key in record):
            name = "nll_loss"
        if f"valid_{name}" in record:
            row = {"updates": updates_of(record), "valid": finite(record[f"valid_{name}"])}
            if train:
                row["train"] = round(sum(train) / len(train), 4)
            while rows and rows[-1]["updates"] >= row["updates"]:
                rows.pop()
            rows.append(row)
            train = []
        elif "num_updates" in record and (loss := finite(record.get(name))) is not None:
            train.append(loss)
    return rows
