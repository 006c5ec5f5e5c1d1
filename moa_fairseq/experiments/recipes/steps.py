"""The steps of a run after its data: train, average, and evaluate by the type of model."""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.prepare import content_digest
from moa_fairseq.experiments.data.text_files import RUN_COPY, save_run_copy, text_files
from moa_fairseq.experiments.make import OUT, Step, file_signature, made_by_of, read_step_records
from moa_fairseq.experiments.recipes.batch import plan_batch, sentence_sizes
from moa_fairseq.experiments.recipes.checkpoints import (
    LAST,
    check_pretrained,
    is_whole,
    restore_last_checkpoint,
)
from moa_fairseq.experiments.recipes.claim import upgrade_training
from moa_fairseq.experiments.recipes.precision import precision_name
from moa_fairseq.experiments.recipes.run import Run
from moa_fairseq.experiments.recipes.schema import (
    CAUSAL_LM,
    CLASSIFICATION,
    INTERVAL,
    POSITIONS,
    SENTENCEPIECE,
    SKIP,
    TRANSLATION,
    Average,
    Generate,
    Score,
)
from moa_fairseq.experiments.recipes.scores import scores_in
from moa_fairseq.experiments.recipes.train_log import TrainLog
from moa_fairseq.experiments.records.json_files import Values
from moa_fairseq.experiments.scoring.average import last_checkpoints, numbered_checkpoints
from moa_fairseq.experiments.scoring.chains import CHAINS, DEFAULT_CHAINS, SACREBLEU
from moa_fairseq.experiments.scoring.zero_shot import OUTPUT
from moa_fairseq.files import checksum
from moa_fairseq.process import flags, positional

LEFT_OUT = "left_out"  # the key of the number of sentences without a translation
ZERO_SHOT = "zero_shot"  # the step of the stage zero-shot
log = logging.getLogger(__name__)


def steps(run: Run) -> list[Step]:
    """All steps of a run after its data, in order."""
    recipe = run.recipe
    run_steps: list[Step] = []
    model_step = None  # the step that makes the evaluated model, unless it is a pretrained one
    if recipe.finetune != "noft":
        model_step = _Training(run).step()
        run_steps += [_keep_text_files(run), model_step]
        if recipe.average:
            model_step = _average(run, recipe.average, model_step)
            run_steps.append(model_step)
    if recipe.kind != TRANSLATION:
        section = recipe.score or Score()
        run_steps += [_evaluate(run, section, subset, model_step) for subset in recipe.subsets]
        if recipe.zero_shot:
            run_steps.append(_zero_shot(run, recipe.zero_shot, model_step))
    elif recipe.generate:
        search = recipe.generate
        translations = [_generate(run, search, subset, model_step) for subset in recipe.subsets]
        run_steps += translations
        if recipe.score:
            run_steps += [_score(run, recipe.score, step) for step in translations]
    return run_steps


def _keep_text_files(run: Run) -> Step:
    """The step that copies the data's dictionaries, merges and rules into the run folder.

    It is a step in place, so that other files at a later start are an error.
    """
    data = run.prepared.folder

    def inputs() -> Values:
        return {name: checksum(path) for name, path in text_files(data).items()}

    keep = functools.partial(save_run_copy, data, run.folder, run.prepared.fingerprint)
    return Step("train-text", run.folder / RUN_COPY, keep, inputs, in_place=True)


class _Training:
    """The step of a run's training."""

    def __init__(self, run: Run) -> None:
        train = run.recipe.train
        self.run = run
        self.batch = plan_batch(train, run.hardware.devices)
        self.precision = precision_name(train.precision, run.hardware, run.recipe.model)
        self.train_log = TrainLog(run.folder / "train.jsonl", train.max_epoch, train.max_update)

    def step(self) -> Step:
        """The step. A later start resumes the training in its folder."""
        return Step(
            "train",
            self.run.checkpoints,
            self.run.command("fairseq-train", self.flags()),
            self.inputs,
            watch=self.train_log,
            finish=self.facts,
            in_place=True,
            goal=self.run.recipe.goal,
            ready=self.check_resumption,
            conditions=self.conditions,
            upgrade=upgrade_training,
        )

    def flags(self) -> Values:
        """The flags of fairseq-train. Flags of the recipe replace those that suit the hardware."""
        recipe = self.run.recipe
        train = recipe.train
        hardware = self.run.hardware
        world = hardware.world
        values = recipe.model.as_flags() | {"criterion": train.criterion}
        if not hardware.gpus:
            # A data worker is forked in each epoch, and every page of the training's large memory that the
            # training then writes to is copied
            values["num-workers"] = 0
        if not hardware.gpus and world:
            # fairseq's own choice (nccl, pytorch_ddp) is for GPUs only. No recipe needs
            # --find-unused-parameters: an unselected expert has a gradient of zeros.
            values.update({"distributed-backend": "gloo", "ddp-backend": "legacy_ddp"})
        values.update(train.flags)
        training_flags = recipe.training_flags
        if recipe.data.segmentation == SENTENCEPIECE and training_flags.get("eval-bleu"):
            values["eval-bleu-remove-bpe"] = SENTENCEPIECE
        if logs := training_flags.get("tensorboard-logdir"):
            values["tensorboard-logdir"] = str(self.run.folder / logs)
        values |= {
            "max-tokens": self.batch.max_tokens,
            "update-freq": self.batch.update_freq,
            "max-epoch": train.max_epoch,
            "max-update": train.max_update,
            "seed": train.seed,
            "keep-last-epochs": train.keep_last_epochs,
            "save-dir": OUT,
            "log-format": "json",
            "log-interval": train.log_interval,
        }
        values |= world.flags() if world else {"distributed-world-size": hardware.devices}
        return values | {self.precision: self.precision != "fp32"}

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the data's content. It takes long to compute."""
        return content_digest(self.run.prepared.folder)

    def inputs(self) -> Values:
        """The settings that no later start may change.

        Before the first checkpoint, the pretrained model is checked.
        """
        if self.run.recipe.finetune and not (self.run.checkpoints / LAST).exists():
            check_pretrained(self.run.recipe, self.run.prepared.folder)
        return {"data": self.run.prepared.fingerprint} | self.run.recipe.training_inputs

    def facts(self, checkpoints: Path) -> Values:
        """What state.json records of the training. Raises UserError if it left no checkpoint."""
        if not (checkpoints / LAST).is_file():
            output = self.run.folder / "train.log"
            raise UserError(f"fairseq-train wrote no checkpoint into {checkpoints}; see {output}.")
        return {
            "parameters": sum(self.train_log.parameters) or None,
            "updated": self.train_log.updated,
            INTERVAL: self.run.recipe.train.flags.get(INTERVAL),
        }

    def check_resumption(self) -> None:
        """Raise UserError for a training that cannot resume; restore its last checkpoint."""
        checkpoints = self.run.checkpoints
        problem = f"The training in {checkpoints} cannot resume"
        data = self.run.prepared.folder
        sessions = made_by_of(read_step_records(self.run.folder).get("train", {}))
        digests = [session["data"] for session in sessions if session.get("data")]
        if digests and digests[0] != self.digest:
            raise UserError(
                f"{problem}: the files in {data} have another content (digest {digests[0]} → {self.digest}). "
                "Give --data its original data, or --restart to move the run aside and start over."
            )
        restore_last_checkpoint(checkpoints)
        has_optimizer = not self.run.recipe.training_flags.get("no-save-optimizer-state")
        if (checkpoints / LAST).exists() and not has_optimizer:
            raise UserError(
                f"{problem}: its checkpoints have no optimizer (train.flags.no-save-optimizer-state). Start "
                "over with --restart; without the flag a run can resume."
            )

    def conditions(self) -> Values:
        """The provenance of the training beyond that of every step."""
        return self.run.conditions | {
            "precision": self.precision,
            "threads": torch.get_num_threads(),
            "max_tokens": self.batch.max_tokens,
            "update_freq": self.batch.update_freq,
            "data": self.digest,
        }


def _average(run: Run, average: Average, train: Step) -> Step:
    """The step that averages the last checkpoints."""
    by_updates = average.updates is not None
    count = average.count
    values = {
        "inputs": str(run.checkpoints),
        "num-epoch-checkpoints": average.epochs,
        "num-update-checkpoints": average.updates,
        "output": OUT,
        "force": True,  # so that people can repeat the command; here its output is a temporary file
    }

    def inputs() -> Values:
        paths = _last_checkpoints(run, count, by_updates)
        signatures = [file_signature(path) for path in paths]
        return {"train": train, "count": count, "checkpoints": signatures}

    line = ["moa-fairseq", "average", *flags(values)]
    return Step("average", run.model_path, line, inputs, conditions=run.conditions)


def _last_checkpoints(run: Run, count: int, by_updates: bool) -> list[Path]:
    """The checkpoints to average. Raises UserError for too few, and for one that was cut off."""
    try:
        paths = last_checkpoints(run.checkpoints, count, by_updates)
    except UserError as error:  # too few checkpoints: add the key of the recipe and the remedy
        key = "average.updates" if by_updates else "average.epochs"
        num_saved = len(numbered_checkpoints(run.checkpoints, by_updates))
        fewer = f"--set {key}={num_saved} averages those, " if num_saved > 1 else ""
        remedy = f"{fewer}--set average=null evaluates the best checkpoint."
        raise UserError(f"{key}: {error} {remedy}") from error
    for path in paths:
        if not is_whole(path):
            raise UserError(
                f"{path} is cut off, so it cannot be averaged. Delete it and resume the train stage, or "
                "average fewer checkpoints."
            )
    return paths


def _evaluation_inputs(
    run: Run, settings: Values, subset: str, model_step: Step | None
) -> Callable[[], Values]:
    """The inputs of a step that evaluates the checkpoint.

    Args:
        run: the run.
        settings: the section of the recipe for the evaluation.
        subset: the evaluated subset.
        model_step: the step that makes the model; None for a pretrained model.
    """

    def inputs() -> Values:
        if not is_whole(run.model_path):
            stage = "average" if run.recipe.average else "train"
            remedy = f"Run --stage {stage} first"
            # The train stage would do nothing then
            if stage == "train" and (run.checkpoints / LAST).exists():
                remedy = "If the training is done, --set average.epochs=N averages its checkpoints"
            raise UserError(f"{run.model_path} is missing or cut off. {remedy}.")
        return {
            "settings": settings,
            "data": run.prepared.fingerprint,
            "subset": subset,
            "made": model_step,
            "model": run.model_path,
        }

    return inputs


def _generate(run: Run, section: Generate, subset: str, model_step: Step | None) -> Step:
    """The step of the beam search, in fp32 so that scores do not depend on the hardware."""
    by_pieces = section.remove_bpe and run.recipe.data.segmentation == SENTENCEPIECE
    values: Values = {
        "path": str(run.model_path),
        "gen-subset": subset,
        "beam": section.beam,
        "lenpen": section.lenpen,
        "max-tokens": section.max_tokens,
        "remove-bpe": SENTENCEPIECE if by_pieces else section.remove_bpe,
    }
    for name in POSITIONS:  # these are also limits of the task
        values[name] = run.recipe.training_flags.get(name)
    output = run.folder / f"generate-{subset}.txt"
    translated: set[str] = set()  # the ids of the sentences
    total = run.prepared.sentences.get(subset, 0)
    return Step(
        output.stem,
        output,
        run.command("fairseq-generate", values | section.flags),
        _evaluation_inputs(run, dataclasses.asdict(section), subset, model_step),
        captured="out",
        watch=functools.partial(_add_translated, translated, total),
        finish=functools.partial(_translation_facts, run, section, subset, translated),
        conditions=run.conditions,
    )


def _add_translated(translated: set[str], total: int, line: str) -> None:
    """Add the sentence of a line of fairseq-generate, which has --nbest lines of it; log about ten times."""
    match = re.match(r"H-\d+\t", line)
    if not match or match.group() in translated:
        return
    translated.add(match.group())
    if len(translated) % max(100, (total or 1000) // 10) == 0:
        of_total = f" of {total:,}" if total else ""
        log.info("  %s%s sentences", f"{len(translated):,}", of_total)


def _translation_facts(
    run: Run, section: Generate, subset: str, translated: set[str], translations: Path
) -> dict[str, int]:
    """The number of sentences without a translation, or a UserError if there may be none."""
    log_file = run.folder / f"generate-{subset}.log"
    if not translated:
        raise UserError(
            f"fairseq-generate translated nothing of subset {subset}. See {log_file} and {translations}."
        )
    total = len(sentence_sizes(run.recipe, run.prepared.folder, subset)[0])
    left_out = total - len(translated)
    if left_out <= 0:
        return {}
    if not section.flags.get(SKIP):
        raise UserError(
            f"fairseq-generate translated only {len(translated):,} of {total:,} sentences of {subset}, "
            f"so there is no score of the subset. {log_file} has the reason."
        )
    return {LEFT_OUT: left_out}


def _score(run: Run, section: Score, generated: Step) -> Step:
    """The step that scores translations, also by the BLEU pipeline of the headline metric."""
    recipe = run.recipe
    values: Values = {"target-lang": recipe.data.target, "also": None}
    if recipe.data.running_text:  # the other pipelines need tokens
        values.update({"chain": SACREBLEU, "detokenized": True})
    else:
        for name, chain in CHAINS.items():
            if name not in DEFAULT_CHAINS and chain.key == section.headline:
                values["also"] = name
    if recipe.generate and recipe.generate.remove_bpe:
        # fairseq-generate has joined subwords, so any @@ belongs to the text
        values["remove-bpe"] = "none"
    values |= section.flags | {"json": True}
    if recipe.generate and recipe.generate.flags.get(SKIP):
        values["allow-partial"] = True
    line = ["moa-fairseq", "score", positional(generated.output), *flags(values)]
    name = generated.name.replace("generate-", "score-", 1)
    inputs = {"translations": generated, "settings": dataclasses.asdict(section)}
    return _scored(run, name, f"{name}.json", line, inputs)


def _evaluate(run: Run, section: Score, subset: str, model_step: Step | None) -> Step:
    """The step of a language model's perplexity or a classifier's accuracy, in fp32 like translations."""
    kind = run.recipe.kind
    name = f"score-{subset}"
    model = str(run.model_path)
    inputs = _evaluation_inputs(run, dataclasses.asdict(section), subset, model_step)
    if kind == CAUSAL_LM:
        line = run.command("fairseq-eval-lm", {"path": model, "gen-subset": subset} | section.flags)
        # The first configuration of logging determines the place of its log.
        return _scored(run, name, f"eval-lm-{subset}.txt", line, inputs, captured="both")
    data = str(run.prepared.folder)
    flag = "classifier" if kind == CLASSIFICATION else "masked-lm"
    values: Values = {flag: model, "data": data, "subset": subset} | section.flags
    values |= {"json": True, "cpu": not run.hardware.gpus}
    line = ["moa-fairseq", *flags({"user-dir": run.options.user_dir}), "score", *flags(values)]
    return _scored(run, name, f"{name}.json", line, inputs)


def _zero_shot(run: Run, tasks: list[str], model_step: Step | None) -> Step:
    """The step of accuracies on tasks of lm_eval; the command also adds them to the run's result.json."""
    plugin = flags({"user-dir": run.options.user_dir})
    line = ["moa-fairseq", *plugin, "zero-shot", positional(run.folder)]
    line += flags({"tasks": ",".join(tasks), "output": OUT, "cpu": not run.hardware.gpus})
    inputs = _evaluation_inputs(run, {"tasks": tasks}, "", model_step)
    return Step(ZERO_SHOT, run.folder / OUTPUT, line, inputs, conditions=run.conditions)


def _scored(
    run: Run, name: str, file: str, line: list[str], inputs: Any, captured: str = "out"
) -> Step:
    """A step that captures scores, and checks that there are any."""

    def finish(scores: Path) -> None:
        scores_in(scores, run.recipe, run.prepared.folder, name.removeprefix("score-"))

    output = run.folder / file
    return Step(name, output, line, inputs, captured, finish=finish, conditions=run.conditions)
