"""The runs of a study: each one a run of its recipe, with a record of how it went."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

import portalocker

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.prepare import content_digest
from moa_fairseq.experiments.json_files import saved_json
from moa_fairseq.experiments.make import marks
from moa_fairseq.experiments.recipes.checkpoints import prepared_data
from moa_fairseq.experiments.recipes.hardware import choose_devices, detect_hardware, precision_name
from moa_fairseq.experiments.recipes.loading import check_flags
from moa_fairseq.experiments.recipes.planner import workload
from moa_fairseq.experiments.recipes.result import commit, data_differences, versions
from moa_fairseq.experiments.recipes.train_log import finite, read_records, summarise, updates_of
from moa_fairseq.experiments.scoring.generate_log import read_generate_log
from moa_fairseq.experiments.study.design import Run, Study, fitting_records, settings_of
from moa_fairseq.experiments.study.records import (
    DIVERGED,
    FINISHED,
    append_record,
    records_of,
    write_output,
)
from moa_fairseq.process import Executor, flags, terminate_as_interrupt, to_shell

log = logging.getLogger(__name__)

# What fairseq says when a loss or a gradient is not a number any more, and what its patches say of weights.
_NOT_FINITE = re.compile(
    r"Nan/Inf|Nan or Inf|Loss is (infinite|nan)|Minimum loss scale|The gates have diverged|"
    r"was not written, because the model holds (NaN|infinity)",
    re.IGNORECASE,
)


class Place(NamedTuple):
    """Where a study runs.

    Args:
        study: what runs.
        folders: the folder of its run folders.
        data: --data of its recipes.
        gpus: of each run; 0 for the CPU.
    """

    study: Study
    folders: Path
    data: Path | None
    gpus: int

    def conditions(self, run: Run) -> dict[str, str]:
        """What must not differ between the runs of one block: devices with threads, and the precision."""
        devices = choose_devices(detect_hardware(), self.gpus, dry_run=False)
        recipe = run.load()
        precision = precision_name(recipe.train.precision, devices, recipe.model)
        return {"hardware": f"{devices.describe()}, {self.study.threads} threads", "precision": precision}


def open_runs(runs: list[Run], place: Place) -> list[Run]:
    """The runs that have no record yet and can be made here.

    What is compared differs in one thing: runs of a block that was begun on another kind of machine, or in
    another precision, are left out, with a warning. Raises UserError where another commit made the records,
    where they are of data with another content, where --data was prepared otherwise than a recipe says, and
    where a system that is left has an unknown flag, or flags that make no model: a mistake in a later one is
    found before the first is trained.
    """
    prepared = place.data.parent if place.data and place.data.name == "binarised" else place.data
    binarised = prepared / "binarised" if prepared else None
    if prepared and (prepared / "manifest.json").is_file():
        for run in {run.recipe: run for run in runs}.values():
            if found := data_differences(run.load(), prepared, {}):
                problem = f"--data {place.data} is not what {run.recipe} says"
                remedy = "Prepare it with the recipe's values: moa-fairseq prepare --help"
                raise UserError(f"{problem}: {'; '.join(map(': '.join, found.items()))}. {remedy}.")
    records = fitting_records(place.study, runs, strict=True)
    now = commit()
    digest = content_digest(binarised) if binarised and binarised.is_dir() else None
    for run in runs:
        record = records.get(run.name)
        if record and (there := record.get("commit")) != now:
            raise UserError(
                f"{run.name} in {run.records} was made at commit {there}, and this is {now}: all runs of a "
                f"study need one commit. To go on, make a worktree (git worktree add ../study {there}), run "
                "`bash scripts/setup.sh` there without an active environment, and give its moa-fairseq "
                f"--records {run.records.parent.resolve()}. To begin anew, give --records another folder."
            )
        if record and digest and record.get("data", digest) != digest:
            raise UserError(
                f"{run.name} in {run.records} was trained on data of the digest {record['data']}, and --data "
                f"{place.data} has {digest}: all runs of a study need one text. Name the data of the records "
                "with --data. To begin anew, give --records another folder."
            )
    incomplete = {run.block for run in runs if run.name not in records}
    made = [(run, records[run.name]) for run in runs if run.block in incomplete and run.name in records]
    elsewhere = _made_elsewhere(made, place)
    left = [run for run in runs if run.block not in elsewhere and run.name not in records]
    for run in {run.system: run for run in left}.values():
        try:
            recipe = run.load()
            check_flags(recipe)
            workload(recipe, None)  # builds the model, without weights
        except UserError as error:
            raise UserError(f"System {run.system} of {place.study.study}: {error}") from error
    return left


def work(runs: list[Run], place: Place) -> None:
    """Carry out every run that has no record and that no other worker, here or elsewhere, is at.

    One whose block has a record that was made on another kind of machine in the meantime is left out.

    Args:
        runs: that had no record when the work began.
        place: where they run.

    Raises:
        UserError: a training failed, and did not diverge.
    """
    place.folders.mkdir(parents=True, exist_ok=True)
    elsewhere: set[tuple[int, str]] = set()
    with terminate_as_interrupt():
        for number, run in enumerate(runs, 1):
            lock = place.folders / f"{run.name}.lock"
            with contextlib.suppress(portalocker.LockException), portalocker.Lock(lock, "a", timeout=0):
                records = records_of(run.records)
                if run.block in elsewhere or (run.system, run.seed) in records:
                    continue
                block = [one for one in runs if one.block == run.block and (one.system, one.seed) in records]
                made = [(one, records[one.system, one.seed].content) for one in block]
                elsewhere |= _made_elsewhere(made, place)
                if run.block not in elsewhere:
                    log.info("%d of %d: %s", number, len(runs), run.name)
                    _carry_out(run, place)


def _made_elsewhere(made: list[tuple[Run, dict[str, Any]]], place: Place) -> set[tuple[int, str]]:
    """The blocks of these runs and their records that cannot be gone on with here; a warning names each.

    What is compared differs in one thing, so a block has one kind of machine and one precision.
    """
    elsewhere: set[tuple[int, str]] = set()
    conditions: dict[str, dict[str, str]] = {}
    for run, record in made:
        if run.block in elsewhere:
            continue
        if run.system not in conditions:  # they are the same with every seed
            conditions[run.system] = place.conditions(run)
        here = conditions[run.system]
        before = {key: record.get(key, here[key]) for key in here}
        if before != here:
            elsewhere.add(run.block)
            words = [", ".join(each.values()) for each in (before, here)]
            log.warning("seed %d %s was begun on %s: not gone on with on %s", *run.block, *words)
    return elsewhere


def _carry_out(run: Run, place: Place) -> None:
    """Train, and write the record. Raises UserError where training fails, unless it diverged."""
    folder = place.folders / run.name
    environment = {"OMP_NUM_THREADS": str(place.study.threads)}
    values = {"gpus": place.gpus, "data": place.data, "save-dir": str(folder), "stage": place.study.stage}
    command = ["moa-fairseq", "recipe", str(run.recipe), *flags(values)]
    for key, value in {**run.overrides, "train.seed": run.seed}.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    diverged = False
    settings = settings_of(run, place.study.stage)
    try:
        Executor(environment).run(command, folder / "study.log")
    except UserError:
        log_file = folder / "train.log"
        diverged = log_file.is_file() and bool(_NOT_FINITE.search(log_file.read_text("utf-8", "replace")))
        if not diverged:
            raise
    curve = curve_of(folder / "train.jsonl")
    scores = saved_json(folder / "result.json")
    data = prepared_data(folder)
    for path in folder.glob("generate-*.txt"):
        subset = path.stem.removeprefix("generate-")
        write_output(run.records, run.name, subset, read_generate_log(path).hypotheses)
    record = {
        "study": place.study.study,
        "system": run.system,
        "seed": run.seed,
        "settings": settings,
        "end": DIVERGED if diverged or not curve or curve[-1]["valid"] is None else FINISHED,
        "metrics": {scores["subset"]: scores["metrics"], **scores["other_subsets"]} if scores else {},
        "curve": curve,
        "parameters": (marks(folder).get("train", {}).get("facts") or {}).get("parameters"),
        **summarise(folder / "train.jsonl"),
        **place.conditions(run),
        "data": content_digest(data) if data else None,
        "versions": versions(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "command": to_shell(command, environment),
    }
    append_record(run.records, record)


def curve_of(path: Path) -> list[dict[str, Any]]:
    """The validations of a train.jsonl: updates, loss in bits, mean training loss since the one before."""
    rows: list[dict[str, Any]] = []
    train: list[float] = []
    for record in read_records(path):
        if any(key.endswith("nll_loss") for key in record):
            name = "nll_loss"
        else:
            name = "loss"
        if f"valid_{name}" in record:
            row = {"updates": updates_of(record), "valid": finite(record[f"valid_{name}"])}
            if train:
                row["train"] = round(sum(train) / len(train), 4)
            rows = [*(r for r in rows if r["updates"] < row["updates"]), row]
            train = []
        elif "num_updates" in record and (loss := finite(record.get(name))) is not None:
            train.append(loss)
    return rows
