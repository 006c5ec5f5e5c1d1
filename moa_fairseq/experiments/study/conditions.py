"""The conditions that all runs of a study share: one commit, one text, and one kind of machine per block."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import is_binarised
from moa_fairseq.experiments.data.prepare import content_digest
from moa_fairseq.experiments.recipes.batch import fit_devices
from moa_fairseq.experiments.recipes.checkpoints import prepared_data
from moa_fairseq.experiments.recipes.claim import data_differences
from moa_fairseq.experiments.recipes.hardware import choose_devices, detect_hardware
from moa_fairseq.experiments.recipes.precision import precision_name
from moa_fairseq.experiments.recipes.result import maker
from moa_fairseq.experiments.records.json_files import selected
from moa_fairseq.experiments.study.design import Run, Study
from moa_fairseq.experiments.study.records import Content

log = logging.getLogger(__name__)


class Provenance(NamedTuple):
    """What made a run. The fields are keys of a record; an unknown field is None.

    Args:
        precision: see `precision_name`.
        data: the digest of the data's content.
        versions: package → its version.
        commit: the commit of the source tree.
        date: the day of the last session.
        hardware: the devices, with the number of threads.
    """

    precision: str | None = None
    data: str | None = None
    versions: dict[str, Any] | None = None
    commit: str | None = None
    date: str | None = None
    hardware: str | None = None

    @classmethod
    def of_record(cls, record: Content) -> Provenance:
        """The provenance in a record."""
        return cls(**selected(record, cls._fields))

    @classmethod
    def of_training(cls, made_by: dict[str, Any]) -> Provenance:
        """The provenance of a training, from what `maker` returns."""
        hardware = None
        if made_by.get("hardware"):
            hardware = f"{made_by['hardware']}, {made_by.get('threads')} threads"
        return cls.of_record(made_by)._replace(hardware=hardware)

    def as_record(self) -> Content:
        """The known fields, as keys of a record."""
        return {key: value for key, value in self._asdict().items() if value is not None}


class Conditions(NamedTuple):
    """What all runs of a block must share.

    Args:
        hardware: the devices, with the number of threads.
        precision: see `precision_name`.
    """

    hardware: str
    precision: str


class Workspace(NamedTuple):
    """The folders, data and devices of a study.

    Args:
        study: the study.
        folders: the folder that contains the run folders.
        data: the data folder that each recipe gets as --data, or None.
        gpus: the number of GPUs for each run; 0 for the CPU.
    """

    study: Study
    folders: Path
    data: Path | None
    gpus: int

    def conditions(self, run: Run) -> Conditions:
        """The conditions under which this machine trains a run."""
        devices = choose_devices(detect_hardware(), self.gpus, dry_run=False)
        recipe = run.load()
        if devices.gpus > 1:  # a small batch leaves some of them out
            recipe, devices, _ = fit_devices(
                recipe, devices, prepared_data(self.folders / run.name)
            )
        precision = precision_name(recipe.train.precision, devices, recipe.model)
        return Conditions(f"{devices.describe()}, {self.study.threads} threads", precision)

    def trained(self, run: Run) -> Provenance | None:
        """The provenance of the training in a run's folder; None if there is no checkpoint yet."""
        checkpoints = self.folders / run.name / "checkpoints"
        if not any(checkpoints.glob("*.pt")):
            return None
        return Provenance.of_training(maker(self.folders / run.name, run.load(), checkpoints))


class Trained(NamedTuple):
    """A run that was trained, perhaps on another machine.

    Args:
        run: the run.
        provenance: what made the run.
    """

    run: Run
    provenance: Provenance


def check_data(runs: list[Run], workspace: Workspace) -> str | None:
    """Check that --data was prepared with the values of each recipe.

    Args:
        runs: all runs of the study.
        workspace: the folders, data and devices.

    Returns:
        The digest of the data's content; None without --data, and if the data is not binarised.

    Raises:
        UserError: if the data was prepared with other values.
    """
    if workspace.data is None:
        return None
    # --data names the folder of `moa-fairseq prepare`, or the binarised folder in it
    prepared = workspace.data.parent if workspace.data.name == "binarised" else workspace.data
    binarised = workspace.data if is_binarised(workspace.data) else prepared / "binarised"
    if (prepared / "manifest.json").is_file():
        _check_values(runs, workspace, prepared)
    return content_digest(binarised) if is_binarised(binarised) else None


def _check_values(runs: list[Run], workspace: Workspace, prepared: Path) -> None:
    """Raise UserError if --data was prepared with other values than those of a recipe."""
    for run in {run.recipe: run for run in runs}.values():  # one of each recipe
        differences = data_differences(run.load(), prepared, {})
        if differences:
            listed = "; ".join(f"{key}: {change}" for key, change in differences.items())
            raise UserError(
                f"--data {workspace.data} differs from the data of {run.recipe}: {listed}. "
                "Prepare it with the recipe's values: moa-fairseq prepare --help."
            )


def check_commit(trained: Trained, workspace: Workspace, current_commit: str | None) -> None:
    """Check that the current commit trained a run.

    Args:
        trained: the run, with its provenance.
        workspace: the folders, data and devices.
        current_commit: the commit of the source tree.

    Raises:
        UserError: if another commit trained it.
    """
    run = trained.run
    recorded = trained.provenance.commit
    if recorded == current_commit:
        return
    remedy = "It cannot be resumed, because no single commit made it."
    if recorded and re.fullmatch(r"[0-9a-f]{40}", recorded):
        remedy = (
            f"To resume, make a worktree (git worktree add ../study {recorded}), run `bash scripts/setup.sh` "
            "there without an active environment, and give its moa-fairseq "
            f"--runs {workspace.folders.parent.resolve()} --records {run.records.parent.resolve()}."
        )
    raise UserError(
        f"{run.name} of {workspace.study.study} was trained at commit {recorded or 'unknown'}, but this is "
        f"{current_commit}: all runs of a study need one commit. {remedy} To start over, give other folders "
        "to --runs and --records."
    )


def check_text(
    name: str, recorded: str | None, workspace: Workspace, digest: str | None, remedy: str = ""
) -> None:
    """Check that a run was trained on the text of --data.

    Args:
        name: the name of the run.
        recorded: the digest of the text that it was trained on.
        workspace: the folders, data and devices.
        digest: the digest of the content of --data, or None.
        remedy: what to do besides naming the run's data.

    Raises:
        UserError: if the text has another digest.
    """
    if recorded and digest and recorded != digest:
        raise UserError(
            f"{name} of {workspace.study.study} was trained on data of the digest {recorded}, and "
            f"--data {workspace.data} has {digest}: all runs of a study need one text. Name the data of that "
            f"run with --data{remedy}. To start over, give other folders to --runs and --records."
        )


def blocks_made_elsewhere(
    trained: list[Trained], blocks: set[tuple[int, str]], workspace: Workspace
) -> set[tuple[int, str]]:
    """The blocks that cannot be continued here; a warning names each.

    Compared runs may differ in one thing only, so a block needs one kind of machine and one precision.

    Args:
        trained: the runs that were trained.
        blocks: the blocks to look at.
        workspace: the folders, data and devices.
    """
    elsewhere: set[tuple[int, str]] = set()
    conditions: dict[str, Conditions] = {}
    for run, provenance in trained:
        if run.block not in blocks or run.block in elsewhere:
            continue
        if run.system not in conditions:  # the conditions do not depend on the seed
            conditions[run.system] = workspace.conditions(run)
        current = conditions[run.system]
        # What a record lacks counts as equal
        recorded = Conditions(
            provenance.hardware or current.hardware, provenance.precision or current.precision
        )
        if recorded != current:
            elsewhere.add(run.block)
            log.warning(
                "seed %d %s was started on %s and is not continued on %s",
                *run.block,
                ", ".join(recorded),
                ", ".join(current),
            )
    return elsewhere
