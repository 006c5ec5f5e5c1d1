"""The steps of a run after its data is there: train, average, and evaluate as its kind of model is."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

import moa_fairseq
from moa_fairseq.data_prep.binarised import Prepared
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.average import last_checkpoints
from moa_fairseq.evaluation.chains import CHAINS, DEFAULT_CHAINS
from moa_fairseq.recipes.batch import plan_batch
from moa_fairseq.recipes.checkpoints import LAST, checkpoint_to_resume, is_whole
from moa_fairseq.recipes.finetune import check_pretrained, pretrained_checkpoint
from moa_fairseq.recipes.hardware import Hardware, precision_flags
from moa_fairseq.recipes.result import read_report, read_scores
from moa_fairseq.recipes.schema import (
    CAUSAL_LM,
    CLASSIFICATION,
    EXECUTION_KEYS,
    TRANSLATION,
    Generate,
    Recipe,
    Score,
)
from moa_fairseq.recipes.train_log import TrainLog
from moa_fairseq.running.command_line import flags, positional
from moa_fairseq.running.make import OUT, Step, is_done
from moa_fairseq.running.state import stamp

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Run:
    """One recipe on one binarised folder, in one run folder, on devices that can share its updates.

    user_dir: a plugin of the user's own, which imports this one.
    """

    recipe: Recipe
    hardware: Hardware
    prepared: Prepared
    folder: Path
    user_dir: Optional[Path] = None

    @property
    def checkpoints(self) -> Path:
        """fairseq's --save-dir."""
        return self.folder / "checkpoints"

    def task_flags(self) -> Dict[str, Any]:
        """The plugin, the task and its languages, as every fairseq command of the run gets them."""
        task, data = self.recipe.train.task, self.recipe.data
        pair = (
            {"source-lang": data.source, "target-lang": data.target} if task.startswith("translation") else {}
        )
        plugin = self.user_dir or Path(moa_fairseq.__file__).parent
        return {"user-dir": str(plugin), "task": task, **pair}


def steps(run: Run) -> List[Step]:
    """All steps of a run, in order: what --dry-run shows and what a run makes."""
    recipe = run.recipe
    found = [] if recipe.finetune == "noft" else [_train(run)]
    if recipe.average:
        found.append(_average(run, found[0]))
    if recipe.kind == TRANSLATION and recipe.generate:
        made = found[:2]
        translations = [_generate(run, recipe.generate, subset, made) for subset in recipe.generate.subsets]
        found += translations
        found += [_score(run, recipe.score, step) for step in translations if recipe.score]
    elif recipe.kind != TRANSLATION:
        found += [_evaluate(run, recipe.score or Score(), subset, found[:2]) for subset in recipe.subsets]
    return found


def train_inputs(recipe: Recipe) -> Dict[str, Any]:
    """What must not change between two starts of one training, its data aside."""
    model, train = dataclasses.asdict(recipe.model), dataclasses.asdict(recipe.train)
    for key in (*EXECUTION_KEYS, "max_epoch", "max_update"):
        del train[key]
    for section in (model, train):
        said = section["flags"].items()
        section["flags"] = {key: value for key, value in said if key not in recipe.execution_flags}
    return {"model": model, "train": train}


def _train(run: Run) -> Step:
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
        "save-dir": OUT,
        "log-format": "json",
        "log-interval": train.log_interval,
        **(world.flags() if world else {"distributed-world-size": hardware.devices}),
    }
    line = ["fairseq-train", positional(run.prepared.folder), *flags(run.task_flags()), *flags(values)]
    line += [*precision_flags(train.precision, hardware, model), *_device(run)]
    told = TrainLog(run.folder / "train.jsonl", train.max_epoch, train.max_update)

    def inputs() -> Dict[str, Any]:
        if recipe.finetune and not (run.checkpoints / LAST).exists():
            check_pretrained(recipe, run.prepared.folder)
        return {"data": run.prepared.fingerprint, **train_inputs(recipe)}

    def facts(checkpoints: Path) -> Dict[str, Any]:
        if not (checkpoints / LAST).is_file():
            raise UserError(
                f"fairseq-train ended without writing a checkpoint into {checkpoints}; its output is in "
                f"{run.folder / 'train.log'}."
            )
        parameters = sum(told.parameters) or None
        return {"parameters": parameters, "updated": told.updated, "hardware": hardware.describe()}

    goal = {"max_epoch": train.max_epoch, "max_update": train.max_update}
    step = Step("train", run.checkpoints, line, inputs, "", told, facts, in_place=True, goal=goal)
    if run.checkpoints.is_dir() and not is_done(step, run.folder):
        resume = checkpoint_to_resume(run.checkpoints)
        if resume and resume.name != LAST:
            log.info("train: %s is damaged or missing; going on from %s", LAST, resume.name)
            return dataclasses.replace(step, argv=[*line, "--restore-file", str(resume)])
    return step


def _average(run: Run, train: Step) -> Step:
    average = run.recipe.average
    assert average is not None
    by_updates, count = average.updates is not None, average.count
    values = {
        "inputs": str(run.checkpoints),
        "num-epoch-checkpoints": average.epochs,
        "num-update-checkpoints": average.updates,
        "output": OUT,
    }

    def inputs() -> Dict[str, Any]:
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
        return {"train": train, "count": count, "checkpoints": [stamp(path) for path in last]}

    return Step("average", run.folder / "average.pt", ["moa-fairseq", "average", *flags(values)], inputs)


def _model(run: Run, made: List[Step]) -> Path:
    """The checkpoint that is evaluated. made: training and averaging, where the run has them."""
    if run.recipe.pretrained and run.recipe.finetune == "noft":
        return pretrained_checkpoint(run.recipe.pretrained)
    return made[1].output if run.recipe.average else run.checkpoints / "checkpoint_best.pt"


def _evaluated(run: Run, made: List[Step], settings: Any, **further: Any) -> Any:
    """The inputs of a step that evaluates the checkpoint by a section of the recipe."""

    def inputs() -> Dict[str, Any]:
        model = _model(run, made)
        if not is_whole(model):
            missing = "average" if run.recipe.average else "train"
            raise UserError(f"{model} is missing or cut off: run --stage {missing} first (or --stage all).")
        said = {"settings": dataclasses.asdict(settings), "data": run.prepared.fingerprint, **further}
        return {**said, "made": made[-1] if made else None, "model": model}

    return inputs


def _device(run: Run) -> List[str]:
    return [] if run.hardware.gpus else ["--cpu"]


def _generate(run: Run, section: Generate, subset: str, made: List[Step]) -> Step:
    """The beam search, in fp32 so that scores do not depend on the hardware."""
    values = {
        **run.task_flags(),
        "path": str(_model(run, made)),
        "gen-subset": subset,
        "beam": section.beam,
        "lenpen": section.lenpen,
        "max-tokens": section.max_tokens,
        "remove-bpe": section.remove_bpe,
        **section.flags,
    }
    translated, total = 0, run.prepared.sentences.get(subset, 0)
    pace, goal = max(100, (total or 1000) // 10), f" of {total:,}" if total else ""

    def watch(line: str) -> None:
        nonlocal translated
        if re.match(r"H-\d+\t", line):
            translated += 1
            if translated % pace == 0:
                log.info("  %s%s sentences", f"{translated:,}", goal)

    def finish(made: Path) -> None:
        if not translated:
            where = f"see {run.folder / f'generate-{subset}.log'} and {made}"
            raise UserError(f"fairseq-generate translated nothing of subset {subset}; {where}.")

    line = ["fairseq-generate", positional(run.prepared.folder), *flags(values), *_device(run)]
    output, inputs = run.folder / f"generate-{subset}.txt", _evaluated(run, made, section, subset=subset)
    return Step(output.stem, output, line, inputs, "out", watch, finish)


def _score(run: Run, section: Score, generated: Step) -> Step:
    """The scoring of the translations, by the headline's chain, too."""
    further = [name for name in CHAINS if name not in DEFAULT_CHAINS]
    headline = next((name for name in further if CHAINS[name].key == section.headline), None)
    values = {"target-lang": run.recipe.data.target, "also": headline, **section.flags, "json": True}
    line = ["moa-fairseq", "score", positional(generated.output), *flags(values)]
    name = generated.name.replace("generate-", "score-", 1)
    inputs: Mapping[str, Any] = {"translations": generated, "settings": dataclasses.asdict(section)}
    return Step(name, run.folder / f"{name}.json", line, inputs, "out", finish=_check_scores)


def _check_scores(made: Path) -> None:
    read_scores(made)


def _evaluate(run: Run, section: Score, subset: str, made: List[Step]) -> Step:
    """A language model's perplexity or a classifier's accuracy, in fp32 as translations are."""
    name, model, data = f"score-{subset}", str(_model(run, made)), run.prepared.folder
    inputs = _evaluated(run, made, section, subset=subset)
    if run.recipe.kind == CAUSAL_LM:
        values = {**run.task_flags(), "path": model, "gen-subset": subset, **section.flags}
        line = ["fairseq-eval-lm", positional(data), *flags(values), *_device(run)]

        def report(made: Path) -> None:
            read_report(made.read_text(encoding="utf-8", errors="replace"), made, run.recipe)

        # Its log goes where whoever configured logging first wants it.
        return Step(name, run.folder / f"eval-lm-{subset}.txt", line, inputs, "both", finish=report)
    flag = "classifier" if run.recipe.kind == CLASSIFICATION else "masked-lm"
    values = {flag: model, "data": str(data), "subset": subset, **section.flags, "json": True}
    line = ["moa-fairseq", *flags({"user-dir": run.user_dir}), "score", *flags(values), *_device(run)]
    return Step(name, run.folder / f"{name}.json", line, inputs, "out", finish=_check_scores)
