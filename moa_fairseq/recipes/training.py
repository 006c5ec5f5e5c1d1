"""Training and averaging: done once for each recipe, gone on with after an interruption."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Dict, List, Optional

from moa_fairseq.data_prep.stage_folder import fingerprint_of
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.average import last_checkpoints
from moa_fairseq.recipes.batch import plan_batch
from moa_fairseq.recipes.finetune import check_pretrained
from moa_fairseq.recipes.hardware import precision_flags
from moa_fairseq.recipes.run_folder import changes, checkpoint_to_resume, is_whole
from moa_fairseq.recipes.schema import EXECUTION_KEYS, Recipe
from moa_fairseq.recipes.steps import OutputStep, Run, Step, stamp
from moa_fairseq.recipes.train_log import TrainLog
from moa_fairseq.running.command_line import flags, positional

log = logging.getLogger(__name__)


def training_steps(run: Run) -> List[Step]:
    """The training and, where the recipe has one, the average of its last checkpoints."""
    found = [Step("train", "train", train_command(run))] if run.recipe.finetune != "noft" else []
    average = run.recipe.average
    if average is None:
        return found
    output, count = run.folder / "average.pt", average.count
    values = {
        "inputs": str(run.checkpoints),
        "num-epoch-checkpoints": average.epochs,
        "num-update-checkpoints": average.updates,
        "output": str(output),
    }

    def inputs() -> List[Any]:
        by_updates = average.updates is not None
        try:
            last = last_checkpoints(run.checkpoints, count, by_updates)
        except UserError as error:
            key = "average.updates" if by_updates else "average.epochs"
            raise UserError(
                f"{key}: {error} For fewer: --set {key}=N, or none: --set average=null."
            ) from error
        damaged = next((path for path in last if not is_whole(path)), None)
        if damaged:
            raise UserError(
                f"{damaged} is cut off and cannot be averaged. Delete it and run the train stage on, or "
                "average fewer checkpoints."
            )
        return [[stamp(path) for path in last]]

    def remember() -> Dict[str, Any]:
        return {"checkpoints": count, "training": run.state.get("train").get("done")}

    command = ["moa-fairseq", "average", *flags(values), "--force"]
    return [*found, OutputStep("average", "average", command, output, inputs, remember=remember)]


def train_command(run: Run) -> List[str]:
    """The fairseq-train line of a recipe."""
    recipe, hardware = run.recipe, run.hardware
    train, model, world = recipe.train, recipe.model, hardware.world
    batch = plan_batch(train, hardware.devices)
    # fairseq's own choice (nccl, pytorch_ddp) is for GPUs only. No recipe needs --find-unused-parameters: an
    # expert that no token chose has a gradient of zeros. A data worker is forked in each epoch; on a CPU,
    # where the training's memory is large, every page that the training writes to is then copied.
    on_cpus: Dict[str, Any] = {"num-workers": 0}
    if world:
        on_cpus.update({"distributed-backend": "gloo", "ddp-backend": "legacy_ddp"})
    logs = recipe.training_flags.get("tensorboard-logdir")
    values = {
        **model.as_flags(),
        "criterion": train.criterion,
        **({} if hardware.gpus else on_cpus),
        **train.flags,
        **({"tensorboard-logdir": str(run.folder / logs)} if logs else {}),
        "max-tokens": batch.max_tokens,
        "update-freq": batch.update_freq,
        **{name.replace("_", "-"): getattr(train, name) for name in ("max_epoch", "max_update", "seed")},
        "keep-last-epochs": train.keep_last_epochs,
        "save-dir": str(run.checkpoints),
        "log-format": "json",
        "log-interval": train.log_interval,
        **(world.flags() if world else {"distributed-world-size": hardware.devices}),
    }
    command = ["fairseq-train", positional(run.data), *flags(run.task_flags()), *flags(values)]
    return command + precision_flags(train.precision, hardware, model) + run.device_flags()


def carry_out_training(run: Run, step: Optional[Step]) -> None:
    """Train, or go on training, to the recipe's end; without a step (finetune: noft) only report that.

    Raises UserError for checkpoints of other settings.
    """
    recipe, state = run.recipe, run.state
    settings, remembered = train_settings(run), state.get("train")
    done = _mark_of_the_end(run, settings)
    resume = checkpoint_to_resume(run.checkpoints)
    if recipe.finetune and resume is None:
        check_pretrained(recipe, run.data)
    if step is None:
        log.info("train: nothing (NOFT); %s is evaluated as it is", run.model)
        state.put("train", settings=settings, done=done, updated=0)
        return
    if resume is not None:
        _refuse_other_settings(run, remembered.get("settings"), settings)
        if remembered.get("done") == done:
            log.info("train: done before (%s)", run.checkpoints)
            return
    elif run.hardware.leads:
        (run.folder / "train.jsonl").unlink(missing_ok=True)
    command = list(step.command)
    if resume is not None and resume.name != "checkpoint_last.pt":
        log.info("train: checkpoint_last.pt is damaged or missing; going on from %s", resume.name)
        command += ["--restore-file", str(resume)]
    world = run.hardware.world
    if world:
        log.info("train: %s", world.describe())
    if "wandb-project" in recipe.training_flags:
        run.executor.environment["WANDB_DIR"] = str(run.folder)
    log.info("train: %s", plan_batch(recipe.train, run.hardware.devices).describe())
    run.show(command)
    if world and not run.hardware.leads:  # a process of another program's run: nothing is written but a log
        run.executor.run(command, run.log(f"train.process{world.rank}"))
        log.info("train: process %s is done; the machine of process 0 has the results", world.rank)
        return
    state.put("train", settings=settings, **{key: remembered.get(key) for key in ("parameters", "updated")})
    told = TrainLog(run.folder / "train.jsonl", recipe.train.max_epoch, recipe.train.max_update)
    run.executor.run(command, run.log("train"), on_line=told)
    if not (run.checkpoints / "checkpoint_last.pt").is_file():
        raise UserError(
            f"fairseq-train ended without writing a checkpoint into {run.checkpoints}; its output is in "
            f"{run.log('train')}."
        )
    state.put(
        "train",
        settings=settings,
        done=done,
        parameters=sum(told.parameters) or remembered.get("parameters"),
        updated=told.updated if told.updated is not None else remembered.get("updated"),
        hardware=run.hardware.describe(),
    )


def check_trained(run: Run) -> None:
    """For the stages after training: refuse checkpoints that another recipe or other settings made."""
    remembered = run.state.get("train")
    if remembered:
        _refuse_other_settings(run, remembered.get("settings"), train_settings(run))


def trained_as_the_recipe_says(run: Run) -> bool:
    """Whether the training in this run folder ran to the recipe's own end, and not to another one."""
    trained = run.state.get("train")
    return bool(trained) and trained.get("done") == _mark_of_the_end(run, trained.get("settings"))


def train_settings(run: Run) -> Dict[str, Any]:
    """What must not change between two runs of one training."""
    recipe: Recipe = run.recipe
    model, train = dataclasses.asdict(recipe.model), dataclasses.asdict(recipe.train)
    for key in (*EXECUTION_KEYS, "max_epoch", "max_update"):
        del train[key]
    for section in (model, train):
        flags = section["flags"].items()
        section["flags"] = {key: value for key, value in flags if key not in recipe.execution_flags}
    return {"data": run.prepared.fingerprint, "model": model, "train": train}


def _mark_of_the_end(run: Run, settings: Optional[Dict[str, Any]]) -> str:
    """What state.json calls a training with these settings that has reached the recipe's end."""
    return fingerprint_of(settings, run.recipe.train.max_epoch, run.recipe.train.max_update)


def _refuse_other_settings(run: Run, before: Optional[Dict[str, Any]], now: Dict[str, Any]) -> None:
    if before == now:
        return
    remedy = "Use another --save-dir, or --restart to move this one aside and start again."
    if before is None:
        raise UserError(f"{run.checkpoints} holds checkpoints that this recipe did not make. {remedy}")
    changed = "; ".join(changes(before, now)[:5])
    raise UserError(f"{run.checkpoints} was trained with other settings ({changed}). {remedy}")
