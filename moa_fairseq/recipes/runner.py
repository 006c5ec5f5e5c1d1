"""From a recipe to result.json: the data, the run folder, and each step of the list."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import yaml

from moa_fairseq.data_prep.binarised import Prepared, is_binarised
from moa_fairseq.data_prep.obtain import require_source
from moa_fairseq.data_prep.prepare import Preparation, prepared_folder
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write
from moa_fairseq.json_files import is_number
from moa_fairseq.recipes import claim
from moa_fairseq.recipes.batch import fit, plan_batch, planned_updates, sentence_sizes, training_set
from moa_fairseq.recipes.finetune import prepared_data
from moa_fairseq.recipes.flags import schedule_warning
from moa_fairseq.recipes.hardware import Hardware, precision_name
from moa_fairseq.recipes.result import describe, flat_metrics, scores_in, write_record
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.recipes.steps import Run, steps
from moa_fairseq.recipes.train_log import summarise
from moa_fairseq.running.command_line import to_shell
from moa_fairseq.running.folder_lock import PATIENCE_SECONDS, locked
from moa_fairseq.running.make import COMMANDS, Step, make, refuse_other_inputs
from moa_fairseq.running.process import Executor, terminate_as_interrupt
from moa_fairseq.running.state import changes, keep_command, marks, put_mark

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
    """What the command line says beside the recipe. command_line: for result.json. user_dir: as of Run.

    published: the recipe without any --set, which may stand for a row of a paper. training: what fairseq
    makes of the training's flags, for a look at its schedule.
    """

    stage: str = "all"
    data: Optional[Path] = None
    save_dir: Optional[Path] = None
    restart: bool = False
    record: Optional[Path] = None
    command_line: str = ""
    user_dir: Optional[Path] = None
    data_root: Path = Path("data")
    corpus_root: Path = Path("data") / "embedded_en_de"
    published: Optional[Recipe] = None
    training: Any = None

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


def run_recipe(
    recipe: Recipe,
    hardware: Hardware,
    options: Options,
    executor_class: Callable[..., Executor] = Executor,
    dry_run: bool = False,
) -> Optional[Path]:
    """Carry out the wanted stages, or show their commands. Returns result.json when the recipe was scored.

    Raises UserError; what was finished before stays and is not done again next time.
    """
    folder, executor = run_folder_of(recipe, options), executor_class(hardware.environment)
    if options.record and options.stage != "train" and not (options.wants("score") and recipe.score):
        why = f"--stage {options.stage} does not score" if recipe.score else "the recipe has no score section"
        raise UserError(f"--record copies a scored result, but {why}: leave --record out.")
    if dry_run:
        prepared = _assumed(recipe, folder, options, executor)
        run = _fitted(recipe, hardware, prepared, folder, options)
        executor.environment = run.hardware.environment
        make(_wanted(run, options), folder, executor=executor, dry_run=True)
        return None
    if options.restart and folder.exists():
        with locked(folder):  # nobody may be at work in it
            pass
        number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.old-{n}").exists())
        log.info("%s moved to %s", folder, folder.rename(folder.with_name(f"{folder.name}.old-{number}")))
    if hardware.shared:
        _check_shared(options, folder)
    started, patience = time.time(), HANDOVER_SECONDS if hardware.shared else PATIENCE_SECONDS
    with terminate_as_interrupt(), locked(folder, patience) if hardware.leads else contextlib.nullcontext():
        recall = not options.wants("prepare") and (options.data is None or hardware.shared)
        known = _recalled if recall or not hardware.leads else _prepared
        run = _fitted(recipe, hardware, known(recipe, folder, options, executor), folder, options)
        executor.environment.update(run.hardware.environment)
        if recipe.training_flags.get("wandb-project"):
            executor.environment["WANDB_DIR"] = str(folder)
        wanted = _wanted(run, options)
        if not hardware.leads:  # a process of another program's run: nothing is written but a log
            _follow(run, wanted[0], executor)
            return None
        first = steps(run)[:1]
        if options.stage != "prepare" and first and first[0].in_place:
            refuse_other_inputs(first[0], folder)
        if not any(run.checkpoints.glob("*.pt")):  # the log of a training that left nothing to go on from
            (folder / "train.jsonl").unlink(missing_ok=True)
        make(wanted, folder, executor=executor)
        with atomic_write(folder / "recipe.yaml") as stream:
            mapping = {**dataclasses.asdict(recipe), "reproduces": None}  # which result.json tells
            yaml.safe_dump(mapping, stream, sort_keys=False, allow_unicode=True)
        return _recorded(run, wanted, options, started)


def _wanted(run: Run, options: Options) -> List[Step]:
    recipe = run.recipe
    if options.stage in ("average", "generate", "score") and not getattr(recipe, options.stage):
        log.info("%s: the recipe has no %s section; there is nothing to do", options.stage, options.stage)
    return [step for step in steps(run) if options.wants(step.name.partition("-")[0])]


def _fitted(recipe: Recipe, hardware: Hardware, prepared: Prepared, folder: Path, options: Options) -> Run:
    """The run on as many devices as can share an update; says what follows from the data."""
    known = prepared.folder if prepared.folder.is_dir() else None
    recipe, used, fewer = fit(recipe, hardware, known)
    run = Run(recipe, used, prepared, folder, options.user_dir)
    if not used.leads:
        return run
    cell, published = recipe.reproduces, options.published
    if known and not prepared.sentences:
        with contextlib.suppress(UserError):
            lines = {split: len(sentence_sizes(recipe, known, split)[0]) for split in recipe.splits}
            prepared = dataclasses.replace(prepared, sentences=lines)
    if known and cell and published:
        row = f"{cell.paper}, table {cell.table}, {cell.row}, {cell.column}: {cell.value}"
        data = claim.data_differences(published, known, prepared.sentences)
        found = claim.differences(published, claim.settings(recipe), data)
        if found:
            log.warning("this run does not stand for %s: %s", row, "; ".join(found[:5]))
        else:
            log.info("stands for %s", row)
    if options.wants("train") and recipe.finetune != "noft":
        if fewer:
            log.warning(fewer)
        batch = plan_batch(recipe.train, used.devices)
        log.info(batch.describe())
        if options.training:
            size = training_set(recipe, known) if recipe.train.max_epoch else None
            warning = schedule_warning(options.training, planned_updates(recipe.train, batch, size))
            if warning:
                log.info(warning)
        if used.world:
            log.info("train: %s", used.world.describe())
    return run


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
    known = _known(folder)
    if not known:
        raise UserError(
            f"No prepared data is known in {folder}: run --stage prepare with the same --save-dir first. The "
            "folder must be on a file system that all machines share."
        )
    if options.data and str(options.data.resolve()) not in (known.get("source"), known.get("folder")):
        raise UserError(f"{folder} was prepared from {known.get('source')}, not from --data {options.data}.")


def _follow(run: Run, train: Step, executor: Executor) -> None:
    name = f"train.process{run.hardware.world.rank if run.hardware.world else 0}"
    log.info("$ %s", to_shell(train.command, executor.environment))
    executor.run(train.command, run.folder / f"{name}.log")
    log.info("%s is done; the machine of process 0 has the results", name)


def _known(folder: Path) -> Dict[str, Any]:
    """What an earlier prepare stage left in a run folder; {} where there is none."""
    facts = marks(folder).get("prepare", {}).get("facts")
    return facts if isinstance(facts, dict) and isinstance(facts.get("sentences"), dict) else {}


def _preparation(recipe: Recipe, folder: Path, options: Options, executor: Executor) -> Preparation:
    source = _known(folder).get("source")
    given = options.data or (Path(source) if source else None)
    if given is None and recipe.data.recipe in EMBEDDED:
        given = options.corpus_root
    settings = dataclasses.asdict(recipe.data)
    root, commands = prepared_folder(settings, given, options.data_root), folder / COMMANDS
    downloads = options.data_root / "downloads"
    return Preparation(settings, recipe.splits, given, root, executor, downloads, commands=commands)


def _corpus(job: Preparation, options: Options) -> List[Step]:
    """The embedded corpus, where it is the source."""
    if job.source != options.corpus_root or job.settings["recipe"] not in EMBEDDED:
        return []
    line = ["moa-fairseq", "corpus", "--output", str(job.source)]
    return [Step("corpus", job.source, line)]


def _assumed(recipe: Recipe, folder: Path, options: Options, executor: Executor) -> Prepared:
    """The data of a dry run, after the commands that would make it."""
    job, done = _preparation(recipe, folder, options, executor), prepared_data(folder)
    job = dataclasses.replace(job, unread=True)
    if (job.source and is_binarised(job.source)) or recipe.data.recipe == "binarised":
        return Prepared(job.source or Path("DATA-BIN"), {}, "")
    if options.wants("prepare"):
        make([*_corpus(job, options), *job.steps()], job.root, executor=executor, dry_run=True)
    return Prepared(done if done and not options.data else job.root / "binarised", {}, "")


def _prepared(recipe: Recipe, folder: Path, options: Options, executor: Executor) -> Prepared:
    """Do the prepare stage: what was done before is found again."""
    job = _preparation(recipe, folder, options, executor)
    require_source(job.settings, job.source)
    for step in _corpus(job, options):  # a second time that does nothing
        shown = to_shell(step.command, executor.environment)
        log.info("$ %s", shown)
        keep_command(shown, folder / COMMANDS)
        said: Callable[[str], None] = lambda line: log.info("  %s", line)  # noqa: E731
        executor.run(step.command, folder / "corpus.log", errors_too=True, on_line=said)
    prepared = job.run()
    own = prepared.folder.parent == job.root
    facts = {
        "folder": str(prepared.folder.resolve()),
        "sentences": prepared.sentences,
        "fingerprint": prepared.fingerprint,
        "source": str(job.source.resolve()) if job.source else None,
        "settings": {key: job.settings[key] for key in (job.settings if own else BINARISED_KEYS)},
    }
    put_mark(folder, "prepare", inputs={}, facts=facts)
    return prepared


def _recalled(recipe: Recipe, folder: Path, options: Options, executor: Executor) -> Prepared:
    """The data that an earlier prepare stage made. Raises UserError when the recipe now asks for other."""
    known, now, place = _known(folder), dataclasses.asdict(recipe.data), prepared_data(folder)
    if not known or place is None:
        raise UserError(f"No prepared data is known in {folder}: run --stage prepare first, or give --data.")
    settings, sentences = known.get("settings", {}), known["sentences"]
    changed = changes(settings, {key: now.get(key) for key in settings}, "data.")
    found = [f"{key}: {change}" for key, change in changed.items()]
    found += [f"subset {name} is new" for name in recipe.splits if name not in sentences]
    if found:
        raise UserError(
            f"The data of {folder} was prepared with other settings ({'; '.join(found)}): run "
            "--stage prepare (or --stage all) with the new ones first."
        )
    return Prepared(place, sentences, known["fingerprint"])


def _recorded(run: Run, wanted: List[Step], options: Options, started: float) -> Optional[Path]:
    """result.json where scores are among the steps; the speed, where it is to be recorded."""
    recipe, folder, summary = run.recipe, run.folder, summarise(run.folder / "train.jsonl")
    trained: Dict[str, Any] = marks(folder).get("train", {}).get("facts") or {}
    if options.stage == "train" and options.record:
        from moa_fairseq.recipes.planner import workload

        batch = plan_batch(recipe.train, run.hardware.devices)
        row = {
            "experiment": recipe.experiment,
            "hardware": trained.get("hardware", run.hardware.describe()),
            "precision": precision_name(recipe.train.precision, run.hardware, recipe.model),
            "tokens_per_second": summary["tokens_per_second"],
            "macs_per_target_token": round(workload(recipe, run.prepared.folder).macs_per_target_token),
            "parameters": trained.get("parameters"),
            "max_tokens": batch.max_tokens,
            "update_freq": batch.update_freq,
            "updates": summary["updates"],
        }
        write_record(options.record, row, options.command_line)
        log.info("speed recorded as %s", options.record)
    scored = [step for step in wanted if step.name.startswith("score-")]
    if not scored:
        return None
    scores = {step.name.removeprefix("score-"): scores_in(step.output, recipe) for step in scored}
    subset, cell = recipe.subsets[0], None
    done = claim.settings_made(folder, recipe)
    found: List[str] = []
    if options.published and recipe.reproduces:
        data = claim.data_differences(options.published, run.prepared.folder, run.prepared.sentences)
        found = claim.differences(options.published, done, data)
        cell = None if found else dataclasses.asdict(recipe.reproduces)
    metrics = flat_metrics(scores[subset]) if subset in scores else {}
    metrics.update({key: summary.pop(key) for key in ("valid_ppl",) if key in summary})
    updated = 0 if recipe.finetune == "noft" else trained.get("updated")
    settings = done["evaluation"]
    values = {
        "experiment": recipe.experiment,
        "reproduces": cell,
        **({"differences": found} if found else {}),
        "headline": recipe.score.headline if recipe.score else None,
        "metrics": metrics,
        "subset": subset,
        "other_subsets": {name: flat_metrics(values) for name, values in scores.items() if name != subset},
        "parameters": trained.get("parameters"),
        **({"updated_parameters": updated} if updated is not None else {}),
        **summary,
        "effective_batch_tokens": recipe.train.effective_batch_tokens or recipe.train.max_tokens,
        "checkpoints_averaged": done["averaged"],
        "generation": {key: settings.get(key) for key in ("beam", "lenpen")} if recipe.generate else None,
        "evaluation": scores.get(subset, {}).get("meta", {}).get("evaluation"),
        "seed": recipe.train.seed,
        "hardware": trained.get("hardware", run.hardware.describe()),
    }
    result = write_record(folder / "result.json", values, options.command_line)
    paper = cell["value"] if cell and is_number(cell["value"]) else None
    log.info("%s: %s (%.0f s)", result, describe(recipe, scores, paper), time.time() - started)
    if options.record:
        options.record.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(options.record) as stream:
            stream.write(result.read_text(encoding="utf-8"))
        log.info("recorded as %s", options.record)
    return result
