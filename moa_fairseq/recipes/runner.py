"""From a recipe to result.json: the run folder, the data, and each step of the job's list."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

import yaml

from moa_fairseq.data_prep.binarised import Prepared, is_binarised
from moa_fairseq.data_prep.inputs import require_source
from moa_fairseq.data_prep.prepare import Preparation, prepared_folder
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write
from moa_fairseq.recipes.batch import fit_devices, with_floor
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.jobs import steps
from moa_fairseq.recipes.jobs.shared import read_scores
from moa_fairseq.recipes.result import describe, write_result, write_throughput
from moa_fairseq.recipes.row_data import on_the_rows_data
from moa_fairseq.recipes.run_folder import RunState, changes, move_aside
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.recipes.steps import OutputStep, Run, carry_out
from moa_fairseq.recipes.training import carry_out_training, check_trained, trained_as_the_recipe_says
from moa_fairseq.running import command_line
from moa_fairseq.running.folder_lock import PATIENCE_SECONDS, locked
from moa_fairseq.running.process import Executor, terminate_as_interrupt

log = logging.getLogger(__name__)

STAGES = ("prepare", "train", "average", "generate", "score")
# Data recipes that need no --data: `moa-fairseq corpus` makes it.
EMBEDDED = ("embedded", "embedded_gpt2bpe")
# After a restart of torchrun, the program that kept the run folder before may take its time to go.
HANDOVER_SECONDS = 60.0
# What a binarised folder depends on of the recipe's data section; the rest is of no effect there.
BINARISED_KEYS = ("source", "target", "joined_dictionary")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says beside the recipe. command_line: for result.json. user_dir: as of Run."""

    stage: str = "all"
    data: Optional[Path] = None
    save_dir: Optional[Path] = None
    restart: bool = False
    record: Optional[Path] = None
    command_line: str = ""
    user_dir: Optional[Path] = None
    data_root: Path = Path("data")
    corpus_root: Path = Path("data") / "embedded_en_de"

    def wants(self, stage: str) -> bool:
        """True when --stage asks for this stage."""
        return self.stage in (stage, "all")


def run_folder_of(recipe: Recipe, options: Options) -> Path:
    """--save-dir, or runs/<experiment>. Raises UserError for one that fairseq would split."""
    folder = options.save_dir or Path("runs") / recipe.experiment
    if ":" in str(folder):
        raise UserError(
            f"--save-dir {folder} cannot be used: fairseq takes a ':' in the path of a model for the end of "
            "one path and the beginning of the next. Give the folder another name, or another place."
        )
    return folder


def prepared_before(recipe: Recipe, options: Options) -> Optional[Path]:
    """The binarised folder that a prepare stage of this run folder made, if there is one."""
    known = RunState(run_folder_of(recipe, options)).get("prepare")
    return Path(known["folder"]) if known and Path(known["folder"]).is_dir() else None


def plan_run(recipe: Recipe, hardware: Hardware, options: Options) -> Run:
    """The run as far as it is known before its data is prepared; nothing is written."""
    folder = run_folder_of(recipe, options)
    run = Run(recipe, hardware, Prepared(Path("DATA-BIN"), {}, ""), folder, user_dir=options.user_dir)
    source = run.state.get("prepare").get("source")
    given = options.data or (Path(source) if source else None)
    if recipe.data.recipe == "binarised" or (given is not None and is_binarised(given)):
        return dataclasses.replace(run, prepared=Prepared(given or run.data, {}, ""))
    corpus = options.corpus_root if given is None and recipe.data.recipe in EMBEDDED else None
    root = prepared_folder(dataclasses.asdict(recipe.data), corpus or given, options.data_root)
    prepared = Prepared(root / "binarised", {}, "")
    return dataclasses.replace(run, prepared=prepared, root=root, corpus=corpus)


def planned_commands(recipe: Recipe, hardware: Hardware, options: Options) -> List[List[str]]:
    """Every command of the wanted stages; nothing is written."""
    return [step.command for step in steps(plan_run(recipe, hardware, options)) if options.wants(step.stage)]


def run_recipe(
    recipe: Recipe,
    hardware: Hardware,
    options: Options,
    executor_class: Callable[..., Executor] = Executor,
) -> Optional[Path]:
    """Carry out the wanted stages. Returns the path of result.json when the recipe was scored.

    Raises UserError; what was finished before stays and is not done again next time.
    """
    folder = run_folder_of(recipe, options)
    if options.record and options.stage != "train" and not (options.wants("score") and recipe.score):
        why = f"--stage {options.stage} does not score" if recipe.score else "the recipe has no score section"
        raise UserError(f"--record copies a scored result, but {why}: leave --record out.")
    if options.restart and folder.exists():
        with locked(folder):  # nobody may be at work in it
            pass
        log.info("%s moved to %s", folder, move_aside(folder))
    if hardware.shared:
        _check_shared(options, folder)
    started = time.time()
    with terminate_as_interrupt(), contextlib.ExitStack() as stack:
        if hardware.leads:
            stack.enter_context(locked(folder, HANDOVER_SECONDS if hardware.shared else PATIENCE_SECONDS))
        executor = executor_class(hardware.environment)
        run = _train(plan_run(recipe, hardware, options), options, executor)
        return _evaluate(run, options, started) if hardware.leads else None


def _check_shared(options: Options, folder: Path) -> None:
    """Several programs train together; anything else is for one of them alone. Raises UserError."""
    if options.stage != "train":
        raise UserError(
            "Several machines (or torchrun's processes) can share the train stage only, not --stage "
            f"{options.stage}: run --stage prepare on one of them first, then --stage train on all, then the "
            "other stages on one. The scripts in scripts/launch/ do so."
        )
    if options.restart:
        raise UserError("--restart moves the run folder aside under the others: give it to --stage prepare.")
    known = RunState(folder).get("prepare")
    if not known:
        raise UserError(
            f"No prepared data is known in {folder}: run --stage prepare with the same --save-dir first. The "
            "folder must be on a file system that all machines share."
        )
    if options.data and str(options.data.resolve()) not in (known.get("source"), known.get("folder")):
        raise UserError(f"{folder} was prepared from {known.get('source')}, not from --data {options.data}.")


def _train(run: Run, options: Options, executor: Executor) -> Run:
    """Prepare the data, or recall it, and train on it; returns the run with all that is known then."""
    run.executor = executor
    recipe, leads = run.recipe, run.hardware.leads
    recall = not options.wants("prepare") and (options.data is None or run.hardware.shared)
    prepared = _recall_prepared(run) if recall or not leads else _prepare(run, options)
    if leads:
        recipe = on_the_rows_data(recipe, prepared.folder, prepared.sentences)
    recipe = with_floor(recipe, prepared.folder)
    hardware, fewer = fit_devices(recipe, run.hardware)
    if fewer and leads and options.wants("train"):
        log.info(fewer)
    executor.environment.update(hardware.environment)
    run = dataclasses.replace(run, recipe=recipe, hardware=hardware, prepared=prepared)
    if options.wants("train"):
        carry_out_training(run, next((step for step in steps(run) if step.stage == "train"), None))
    elif options.stage != "prepare":
        check_trained(run)
    return run


def _evaluate(run: Run, options: Options, started: float) -> Optional[Path]:
    """The steps after training, and result.json where scores are among them."""
    recipe = run.recipe
    # Written after `train` has agreed to the settings: a refused run must not overwrite the old copy.
    if options.stage != "prepare" or not run.state.get("train"):
        mapping = dataclasses.asdict(recipe)
        if run.state.get("train") and not trained_as_the_recipe_says(run):
            mapping["reproduces"] = None  # a training that ended elsewhere stands for no row of a paper
        with atomic_write(run.folder / "recipe.yaml") as stream:
            yaml.safe_dump(mapping, stream, sort_keys=False, allow_unicode=True)
    if options.stage == "train" and options.record:
        write_throughput(run, options.record, options.command_line)
        log.info("speed recorded as %s", options.record)
    if options.stage in ("average", "generate", "score") and not getattr(recipe, options.stage):
        log.info("%s: the recipe has no %s section; there is nothing to do", options.stage, options.stage)
    after = [step for step in steps(run) if isinstance(step, OutputStep) and options.wants(step.stage)]
    for step in after:
        carry_out(run, step)
    scores = scores_of(after)
    if not scores:
        return None
    result = write_result(run, scores, options.command_line)
    text = result.read_text(encoding="utf-8")
    said = describe(recipe, scores, json.loads(text)["reproduces"])
    log.info("%s: %s (%.0f s)", result, said, time.time() - started)
    if options.record:
        options.record.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(options.record) as stream:
            stream.write(text)
        log.info("recorded as %s", options.record)
    return result


def scores_of(done: List[OutputStep]) -> Dict[str, Any]:
    """subset → its scores, of the scoring steps among those that were carried out."""
    return {
        step.name.removeprefix("score-"): read_scores(step.output) for step in done if step.stage == "score"
    }


def _prepare(run: Run, options: Options) -> Prepared:
    """Do the prepare stage: what was done before is found again."""
    recipe, settings, known = run.recipe, dataclasses.asdict(run.recipe.data), run.state.get("prepare")
    given = options.data or run.corpus or (Path(known["source"]) if known.get("source") else None)
    if run.corpus:  # a second time that is a no-op
        command = steps(run)[0].command
        run.show(command)
        run.executor.run(
            command, run.log("corpus"), errors_too=True, on_line=lambda line: log.info("  %s", line)
        )
    source = require_source(settings, given)
    root = run.root or prepared_folder(settings, source, options.data_root)

    def preprocess(flags: Mapping[str, Any]) -> None:
        command = ["fairseq-preprocess", *command_line.flags(flags)]
        # What is shown writes to the final folder; what runs writes beside it, to be renamed when whole.
        run.show([word.replace("binarised.partial", "binarised") for word in command])
        run.executor.run(command, root / "preprocess.log")

    # Two runs of one data set may start together: the second one waits and finds everything done.
    with locked(root, patience=math.inf):
        downloads = options.data_root / "downloads"
        prepared = Preparation(settings, recipe.splits, source, root, preprocess, downloads).run()
    run.state.put(
        "prepare",
        folder=str(prepared.folder.resolve()),
        sentences=prepared.sentences,
        fingerprint=prepared.fingerprint,
        source=str(source.resolve()) if source else None,
        settings={key: settings[key] for key in (settings if run.root else BINARISED_KEYS)},
    )
    return prepared


def _recall_prepared(run: Run) -> Prepared:
    """The data that an earlier prepare stage made. Raises UserError when the recipe now asks for other."""
    known, now = run.state.get("prepare"), dataclasses.asdict(run.recipe.data)
    if not known or not Path(known["folder"]).is_dir():
        raise UserError(
            f"No prepared data is known in {run.folder}: run --stage prepare first, or give --data."
        )
    settings = known.get("settings", {})
    changed = changes(settings, {key: now.get(key) for key in settings}, "data.")
    sentences = known.get("sentences", {})
    changed += [f"subset {name} is new" for name in run.recipe.splits if name not in sentences]
    if changed:
        raise UserError(
            f"The data of {run.folder} was prepared with other settings ({'; '.join(changed)}): run "
            "--stage prepare (or --stage all) with the new ones first."
        )
    return Prepared(Path(known["folder"]), sentences, known["fingerprint"])
