"""The stages train, average, generate and score: each skipped when done, each leaving whole files only."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from moa_fairseq.data_prep.prepare import Prepared
from moa_fairseq.data_prep.stage_folder import fingerprint_of
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write
from moa_fairseq.json_files import MAPPING, TEXT, check_kinds, is_number, read_json
from moa_fairseq.recipes import commands
from moa_fairseq.recipes.execution import experiment_flags
from moa_fairseq.recipes.finetune import check_pretrained
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.run_folder import (
    RunState,
    checkpoint_to_resume,
    epoch_checkpoints,
    is_whole,
    update_checkpoints,
)
from moa_fairseq.recipes.schema import HEADLINE_METRICS, Recipe
from moa_fairseq.recipes.train_log import TrainLog
from moa_fairseq.running.process import Executor

# Keys of `train` that may change between two runs of one training: where it runs, and when it ends.
VOLATILE = (
    *("max_tokens", "min_tokens", "max_epoch", "max_update"),
    *("precision", "keep_last_epochs", "log_interval"),
)


@dataclasses.dataclass
class Run:
    """One recipe in one run folder: all that a stage needs to know.

    show: called with each command before it runs (prints it and adds it to commands.sh).
    """

    recipe: Recipe
    hardware: Hardware
    paths: commands.RunPaths
    state: RunState
    executor: Executor
    show: Callable[[List[str]], None]
    say: Callable[[str], None]

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.paths.save_dir

    @property
    def leads(self) -> bool:
        """True for the one program that writes the run folder."""
        return self.hardware.world is None or self.hardware.world.leads

    def log(self, name: str) -> Path:
        """Where a stage's full output goes."""
        return self.folder / f"{name}.log"


def train(run: Run, prepared: Prepared) -> None:
    """Train, or go on, until the recipe's end. Raises UserError for checkpoints of other settings."""
    settings = train_settings(run.recipe, prepared)
    done = _training_done(run, settings)
    resume = checkpoint_to_resume(run.paths.checkpoints, run.say)
    remembered = run.state.get("train")
    if run.recipe.finetune and resume is None:
        check_pretrained(run.recipe, run.paths.data, run.say)
    if run.recipe.finetune == "noft":
        run.say(f"train: nothing (NOFT); {run.paths.model(run.recipe)} is evaluated as it is")
        run.state.put("train", settings=settings, done=done, updated=0)
        return
    if resume is not None:
        _refuse_other_settings(run, remembered.get("settings"), settings)
        if remembered.get("done") == done:
            run.say(f"train: done before ({run.paths.checkpoints})")
            return
    elif run.leads:
        (run.folder / "train.jsonl").unlink(missing_ok=True)
    if not run.leads:
        _join(run, resume)
        return
    known = {key: remembered.get(key) for key in ("parameters", "updated")}
    run.state.put("train", settings=settings, **known)
    command = _train_command(run, resume)
    log = TrainLog(run.folder / "train.jsonl", run.recipe.train.max_epoch, run.recipe.train.max_update)
    run.executor.run(command, run.log("train"), on_line=log)
    if not (run.paths.checkpoints / "checkpoint_last.pt").is_file():
        raise UserError(
            f"fairseq-train ended without writing a checkpoint into {run.paths.checkpoints}; its output is "
            f"in {run.log('train')}."
        )
    run.state.put(
        "train",
        settings=settings,
        done=done,
        parameters=sum(log.parameters) or remembered.get("parameters"),
        updated=log.updated if log.updated is not None else remembered.get("updated"),
        hardware=run.hardware.describe(),
    )


def _join(run: Run, resume: Optional[Path]) -> None:
    """Train as one of the processes of another machine's run: nothing is written but a log."""
    rank = run.hardware.world.rank
    run.executor.run(_train_command(run, resume), run.log(f"train.process{rank}"))
    run.say(f"train: process {rank} is done; the machine of process 0 has the results")


def _train_command(run: Run, resume: Optional[Path]) -> List[str]:
    """The fairseq-train line, said and shown; it names the checkpoint where it is not checkpoint_last.pt."""
    command = commands.train_command(run.recipe, run.hardware, run.paths)
    if resume is not None and resume.name != "checkpoint_last.pt":
        run.say(f"train: checkpoint_last.pt is damaged or missing; going on from {resume.name}")
        command += ["--restore-file", str(resume)]
    if run.hardware.world:
        run.say(f"train: {run.hardware.world.describe()}")
    run.say("train: " + commands.plan_batch(run.recipe.train, run.hardware.devices).describe())
    run.show(command)
    return command


def _training_done(run: Run, settings: Dict[str, Any]) -> str:
    """The mark of a training with these settings that reached the recipe's end."""
    return fingerprint_of(settings, run.recipe.train.max_epoch, run.recipe.train.max_update)


def check_trained(run: Run, prepared: Prepared) -> None:
    """For the stages after training: refuse checkpoints that another recipe or other settings made."""
    remembered = run.state.get("train")
    if remembered:
        _refuse_other_settings(run, remembered.get("settings"), train_settings(run.recipe, prepared))


def trained_as_the_recipe_says(run: Run) -> bool:
    """Whether the training in this run folder ran to the recipe's own end, and not to another one."""
    trained = run.state.get("train")
    return bool(trained) and trained.get("done") == _training_done(run, trained.get("settings"))


def evaluated_as_the_recipe_says(run: Run, subset: str) -> bool:
    """Whether a subset was evaluated by the finished training's model with the recipe's own settings."""
    count = run.recipe.average.count if run.recipe.average else 1
    section = run.recipe.generate or run.recipe.score
    evaluated = evaluation_state(run, subset)
    return (
        trained_as_the_recipe_says(run)
        and evaluated.get("training") == run.state.get("train")["done"]
        and evaluated.get("checkpoints") == count
        and evaluated.get("settings") == dataclasses.asdict(section)
    )


def evaluation_state(run: Run, subset: str) -> Dict[str, Any]:
    """What the stage that read the model remembers: generate, or score where nothing is generated."""
    return run.state.get(f"generate-{subset}" if run.recipe.generate else f"score-{subset}")


def origin_of_model(run: Run) -> Dict[str, Any]:
    """For a stage's entry: which training the model comes from, and how many checkpoints are in it."""
    origin = run.state.get("average" if run.recipe.average else "train")
    return {
        "checkpoints": origin.get("checkpoints", 1),
        "training": origin.get("training", origin.get("done")),
    }


def require_model(run: Run) -> Path:
    """The checkpoint to evaluate. Raises UserError when it is not there or cut off."""
    model = run.paths.model(run.recipe)
    if not is_whole(model):
        stage = "average" if run.recipe.average else "train"
        raise UserError(f"{model} is missing or cut off: run --stage {stage} first (or --stage all).")
    return model


def train_settings(recipe: Recipe, prepared: Prepared) -> Dict[str, Any]:
    """What must not change between two runs of one training."""
    kept = {key: value for key, value in dataclasses.asdict(recipe.train).items() if key not in VOLATILE}
    settings = {"data": prepared.fingerprint, "model": dataclasses.asdict(recipe.model), "train": kept}
    averages_updates = bool(recipe.average and recipe.average.updates)
    for section in ("model", "train"):
        settings[section]["flags"] = experiment_flags(section, settings[section]["flags"], averages_updates)
    return settings


def average(run: Run) -> None:
    """Average the last checkpoints into average.pt. Raises UserError when there are not enough whole ones."""
    kind = "epochs" if run.recipe.average.epochs else "updates"
    wanted, folder = run.recipe.average.count, run.paths.checkpoints
    found = epoch_checkpoints(folder) if kind == "epochs" else update_checkpoints(folder)
    if len(found) < wanted:
        names = ", ".join(path.name for path in found) or "none"
        fewer = (
            f"use --set average.{kind}={len(found)}"
            if len(found) > 1
            else "leave it out with --set average=null"
        )
        raise UserError(
            f"average.{kind} asks for {wanted} checkpoints and {folder} has {len(found)} ({names}). "
            f"Train longer, or {fewer}."
        )
    damaged = [path.name for path in found[-wanted:] if not is_whole(path)]
    if damaged:
        raise UserError(
            f"{folder}/{damaged[0]} is cut off and cannot be averaged. Delete it and run the train stage "
            "on, or average fewer checkpoints."
        )
    done = fingerprint_of([stamp(path) for path in found[-wanted:]])
    output = run.folder / "average.pt"
    if run.state.is_done("average", done, output):
        run.say(f"average: done before ({output})")
    else:
        command = commands.average_command(run.recipe, run.paths)
        run.show(command)
        run.executor.run(command, run.log("average"))
    # Also of one made before: training may have gone on since without a newer checkpoint.
    run.state.put("average", done=done, checkpoints=wanted, training=run.state.get("train").get("done"))


def generate(run: Run, prepared: Prepared, subset: str) -> Path:
    """Translate one subset; returns `generate-<subset>.txt`, which appears only when it is whole."""
    model, output = require_model(run), run.folder / f"generate-{subset}.txt"
    done = fingerprint_of(stamp(model), dataclasses.asdict(run.recipe.generate), subset, prepared.fingerprint)
    stage = f"generate-{subset}"
    if run.state.is_done(stage, done, output):
        run.say(f"{stage}: done before ({output})")
    else:
        _translate(run, prepared, subset, output)
    run.state.put(stage, done=done, settings=dataclasses.asdict(run.recipe.generate), **origin_of_model(run))
    return output


def _translate(run: Run, prepared: Prepared, subset: str, output: Path) -> None:
    command = commands.generate_command(run.recipe, run.hardware, run.paths, subset)
    run.show(command)
    log, partial = run.log(f"generate-{subset}"), run.folder / f"generate-{subset}.partial"
    progress = _SentenceCounter(prepared.sentences.get(subset), run.say)
    run.executor.run(command, log, output=partial, on_line=progress)
    if not progress.count:
        raise UserError(f"fairseq-generate translated nothing of subset {subset}; see {log} and {partial}.")
    os.replace(partial, output)


def score(run: Run, subset: str) -> Dict[str, Any]:
    """Score one subset's translations; returns what `score-<subset>.json` holds."""
    source, output = run.folder / f"generate-{subset}.txt", run.folder / f"score-{subset}.json"
    if not source.is_file():
        raise UserError(f"{source} is missing: run --stage generate first (or --stage all).")
    stage = f"score-{subset}"
    done = fingerprint_of(stamp(source), dataclasses.asdict(run.recipe.score))
    if run.state.is_done(stage, done, output):
        run.say(f"{stage}: done before ({output})")
        return read_scores(output)
    scores = run_scoring(run, commands.score_command(run.recipe, source), output)
    run.state.put(stage, done=done)
    return scores


def run_scoring(run: Run, command: List[str], output: Path) -> Dict[str, Any]:
    """Run a `moa-fairseq score --json` line and keep what it printed in `output`; returns it."""
    run.show(command)
    partial = output.with_suffix(".partial")
    run.executor.run(command, run.log(output.stem), output=partial)
    scores = read_scores(partial)
    with atomic_write(output) as stream:
        json.dump(scores, stream, indent=1)
    partial.unlink()
    return scores


class _SentenceCounter:
    """Counts the hypotheses that fairseq-generate has written and tells now and then."""

    def __init__(self, total: Optional[int], say: Callable[[str], None]) -> None:
        self.count = 0
        self.total = total
        self.say = say
        self.step = max(100, (total or 1000) // 10)

    def __call__(self, line: str) -> None:
        if re.match(r"H-\d+\t", line):
            self.count += 1
            if self.count % self.step == 0:
                self.say(f"  {self.count:,}" + (f" of {self.total:,}" if self.total else "") + " sentences")


def read_scores(path: Path) -> Dict[str, Any]:
    """What `moa-fairseq score --json` printed. Raises UserError for a damaged file."""
    remedy = "It should hold what moa-fairseq score --json prints: delete it and run --stage score again."
    scores = read_json(path, remedy)
    metrics = dict.fromkeys(HEADLINE_METRICS, MAPPING)
    check_kinds(scores, {**metrics, "meta": MAPPING, "sacrebleu_signature": TEXT}, str(path), remedy)
    check_kinds(scores.get("meta") or {}, {"evaluation": MAPPING}, f"{path}: meta", remedy)
    for name in metrics.keys() & scores.keys():
        check_kinds(scores[name], {"signature": TEXT}, f"{path}: {name}", remedy, required=("score",))
        for key in ("score", "sd"):  # that of a diverged model is a float, too, though no number
            value = scores[name].get(key)
            if not (value is None or isinstance(value, float) or is_number(value)):
                raise UserError(f"{path}: {name}.{key} must be a number. {remedy}")
    return scores


def _refuse_other_settings(run: Run, before: Optional[Dict[str, Any]], now: Dict[str, Any]) -> None:
    if before == now:
        return
    remedy = "Use another --save-dir, or --restart to move this one aside and start again."
    if before is None:
        raise UserError(f"{run.paths.checkpoints} holds checkpoints that this recipe did not make. {remedy}")
    old, new = _flatten(before), _flatten(now)
    changed = [
        f"{key}: {old.get(key, 'not set')} → {new.get(key, 'not set')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    raise UserError(
        f"{run.paths.checkpoints} was trained with other settings ({'; '.join(changed[:5])}). {remedy}"
    )


def _flatten(mapping: Dict[str, Any], prefix: str = "") -> Dict[str, Any]:
    flat = {}
    for key, value in mapping.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def stamp(path: Path) -> List[Any]:
    """Name, size and time of a file: enough to tell that it was made again."""
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]
