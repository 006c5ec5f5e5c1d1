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
from moa_fairseq.experiments.json_files import saved_json
from moa_fairseq.experiments.make import marks
from moa_fairseq.experiments.recipes.hardware import choose_devices, detect_hardware, precision_name
from moa_fairseq.experiments.recipes.result import commit, data_differences, versions
from moa_fairseq.experiments.recipes.train_log import finite, read_records, summarise, updates_of
from moa_fairseq.experiments.scoring.generate_log import read_generate_log
from moa_fairseq.experiments.study.design import DIVERGED, Run, Study, fitting_records, settings_of
from moa_fairseq.experiments.study.records import append_record, records_of, write_output
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
    and where --data was prepared otherwise than a recipe says.
    """
    prepared = place.data.parent if place.data and place.data.name == "binarised" else place.data
    if prepared and (prepared / "manifest.json").is_file():
        for run in {run.recipe: run for run in runs}.values():
            if found := data_differences(run.load(), prepared, {}):
                problem = f"--data {place.data} is not what {run.recipe} says"
                remedy = "Prepare it with the recipe's values: moa-fairseq prepare --help"
                raise UserError(f"{problem}: {'; '.join(map(': '.join, found.items()))}. {remedy}.")
    records = fitting_records(place.study, runs, strict=True)
    now = commit()
    elsewhere = set()
    not_looked_at = {run.block for run in runs if run.name not in records}
    for run in runs:
        record = records.get(run.name)
        if record and (there := record.get("commit")) != now:
            raise UserError(
                f"{run.name} in {run.records} was made at commit {there}, and this is {now}: all runs of a "
                f"study need one commit. To go on, make a worktree (git worktree add ../study {there}), run "
                "`bash scripts/setup.sh` there without an active environment, and give its moa-fairseq "
                f"--records {run.records.parent.resolve()}. To begin anew, give --records another folder."
            )
        if record and run.block in not_looked_at:
            not_looked_at.remove(run.block)
            here = place.conditions(run)
            before = {key: record.get(key, here[key]) for key in here}
            if before != here:
                elsewhere.add(run.block)
                words = [", ".join(each.values()) for each in (before, here)]
                log.warning("seed %d %s was begun on %s: not gone on with on %s", *run.block, *words)
    left = [run for run in runs if run.block not in elsewhere and run.name not in records]
    for run in {run.system: run for run in left}.values():
        run.load()  # a mistake in a later one is found before the first is trained
    return left


def work(runs: list[Run], place: Place) -> None:
    """Carry out every run that has no record and that no other worker, here or elsewhere, is at."""
    place.folders.mkdir(parents=True, exist_ok=True)
    with terminate_as_interrupt():
        for number, run in enumerate(runs, 1):
            lock = place.folders / f"{run.name}.lock"
            with contextlib.suppress(portalocker.LockException), portalocker.Lock(lock, "a", timeout=0):
                if (run.system, run.seed) not in records_of(run.records):
                    log.info("%d of %d: %s", number, len(runs), run.name)
                    _carry_out(run, place)


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
    for path in folder.glob("generate-*.txt"):
        subset = path.stem.removeprefix("generate-")
        write_output(run.records, run.name, subset, read_generate_log(path).hypotheses)
    record = {
        "study": place.study.study,
        "system": run.system,
        "seed": run.seed,
        "settings": settings,
        "end": DIVERGED if diverged or not curve or curve[-1]["valid"] is None else "finished",
        "metrics": {scores["subset"]: scores["metrics"], **scores["other_subsets"]} if scores else {},
        "curve": curve,
        "parameters": (marks(folder).get("train", {}).get("facts") or {}).get("parameters"),
        **summarise(folder / "train.jsonl"),
        **place.conditions(run),
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
