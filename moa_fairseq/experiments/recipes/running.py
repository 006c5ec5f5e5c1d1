"""Runs the stages of a recipe in its run folder."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import Prepared
from moa_fairseq.experiments.make import make, read_step_records
from moa_fairseq.experiments.recipes.batch import (
    LOUD_DEVIATION,
    fit_devices,
    plan_batch,
    planned_updates,
    schedule_warning,
    sentence_sizes,
    training_set,
)
from moa_fairseq.experiments.recipes.checkpoints import LAST, prepare_facts
from moa_fairseq.experiments.recipes.claim import data_differences, differences, requested_settings
from moa_fairseq.experiments.recipes.ending import check_ending, check_files
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.lengths import check_sentences
from moa_fairseq.experiments.recipes.prepare_stage import (
    load_prepared_data,
    prepare,
    show_preparation,
)
from moa_fairseq.experiments.recipes.result import record
from moa_fairseq.experiments.recipes.run import Options, Run
from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.experiments.recipes.steps import ZERO_SHOT, steps
from moa_fairseq.experiments.records.json_files import write_yaml
from moa_fairseq.experiments.scoring.zero_shot import require_lm_eval
from moa_fairseq.files import atomic_write
from moa_fairseq.process import PATIENCE_SECONDS, Executor, locked, to_shell
from moa_fairseq.process.signals import terminate_as_interrupt

OPTIONAL_STAGES = ("average", "generate", "score", "zero-shot")  # a recipe may lack their sections
STAGES = ("prepare", "train", *OPTIONAL_STAGES)
# After a restart of torchrun, the previous owner of the run folder may need time to exit.
HANDOVER_SECONDS = 60.0
log = logging.getLogger(__name__)


def run_recipe(
    recipe: Recipe,
    hardware: Hardware,
    options: Options,
    executor_class: Callable[..., Executor] = Executor,
    dry_run: bool = False,
) -> Path | None:
    """Run the requested stages, or show their commands.

    Args:
        recipe: the experiment.
        hardware: the devices that train it.
        options: the command line's settings outside the recipe.
        executor_class: makes the executor of commands from their environment variables.
        dry_run: True to show the commands and do nothing.

    Returns:
        result.json if the recipe was scored.

    Raises:
        UserError: if a step fails. Finished steps stay, and the next call does not repeat them.
    """
    folder = options.save_dir or Path("runs") / recipe.experiment
    run = Run(recipe, hardware, folder, options)
    executor = executor_class(hardware.environment)
    _check_record(run)
    section = options.stage.replace("-", "_")
    if options.stage in OPTIONAL_STAGES and not getattr(recipe, section):
        log.info("%s: the recipe has no %s section; nothing to do", options.stage, section)
    if dry_run:
        run = _fit_to_data_and_devices(run, show_preparation(run, executor))
        executor.environment = run.hardware.environment
        make(steps(run), folder, executor=executor, dry_run=True, wanted=run.includes_step)
        return None
    if options.restart and folder.exists():
        _move_aside(folder)
    if hardware.shared:
        _check_shared(run)
    _check_requirements(run)
    started = time.time()
    with terminate_as_interrupt(), _run_folder_lock(run):
        prepared = load_prepared_data(run) if _uses_earlier_data(run) else prepare(run, executor)
        run = _fit_to_data_and_devices(run, prepared)
        executor.environment.update(run.hardware.environment)
        if recipe.training_flags.get("wandb-project"):
            executor.environment["WANDB_DIR"] = str(folder)
        if run.hardware.world and run.hardware.world.rank:
            _train_as_worker(run, executor, run.hardware.world.rank)
            return None
        return _run_stages(run, recipe, executor, started)


def _uses_earlier_data(run: Run) -> bool:
    """Whether another stage, or the program of the main process, has made the data."""
    if not run.hardware.is_main_process:
        return True
    if run.options.includes_stage("prepare"):
        return False
    return run.options.data is None or run.hardware.shared


def _run_stages(run: Run, recipe: Recipe, executor: Executor, started: float) -> Path | None:
    """Run the stages after the data. Returns result.json if the recipe was scored."""
    options = run.options
    folder = run.folder
    # Without a checkpoint the log is of a training that cannot resume
    if not any(run.checkpoints.glob("*.pt")):
        (folder / "train.jsonl").unlink(missing_ok=True)
    all_steps = steps(run)
    if options.stage != "prepare":
        main_steps = [step for step in all_steps if step.name != ZERO_SHOT]
        make(main_steps, folder, executor=executor, wanted=run.includes_step)
    _write_recipe(recipe, folder)  # not run.recipe, in which `fit_devices` has set train.min_tokens
    result = record(run, started)
    # This step adds to the result, which exists even if the step fails
    if recipe.zero_shot and options.includes_stage("zero-shot"):
        make(all_steps, folder, executor=executor, wanted=lambda step: step.name == ZERO_SHOT)
    if result and options.record:
        with atomic_write(options.record) as stream:
            stream.write(result.read_text("utf-8"))
        log.info("recorded as %s", options.record)
    return result


def _write_recipe(recipe: Recipe, folder: Path) -> None:
    """Write recipe.yaml. Its end of the training is that of the finished training, not of this call."""
    # result.json gives the reproduced row
    mapping = dict(dataclasses.asdict(recipe), reproduces=None, rows={})
    goal = read_step_records(folder).get("train", {}).get("goal", {})
    for key in ("max_epoch", "max_update"):
        if key in goal:
            mapping["train"][key] = goal[key]
    write_yaml(folder / "recipe.yaml", mapping)


def _check_record(run: Run) -> None:
    """Raise UserError if --record needs a score that the run will not have."""
    options = run.options
    scores = options.includes_stage("score") and run.recipe.score
    if not options.record or options.stage == "train" or scores:
        return
    reason = "the recipe has no score section"
    if run.recipe.score:
        reason = f"--stage {options.stage} does not score"
    raise UserError(f"--record copies a scored result, but {reason}. Leave --record out.")


def _move_aside(folder: Path) -> None:
    """For --restart: rename the run folder to an unused name."""
    with locked(folder):  # no other process may be using it
        pass
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    log.info("%s moved to %s", folder, folder.rename(aside))


def _run_folder_lock(run: Run) -> contextlib.AbstractContextManager[object]:
    """The lock of the run folder for the main process; other processes write only a log, without a lock."""
    if not run.hardware.is_main_process:
        return contextlib.nullcontext()
    return locked(run.folder, HANDOVER_SECONDS if run.hardware.shared else PATIENCE_SECONDS)


def _train_as_worker(run: Run, executor: Executor, rank: int) -> None:
    """Train together with process 0, which belongs to another program."""
    command = next(step.command for step in steps(run) if step.name == "train")
    name = f"train.process{rank}"
    log.info("$ %s", to_shell(command, executor.environment))
    executor.run(command, run.folder / f"{name}.log")
    log.info("%s is done; the results are on the machine of process 0", name)


def _check_requirements(run: Run) -> None:
    """Check, before anything is prepared, what the training and the last stage need."""
    if run.options.includes_stage("train"):
        resumes = bool(run.recipe.finetune) or (run.checkpoints / LAST).exists()
        check_files(run.recipe, first_start=not resumes)
    if run.recipe.zero_shot and run.options.includes_stage("zero-shot"):
        later = "; or --set zero_shot=null, and --stage zero-shot later"
        require_lm_eval("zero_shot: the recipe's last stage", later)


def _check_shared(run: Run) -> None:
    """Raise UserError unless this program, one of several, only trains: a single program does the rest."""
    folder = run.folder
    options = run.options
    if options.stage != "train":
        raise UserError(
            f"--stage {options.stage}: several processes can share the train stage only. Run --stage "
            "prepare on one machine, --stage train on all, the other stages on one, as scripts/launch/ does."
        )
    if options.restart:
        raise UserError(
            "--restart would move the run folder of other processes. Give it to --stage prepare."
        )
    facts = prepare_facts(folder)
    if not facts:
        raise UserError(
            f"No prepared data in {folder} (all machines must share this folder). Run --stage prepare with "
            "the same --save-dir first."
        )
    origin = (facts.get("source"), facts.get("folder"))
    if options.data and str(options.data.resolve()) not in origin:
        raise UserError(
            f"{folder} was prepared from {origin[0]}, not from --data {options.data}. Give the former, or "
            "run --stage prepare again."
        )


def _fit_to_data_and_devices(run: Run, prepared: Prepared) -> Run:
    """The run with its data and as many devices as can share an update; logs what follows from the data."""
    data = prepared.folder if prepared.folder.is_dir() else None
    recipe, hardware, fewer = fit_devices(run.recipe, run.hardware, data)
    run = dataclasses.replace(run, recipe=recipe, hardware=hardware, prepared=prepared)
    if not hardware.is_main_process:
        return run
    options = run.options
    if data and options.training_flags:
        check_sentences(recipe, options.training_flags, data)
    if options.includes_stage("train") and recipe.finetune != "noft":
        if fewer:
            log.warning(fewer)
        _log_training_plan(run, data)
    if data and recipe.reproduces and options.published_recipe:
        _log_reproduction_status(run, data)
    elif data and options.data:
        deviations = data_differences(recipe, data, {})
        if deviations:
            listed = [f"{key}: {change}" for key, change in deviations.items()]
            log.warning("%s differs from the recipe: %s", data, "; ".join(listed))
    return run


def _log_training_plan(run: Run, data: Path | None) -> None:
    """Log batch, schedule and folder of a training. Raises UserError if its end leaves no checkpoint."""
    recipe = run.recipe
    hardware = run.hardware
    options = run.options
    if recipe.train.precision == "amp" and not hardware.gpus and not hardware.bfloat16_units:
        log.warning(
            "train.precision amp: this processor has no units for bfloat16; --set train.precision=fp32 "
            "trains many times as fast"
        )
    batch = plan_batch(recipe.train, hardware.devices)
    report = log.warning if abs(batch.deviation) > LOUD_DEVIATION else log.info
    report(batch.describe())
    if data:
        check_ending(recipe, batch, data)
    if options.training_flags:
        size = training_set(recipe, data) if recipe.train.max_epoch else None
        updates = planned_updates(recipe.train, batch, size)
        if warning := schedule_warning(options.training_flags, updates):
            log.warning(warning)
    if world := hardware.world:
        log.info(
            "train: process %s of %s, meeting at %s", world.rank, world.size, world.init_method
        )


def _log_reproduction_status(run: Run, data: Path) -> None:
    """Log whether the run reproduces a paper's row, or the differences."""
    recipe = run.recipe
    cell = recipe.reproduces
    published = run.options.published_recipe
    assert cell and published
    sentences = run.prepared.sentences
    if not sentences:
        with contextlib.suppress(UserError):  # if a subset is missing, the numbers stay unknown
            sentences = {
                split: len(sentence_sizes(recipe, data, split)[0]) for split in recipe.splits
            }
    row = f"{cell.paper}, table {cell.table}, {cell.row}, {cell.column}: {cell.value}"
    of_data = data_differences(published, data, sentences, claim=True)
    if deviations := differences(published, requested_settings(recipe), of_data):
        log.warning("this run does not reproduce %s: %s", row, "; ".join(deviations[:5]))
    else:
        log.info("reproduces %s", row)
