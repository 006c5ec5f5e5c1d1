"""The runs of a study: each is a run of its recipe, with a record of its result."""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import portalocker

from moa_fairseq.errors import Diverged, UserError
from moa_fairseq.experiments.data.unknown import count_symbols
from moa_fairseq.experiments.make import read_step_records
from moa_fairseq.experiments.recipes.checkpoints import prepared_data
from moa_fairseq.experiments.recipes.flags import check_flags
from moa_fairseq.experiments.recipes.result import maker
from moa_fairseq.experiments.recipes.train_log import finite, read_records, summarise, updates_of
from moa_fairseq.experiments.recipes.workload import workload
from moa_fairseq.experiments.records.json_files import saved_json
from moa_fairseq.experiments.records.provenance import commit
from moa_fairseq.experiments.scoring.generate_log import read_generate_log
from moa_fairseq.experiments.study.conditions import (
    Provenance,
    Trained,
    Workspace,
    blocks_made_elsewhere,
    check_commit,
    check_data,
    check_text,
)
from moa_fairseq.experiments.study.design import (
    Records,
    Run,
    Settings,
    fitting_records,
    settings_of,
)
from moa_fairseq.experiments.study.records import (
    DIVERGED,
    FINISHED,
    Content,
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


class Outcome(NamedTuple):
    """What a training led to.

    Args:
        provenance: what made the training.
        curve: its validations, as `curve_of` returns them.
        has_diverged: whether the training ended because it diverged.
    """

    provenance: Provenance
    curve: list[dict[str, Any]]
    has_diverged: bool


def open_runs(runs: list[Run], workspace: Workspace) -> list[Run]:
    """The runs that have no record yet and can be made here.

    Compared runs may differ in one thing only, so the runs of a block that was started on another kind of
    machine, or in another precision, are left out, with a warning. All systems are checked before the first
    is trained.

    Args:
        runs: all runs of the study.
        workspace: the folders, data and devices.

    Raises:
        UserError: if another commit made the records, if they belong to data with another content, if --data
            was prepared with other values than those of a recipe, or if a remaining system has an unknown
            flag or flags that make no model.
    """
    digest = check_data(runs, workspace)
    records = fitting_records(workspace.study, runs, strict=True)
    trained = _trained_runs(runs, records, workspace)
    for training in trained:
        check_text(training.run.name, training.provenance.data, workspace, digest)
    unrecorded = [run for run in runs if run.name not in records]
    elsewhere = blocks_made_elsewhere(trained, {run.block for run in unrecorded}, workspace)
    remaining = [run for run in unrecorded if run.block not in elsewhere]
    for run in {run.system: run for run in remaining}.values():  # one of each system
        _check_system(run, workspace.study.study)
    return remaining


def _trained_runs(runs: list[Run], records: Records, workspace: Workspace) -> list[Trained]:
    """The runs that have a record or a checkpoint here. Raise UserError if another commit trained one."""
    trained = []
    for run in runs:
        if run.name in records:
            trained.append(Trained(run, Provenance.of_record(records[run.name])))
        elif (provenance := workspace.trained(run)) is not None:
            trained.append(Trained(run, provenance))
    current_commit = commit()
    for training in trained:
        check_commit(training, workspace, current_commit)
    return trained


def _check_system(run: Run, study: str) -> None:
    """Raise UserError for unknown flags, and for flags that make no model."""
    try:
        recipe = run.load()
        check_flags(recipe)
        workload(recipe, None)  # builds the model, without weights
    except UserError as error:  # any: the message needs the system's name
        raise UserError(f"System {run.system} of {study}: {error}") from error


def run_pending(runs: list[Run], workspace: Workspace) -> None:
    """Make every run that has no record and that no other worker makes, on this machine or another.

    Runs whose block has got a record from another kind of machine in the meantime are left out.

    Args:
        runs: the runs that had no record when the work began.
        workspace: the folders, data and devices.

    Raises:
        UserError: if a training failed without diverging, if the source tree has another commit than a
            training or record, or if the prepared data has another digest.
    """
    with disk_errors(workspace.folders):
        workspace.folders.mkdir(parents=True, exist_ok=True)
    for folder in {run.records for run in runs}:
        check_records(folder)
    elsewhere: set[tuple[int, str]] = set()
    with terminate_as_interrupt():
        for number, run in enumerate(runs, 1):
            with _try_lock(workspace.folders / f"{run.name}.lock") as is_alone:
                if not is_alone:
                    log.info("%d of %d: another worker runs %s", number, len(runs), run.name)
                    continue
                recorded = records_of(run.records)
                if run.block in elsewhere or (run.system, run.seed) in recorded:
                    continue
                if _belongs_elsewhere(run, runs, recorded, workspace):
                    elsewhere.add(run.block)
                    continue
                log.info("%d of %d: %s", number, len(runs), run.name)
                _train_and_record(run, workspace)


def _belongs_elsewhere(
    run: Run, runs: list[Run], recorded: Mapping[tuple[str, int], Record], workspace: Workspace
) -> bool:
    """Whether a run's block cannot be continued here. Raise UserError if another commit trained a run."""
    recorded_runs = []
    records = {}
    for other in runs:
        if record := recorded.get((other.system, other.seed)):
            recorded_runs.append(other)
            records[other.name] = record.content
    trained = _trained_runs([*recorded_runs, run], records, workspace)
    return run.block in blocks_made_elsewhere(trained, {run.block}, workspace)


@contextlib.contextmanager
def _try_lock(file: Path) -> Iterator[bool]:
    """Hold a file's lock; yield False if another worker holds it. Raise UserError if locks do not work."""
    lock = portalocker.Lock(file, "a", timeout=0)
    is_held = True
    try:
        with disk_errors(file):
            lock.acquire()
    except portalocker.LockException as error:  # another worker holds it, or there are no locks
        refuse_without_locks(file, error)
        is_held = False
    try:
        yield is_held
    finally:
        if is_held:
            lock.release()


def _train_and_record(run: Run, workspace: Workspace) -> None:
    """Train, and append the record. Raise UserError if the training fails without diverging."""
    folder = workspace.folders / run.name
    command = _command(run, workspace)
    environment = {"OMP_NUM_THREADS": str(workspace.study.threads)}
    settings = settings_of(run, workspace.study.stage)
    outcome = _train(run, workspace, command, environment, settings)
    is_lost = outcome.has_diverged or outcome.curve[-1]["valid"] is None
    is_scored = workspace.study.stage == "all" and not outcome.has_diverged
    training = read_step_records(folder).get("train", {}).get("facts") or {}
    record: Content = {
        "study": workspace.study.study,
        "system": run.system,
        "seed": run.seed,
        "settings": settings,
        "end": DIVERGED if is_lost else FINISHED,
        "metrics": _metrics(folder) if is_scored else {},
        "curve": outcome.curve,
        "parameters": training.get("parameters"),
    }
    record |= summarise(folder / "train.jsonl") | outcome.provenance.as_record()
    if data := prepared_data(folder):
        record["unknown"] = _unknown(run, data)
    record["command"] = to_shell(list(map(_portable, command)), environment)
    if record["metrics"]:  # before the record, because a recorded run is never repeated
        _write_outputs(run, folder)
    append_record(run.records, record)


def _metrics(folder: Path) -> dict[str, Any]:
    """Subset → its metrics in a run's result.json; {} if there is none."""
    result = saved_json(folder / "result.json")
    if not result:
        return {}
    return {result["subset"]: result["metrics"]} | result["other_subsets"]


def _write_outputs(run: Run, folder: Path) -> None:
    """Copy a run's translations into the folder of the records."""
    for path in folder.glob("generate-*.txt"):
        subset = path.stem.removeprefix("generate-")
        write_output(run.records, run.name, subset, read_generate_log(path).hypotheses)


def _command(run: Run, workspace: Workspace) -> list[str]:
    """The command of a run's recipe with the system's values.

    The seed comes last, so that no value replaces it.
    """
    values = {
        "gpus": workspace.gpus,
        "data": workspace.data,
        "save-dir": str(workspace.folders / run.name),
        "stage": workspace.study.stage,
    }
    command = ["moa-fairseq", "recipe", str(run.recipe), *flags(values)]
    for key, value in (run.overrides | {"train.seed": run.seed}).items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    return command


def _train(
    run: Run,
    workspace: Workspace,
    command: list[str],
    environment: dict[str, str],
    settings: Settings,
) -> Outcome:
    """Run the command, and check the training.

    The check of the text comes last, because raw text has a digest only when the recipe has prepared it.

    Raises:
        UserError: if the training fails without diverging, if the commit changed, if a record of a run with
            the same data settings has another text, or if no validation was logged.
    """
    folder = workspace.folders / run.name
    has_diverged = False
    start_commit = commit()
    try:
        Executor(environment).run(command, folder / "study.log")
    except Diverged:
        has_diverged = True
    except UserError as error:  # the recipe failed; a study adds the remedy for the run
        remedy = f"To start {run.name} over, delete {folder}, or give another folder to --runs."
        raise UserError(f"{error}\n{remedy}") from error
    provenance = Provenance.of_training(maker(folder, run.load()))
    check_commit(Trained(run, provenance), workspace, start_commit)
    for (system, seed), record in records_of(run.records).items():
        if _data_settings(record.content.get("settings", {})) == _data_settings(settings):
            name = f"{system}-seed{seed}"
            recorded = record.content.get("data")
            check_text(name, recorded, workspace, provenance.data, f", and delete {folder}")
    curve = curve_of(folder / "train.jsonl")
    if not (curve or has_diverged):
        problem = f"{folder / 'train.jsonl'} has no validation, by which a study compares its runs"
        raise UserError(f"{problem}. Restore the file, or start this run over without {folder}.")
    return Outcome(provenance, curve, has_diverged)


def _data_settings(settings: Settings) -> Settings:
    """The settings of a recipe's data section."""
    return {key: value for key, value in settings.items() if key.startswith("data.")}


def _portable(word: str) -> str:
    """A word of a command; a path outside the working folder becomes its name, as it is this machine's."""
    path = Path(word)
    if not path.is_absolute():
        return word
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return path.name


def _unknown(run: Run, data: Path) -> float:
    """The share of <unk> in the target side of the validation text."""
    section = run.load().data
    languages = tuple(filter(None, (section.source, section.target)))
    target = list(count_symbols(data, languages, ["valid"]).values())[-1]
    return round(target.share, 6)


def curve_of(path: Path) -> list[dict[str, Any]]:
    """The validations in a log.

    Args:
        path: a train.jsonl.

    Returns:
        For each validation "updates", "valid", the loss in bits (None if it is not finite), and "train", the
        mean of the training losses that were logged since the validation before.
    """
    rows: list[dict[str, Any]] = []
    train: list[float] = []
    for record in read_records(path):
        has_likelihood = any(key.endswith("nll_loss") for key in record)
        name = "nll_loss" if has_likelihood else "loss"
        if f"valid_{name}" in record:
            row = {"updates": updates_of(record), "valid": finite(record[f"valid_{name}"])}
            if train:
                row["train"] = round(sum(train) / len(train), 4)
                train.clear()
            # A resumed training repeats validations
            while rows and rows[-1]["updates"] >= row["updates"]:
                rows.pop()
            rows.append(row)
        elif "num_updates" in record:
            loss = finite(record.get(name))
            if loss is not None:
                train.append(loss)
    return rows
