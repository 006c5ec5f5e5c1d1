"""From a recipe to result.json: which stages run, in which folder, and what is printed on the way."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

import yaml

from moa_fairseq.data_prep.binarised import Prepared, is_binarised, preprocess_calls
from moa_fairseq.data_prep.catalogue import datasets
from moa_fairseq.data_prep.inputs import require_source
from moa_fairseq.data_prep.prepare import Preparation, prepared_folder
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write
from moa_fairseq.recipes import commands, lm_stages, model_scores, stages
from moa_fairseq.recipes.batch_floor import fit_devices, with_floor
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.loading import to_mapping
from moa_fairseq.recipes.result import describe, write_result, write_throughput
from moa_fairseq.recipes.row_data import on_the_rows_data
from moa_fairseq.recipes.run_folder import RunState, move_aside
from moa_fairseq.recipes.schema import CAUSAL_LM, CLASSIFICATION, MASKED_LM, Recipe
from moa_fairseq.recipes.sharing import HANDOVER_SECONDS, check_shared, join_training
from moa_fairseq.running import command_line
from moa_fairseq.running.folder_lock import PATIENCE_SECONDS, locked
from moa_fairseq.running.process import Executor, terminate_as_interrupt

STAGES = ("prepare", "train", "average", "generate", "score")
# Data recipes that need no --data: `moa-fairseq corpus` makes it.
EMBEDDED = ("embedded", "embedded_gpt2bpe")
# These are scored straight from the checkpoint.
SCORERS = {MASKED_LM: model_scores, CAUSAL_LM: lm_stages, CLASSIFICATION: model_scores}
# What a binarised folder depends on of the recipe's data section; the rest is of no effect there.
BINARISED_KEYS = ("source", "target", "joined_dictionary")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says beside the recipe. command_line: for result.json."""

    stage: str = "all"
    data: Optional[Path] = None
    save_dir: Optional[Path] = None
    restart: bool = False
    record: Optional[Path] = None
    command_line: str = ""
    data_root: Path = Path("data")
    corpus_root: Path = Path("data") / "embedded_en_de"

    def wants(self, stage: str) -> bool:
        """True when --stage asks for this stage."""
        return self.stage in (stage, "all")


def user_dir() -> Path:
    """The folder that fairseq's --user-dir takes."""
    import moa_fairseq

    return Path(moa_fairseq.__file__).parent


def save_dir_of(recipe: Recipe, options: Options) -> Path:
    """The run folder: --save-dir, or runs/<experiment>. Raises UserError for one that fairseq would split."""
    folder = options.save_dir or Path("runs") / recipe.experiment
    if ":" in str(folder):
        raise UserError(
            f"--save-dir {folder} cannot be used: fairseq takes a ':' in the path of a model for the end of "
            "one path and the beginning of the next. Give the folder another name, or another place."
        )
    return folder


def prepared_before(recipe: Recipe, save_dir: Optional[Path]) -> Optional[Path]:
    """The binarised folder that a prepare stage of this recipe's run folder made, if there is one."""
    folder = save_dir_of(recipe, Options(save_dir=save_dir))
    known = RunState(folder).get("prepare")
    return Path(known["folder"]) if known and Path(known["folder"]).is_dir() else None


def planned_commands(recipe: Recipe, hardware: Hardware, options: Options) -> List[List[str]]:
    """Every command of the wanted stages, for --dry-run: nothing is written."""
    settings = to_mapping(recipe)["data"]
    given = _is_given(recipe, options.data)
    embedded = options.data is None and recipe.data.recipe in EMBEDDED
    root = prepared_folder(settings, options.corpus_root if embedded else options.data, options.data_root)
    data = (options.data or Path("DATA-BIN")) if given else root / "binarised"
    paths = commands.RunPaths(data, save_dir_of(recipe, options), user_dir())
    planned: List[List[str]] = []
    if options.wants("prepare") and embedded:
        planned.append(_corpus_command(options.corpus_root))
    if options.wants("prepare") and not given:
        planned += _preprocess_commands(recipe, root)
    if options.wants("train") and recipe.finetune != "noft":
        planned.append(commands.train_command(recipe, hardware, paths))
    if options.wants("average") and recipe.average:
        planned.append(commands.average_command(recipe, paths))
    return planned + _planned_evaluation(recipe, hardware, options, paths)


def _planned_evaluation(
    recipe: Recipe, hardware: Hardware, options: Options, paths: commands.RunPaths
) -> List[List[str]]:
    planned: List[List[str]] = []
    scored = options.wants("score") and recipe.score
    if recipe.kind in SCORERS:
        return [
            SCORERS[recipe.kind].score_command(recipe, hardware, paths, subset)
            for subset in (recipe.subsets if scored else [])
        ]
    if options.wants("generate"):
        planned += [commands.generate_command(recipe, hardware, paths, subset) for subset in recipe.subsets]
    if scored:
        planned += [
            commands.score_command(recipe, paths.save_dir / f"generate-{subset}.txt")
            for subset in recipe.subsets
        ]
    return planned


def run_recipe(
    recipe: Recipe,
    hardware: Hardware,
    present: Hardware,
    options: Options,
    executor_class: Callable[..., Executor] = Executor,
    say: Callable[[str], None] = print,
) -> Optional[Path]:
    """Carry out the wanted stages. Returns the path of result.json when the recipe was scored.

    hardware: what the run uses; present: what the machine has. Raises UserError; what was finished
    before stays and is not done again next time.
    """
    folder = save_dir_of(recipe, options)
    if options.record and options.stage != "train" and not (options.wants("score") and recipe.score):
        why = f"--stage {options.stage} does not score" if recipe.score else "the recipe has no score section"
        raise UserError(f"--record copies a scored result, but {why}: leave --record out.")
    if options.restart and folder.exists():
        with locked(folder):  # nobody may be at work in it
            pass
        say(f"{folder} moved to {move_aside(folder)}")
    environment = commands.device_environment(hardware, present)
    world = hardware.world
    if world and world.shared:
        check_shared(options.stage, options.restart, options.data, folder)
    if world and not world.leads:
        prepared = _recall_prepared(recipe, folder, RunState(folder).get("prepare"))
        recipe = with_floor(recipe, prepared.folder)
        fit_devices(recipe, hardware)
        paths = commands.RunPaths(prepared.folder, folder, user_dir())
        with terminate_as_interrupt():
            join_training(recipe, hardware, paths, prepared, executor_class(environment), say)
        return None
    # After a restart of torchrun the one that had the folder before may take its time to go.
    patience = HANDOVER_SECONDS if world and world.shared else PATIENCE_SECONDS
    with terminate_as_interrupt(), locked(folder, patience) as lock:
        executor = executor_class(environment, lock)
        return _run_stages(recipe, hardware, present, options, folder, executor, say)


def _run_stages(
    recipe: Recipe,
    hardware: Hardware,
    present: Hardware,
    options: Options,
    folder: Path,
    executor: Executor,
    say: Callable[[str], None],
) -> Optional[Path]:
    state = RunState(folder)

    def show(command: List[str]) -> None:
        line = command_line.to_shell(command, executor.environment)
        say(f"$ {line}")
        _append_command(folder / "commands.sh", line)

    started = time.time()
    shared = bool(hardware.world and hardware.world.shared)
    prepared = _prepare(recipe, options, folder, state, executor, show, say, shared)
    recipe = on_the_rows_data(recipe, prepared.folder, prepared.sentences, say)
    recipe = with_floor(recipe, prepared.folder)
    hardware, fewer = fit_devices(recipe, hardware)
    if fewer and options.wants("train"):
        say(fewer)
    executor.environment.update(commands.device_environment(hardware, present))
    paths = commands.RunPaths(prepared.folder, folder, user_dir())
    run = stages.Run(recipe, hardware, paths, state, executor, show, say)
    if options.wants("train"):
        stages.train(run, prepared)
    elif options.stage != "prepare":
        stages.check_trained(run, prepared)
    # Written after `train` has agreed to the settings: a refused run must not overwrite the old copy.
    if options.stage != "prepare" or not state.get("train"):
        _write_recipe(run)
    if options.stage == "train" and options.record:
        write_throughput(run, prepared.folder, options.record, options.command_line)
        say(f"speed recorded as {options.record}")
    if options.stage in ("average", "generate", "score") and not getattr(recipe, options.stage):
        say(f"{options.stage}: the recipe has no {options.stage} section; there is nothing to do")
    if options.wants("average") and recipe.average:
        stages.average(run)
    scores = _evaluate(run, prepared, options)
    if not scores:
        return None
    result = write_result(run, scores, options.command_line)
    reproduces = json.loads(result.read_text(encoding="utf-8"))["reproduces"]
    say(f"{result}: {describe(recipe, scores, reproduces)} ({time.time() - started:.0f} s)")
    if options.record:
        options.record.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(options.record) as stream:
            stream.write(result.read_text(encoding="utf-8"))
        say(f"recorded as {options.record}")
    return result


def _write_recipe(run: stages.Run) -> None:
    """Keep the resolved recipe; a training that ended elsewhere than it says stands for no row of a paper."""
    mapping = to_mapping(run.recipe)
    if run.state.get("train") and not stages.trained_as_the_recipe_says(run):
        mapping["reproduces"] = None
    with atomic_write(run.folder / "recipe.yaml") as stream:
        yaml.safe_dump(mapping, stream, sort_keys=False, allow_unicode=True)


def _preprocess_commands(recipe: Recipe, root: Path) -> List[List[str]]:
    """The last step of the preparation, for --dry-run: the steps before it run inside of this program."""
    settings, dataset = to_mapping(recipe)["data"], datasets()[recipe.data.recipe]
    calls = preprocess_calls(settings, dataset, root, root / "binarised", _subsets(recipe))
    return [["fairseq-preprocess", *command_line.flags(flags)] for flags in calls]


def _evaluate(run: stages.Run, prepared: Prepared, options: Options) -> Dict[str, Any]:
    recipe = run.recipe
    scores = {}
    for subset in recipe.subsets:
        if recipe.kind in SCORERS:
            if options.wants("score"):
                scores[subset] = SCORERS[recipe.kind].score(run, prepared, subset)
            continue
        if options.wants("generate"):
            stages.generate(run, prepared, subset)
        if options.wants("score") and recipe.score:
            scores[subset] = stages.score(run, subset)
    return scores


def _prepare(
    recipe: Recipe,
    options: Options,
    folder: Path,
    state: RunState,
    executor: Executor,
    show: Callable[[List[str]], None],
    say: Callable[[str], None],
    shared: bool,
) -> Prepared:
    """Do the prepare stage, or for a later stage alone (or shared with others) recall what it made."""
    known = state.get("prepare")
    if not options.wants("prepare") and (options.data is None or shared):
        return _recall_prepared(recipe, folder, known)
    settings = to_mapping(recipe)["data"]
    given = options.data or (Path(known["source"]) if known.get("source") else None)
    if given is None and recipe.data.recipe in EMBEDDED:
        given = _embedded_corpus(options.corpus_root, folder, executor, show)
    source = require_source(settings, given)
    root = prepared_folder(settings, source, options.data_root)

    def preprocess(flags: Mapping[str, Any]) -> None:
        command = ["fairseq-preprocess", *command_line.flags(flags)]
        # What is shown writes to the final folder; what runs writes beside it, to be renamed when whole.
        show([word.replace("binarised.partial", "binarised") for word in command])
        executor.run(command, root / "preprocess.log")

    # Two runs of one data set may start together: the second one waits and finds everything done.
    with locked(root, patience=math.inf, say=say):
        downloads = options.data_root / "downloads"
        prepared = Preparation(settings, _subsets(recipe), source, root, preprocess, downloads).run()
    used = BINARISED_KEYS if _is_given(recipe, source) else settings
    state.put(
        "prepare",
        folder=str(prepared.folder.resolve()),
        sentences=prepared.sentences,
        fingerprint=prepared.fingerprint,
        source=str(source.resolve()) if source else None,
        settings={key: settings[key] for key in used},
    )
    return prepared


def _recall_prepared(recipe: Recipe, folder: Path, known: Mapping[str, Any]) -> Prepared:
    """The data that an earlier prepare stage made. Raises UserError when the recipe now asks for other."""
    if not known or not Path(known["folder"]).is_dir():
        raise UserError(f"No prepared data is known in {folder}: run --stage prepare first, or give --data.")
    now = to_mapping(recipe)["data"]
    changed = [
        f"data.{key}: {value} → {now.get(key)}"
        for key, value in known.get("settings", {}).items()
        if now.get(key) != value
    ]
    changed += [
        f"subset {name} is new" for name in _subsets(recipe) if name not in known.get("sentences", {})
    ]
    if changed:
        raise UserError(
            f"The data of {folder} was prepared with other settings ({'; '.join(changed)}): run "
            "--stage prepare (or --stage all) with the new ones first."
        )
    return Prepared(Path(known["folder"]), known["sentences"], known["fingerprint"])


def _subsets(recipe: Recipe) -> List[str]:
    return list(dict.fromkeys(["train", "valid", *recipe.subsets]))


def _is_given(recipe: Recipe, data: Optional[Path]) -> bool:
    """True when the data is used as fairseq-preprocess left it."""
    return recipe.data.recipe == "binarised" or (data is not None and is_binarised(data))


def _embedded_corpus(root: Path, folder: Path, executor: Executor, show: Callable[[List[str]], None]) -> Path:
    """Have `moa-fairseq corpus` build the embedded corpus; a second time that is a no-op."""
    command = _corpus_command(root)
    show(command)
    executor.run(
        command, folder / "corpus.log", errors_too=True, on_line=lambda line: print(f"  {line}", flush=True)
    )
    return root


def _corpus_command(root: Path) -> List[str]:
    return ["moa-fairseq", "corpus", "--output", str(root)]


def _append_command(path: Path, line: str) -> None:
    """Add a command to commands.sh unless it stands there (a resumed run repeats it)."""
    lines: List[str] = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines:
        lines = ["#!/usr/bin/env bash", "# What this run executed, in order.", "set -euo pipefail"]
    if line not in lines:
        with atomic_write(path) as stream:
            stream.write("\n".join([*lines, line]) + "\n")
