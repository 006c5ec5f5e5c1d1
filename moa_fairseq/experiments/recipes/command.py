"""Run one experiment: prepare its data, train, average, translate and score, as its YAML file says.

  moa-fairseq recipe multi30k_ende_moa_tiny --data multi30k/data/task1/raw
  moa-fairseq recipe wmt14_ende_moa_base --dry-run --gpus 8
  moa-fairseq recipe quickstart_moa --set train.max_epoch=2 --save-dir runs/try

Prints the plain fairseq commands that it runs; they also stand in <save-dir>/commands.sh, which makes the
same run again in another folder. Run the same line again after an interruption: finished stages are
skipped, training goes on from its last checkpoint. --gpus says how many GPUs to use (all that torch sees;
0: the CPU); --update-freq follows, so that one update has the recipe's number of tokens on any machine.

  moa-fairseq recipe wmt14_ende_moa_big --plan                    what it will cost
  bash scripts/launch/slurm.sh --help                  Slurm; multinode.sh and torchrun.sh beside it
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

import moa_fairseq
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import Prepared, is_binarised
from moa_fairseq.experiments.data.obtain import require_source
from moa_fairseq.experiments.data.prepare import Preparation, prepared_folder
from moa_fairseq.experiments.make import COMMANDS, Step, changes, keep_command, make, put_mark
from moa_fairseq.experiments.recipes.batch import (
    fit,
    plan_batch,
    planned_updates,
    schedule_warning,
    sentence_sizes,
    training_set,
)
from moa_fairseq.experiments.recipes.checkpoints import LAST, finetuned, prepare_facts, prepared_data
from moa_fairseq.experiments.recipes.ending import check_ending, check_files
from moa_fairseq.experiments.recipes.hardware import (
    DEVICES,
    Hardware,
    assumed_hardware,
    check_sharding,
    choose_devices,
    detect_hardware,
    find_world,
)
from moa_fairseq.experiments.recipes.lengths import check_sentences
from moa_fairseq.experiments.recipes.loading import check_flags, find_recipe, load_recipe
from moa_fairseq.experiments.recipes.result import data_differences, differences, record, settings
from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.experiments.recipes.steps import Options, Run, steps
from moa_fairseq.files import atomic_write
from moa_fairseq.process import (
    PATIENCE_SECONDS,
    Executor,
    environment_of_a_child,
    flags,
    locked,
    terminate_as_interrupt,
    to_shell,
)

STAGES = ("prepare", "train", "average", "generate", "score")
# Data recipes that need no --data: `moa-fairseq corpus` makes it.
EMBEDDED = ("embedded", "embedded_gpt2bpe")
# After a restart of torchrun, the program that kept the run folder before may take its time to go.
HANDOVER_SECONDS = 60.0
# What a binarised folder depends on of the recipe's data section; the rest is of no effect there.
BINARISED_KEYS = ("source", "target", "joined_dictionary")
log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `moa-fairseq recipe`."""
    add = parser.add_argument
    add("config", type=Path, help="the experiment's YAML file, or the name of one in configs/")
    add("--stage", choices=[*STAGES, "all"], default="all", help="one stage only (default: all)")
    add("--dry-run", action="store_true", help="print the commands and do nothing")
    add(
        "--plan",
        action="store_true",
        help=f"print parameters, MACs, updates, memory and hours for {', '.join(DEVICES)} "
        "(or --gpus N --device-name NAME), and do nothing; sizes are measured where --data is binarised",
    )
    add("--json", action="store_true", help="with --plan: print JSON")
    add("--gpus", type=int, metavar="N", help="how many GPUs to use; 0 for the CPU (default: all)")
    add(
        "--device-name",
        choices=sorted(DEVICES),
        help="for --dry-run and --plan: the kind of GPU, which need not be at hand",
    )
    add("--nodes", type=int, metavar="N", help="how many machines train together (default: 1)")
    add("--node-rank", type=int, metavar="R", help="this machine's number, from 0")
    add("--master", metavar="HOST[:PORT]", help="machine number 0, as the others reach it")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="raw data or archives as the recipe's data section wants them (what is public and lacking is "
        "downloaded to data/downloads), or a folder made by fairseq-preprocess or `moa-fairseq prepare`",
    )
    add("--save-dir", type=Path, metavar="DIR", help="run folder (default: runs/<experiment>)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one value of the YAML file, e.g. train.max_epoch=5; may be repeated",
    )
    add(
        "--seeds",
        metavar="N,N,...",
        help="one run after another, each with its seed (train.seed) and a folder and record of its own",
    )
    add(
        "--user-dir",
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="a fairseq plugin of your own, which imports moa_fairseq: every command of the run gets it",
    )
    add(
        "--restart",
        action="store_true",
        help="move an existing run folder aside and start from the beginning",
    )
    add(
        "--record",
        nargs="?",
        const="",
        metavar="NAME",
        help="copy result.json to results/measured/NAME.json beside configs/ or an own recipe (default: the "
        "experiment); with --stage train, write the speed to results/throughput/NAME.json, for --plan",
    )


def run(args: argparse.Namespace) -> int:
    """Run one recipe, with each of --seeds, or tell what it would do. Returns the exit status."""
    config = find_recipe(args.config)
    headlines = []
    for one in [args] if args.seeds is None else _with_seeds(args, config.stem):
        if result := _run_once(one, config):
            values = json.loads(result.read_text(encoding="utf-8"))
            headlines.append(values["metrics"][values["headline"]])
    if len(headlines) > 1 and None not in headlines:  # None: a model that diverged
        mean = statistics.mean(headlines)
        deviation = statistics.stdev(headlines)
        log.info("seeds %s: %.2f, standard deviation %.2f", args.seeds, mean, deviation)
    return 0


def _with_seeds(args: argparse.Namespace, experiment: str) -> Iterator[argparse.Namespace]:
    """The arguments of one run for each of --seeds, with a folder and a record of its own."""
    try:
        seeds = dict.fromkeys(map(int, args.seeds.split(",")))
    except ValueError:
        raise UserError(f"--seeds {args.seeds}: write whole numbers with commas, such as 1,2,3.") from None
    if args.plan or args.stage != "all":
        raise UserError("--seeds goes through all stages: leave --plan and --stage out.")
    folder = args.save_dir or Path("runs") / experiment
    for seed in seeds:
        own = {"overrides": [*args.overrides, f"train.seed={seed}"], "save_dir": Path(f"{folder}_seed{seed}")}
        if args.record is not None:
            own["record"] = f"{args.record or experiment}_seed{seed}"
        yield argparse.Namespace(**{**vars(args), **own})


def _run_once(args: argparse.Namespace, config: Path) -> Path | None:
    """Run or show one recipe, or print its plan. Returns result.json where it was scored."""
    # The row of a paper is that of the file, with whatever it is fine-tuned from.
    kept = [text for text in args.overrides if text.partition("=")[0].strip() in ("finetune", "pretrained")]
    recipe = load_recipe(config, args.overrides)
    row = load_recipe(config, kept)
    if recipe.finetune:
        recipe = finetuned(recipe)
        row = finetuned(row)
    folder = args.save_dir or Path("runs") / recipe.experiment
    if ":" in str(folder):
        why = "fairseq takes a ':' in the path of a model for the end of that path"
        raise UserError(f"--save-dir {folder} cannot be used: {why}. Give the folder another name or place.")
    if args.json and not args.plan:
        raise UserError("--json goes with --plan.")
    if args.device_name and not (args.dry_run or args.plan):
        raise UserError("--device-name goes with --dry-run or --plan: a run uses the GPUs it has.")
    if args.device_name:
        hardware = assumed_hardware(args.device_name, args.gpus)
    else:
        hardware = choose_devices(detect_hardware(), args.gpus, args.dry_run or args.plan)
    world = find_world(hardware.gpus, args.nodes, args.node_rank, args.master)
    hardware = dataclasses.replace(hardware, world=world)
    check_sharding(recipe, hardware)
    if args.user_dir:
        plugin = Path(args.user_dir).absolute()
    else:
        plugin = None
    if plugin:
        _check_plugin(plugin)
    training = check_flags(recipe)
    data = args.data
    if data and is_binarised(data / "binarised"):  # where `moa-fairseq prepare` made it
        data = data / "binarised"
    # beside configs/, or beside a recipe that lies elsewhere
    own = config.resolve().parents
    results = next((place.parent for place in own if place.name == "configs"), own[0]) / "results"
    if args.plan:
        from moa_fairseq.experiments.recipes import planner

        machines = [hardware]
        if not hardware.gpus and args.gpus is None:  # none here, and no wish: every kind
            machines = [assumed_hardware(name, n) for name, device in DEVICES.items() for n in device.counts]
        data = data or prepared_data(folder)
        report = planner.plan(recipe, data if data and is_binarised(data) else None, machines, results)
        head = f"{recipe.experiment}: {recipe.summary}"
        print(json.dumps(report, indent=1) if args.json else f"{head}\n{planner.as_text(report)}")
        return None
    installed = Path(moa_fairseq.__file__).resolve().parent in results.parents
    if args.stage == "train":
        kind = "throughput"
    else:
        kind = "measured"
    copy = (Path("results") if installed else results) / kind / f"{args.record or config.stem}.json"
    here = str(Path.cwd()) + os.sep  # scripts/ name configs in full
    given = {"data": args.data and args.data.absolute(), "save-dir": folder, "gpus": args.gpus}
    preparing = ["moa-fairseq", *flags({"user-dir": plugin}), "recipe", str(config.absolute())]
    preparing += [*flags({**given, "stage": "prepare"}), *(f"--set={text}" for text in args.overrides)]
    options = Options(
        stage=args.stage,
        data=data,
        save_dir=folder,
        restart=args.restart,
        user_dir=plugin,
        record=None if args.record is None else copy,
        command_line=shlex.join(["moa-fairseq", *(word.removeprefix(here) for word in sys.argv[1:])]),
        preparation=shlex.join(preparing),
        published=row if recipe.reproduces else None,
        training=training,
    )
    log.info("%s: %s\nhardware: %s", recipe.experiment, recipe.summary, hardware.describe())
    return run_recipe(recipe, hardware, options, dry_run=args.dry_run)


def _check_plugin(user_dir: Path) -> None:
    """Raise UserError unless fairseq, given this folder as --user-dir, imports moa_fairseq along with it."""
    code = (
        "import argparse, sys; from fairseq.utils import import_user_module; "
        "import_user_module(argparse.Namespace(user_dir=sys.argv[1])); print('moa_fairseq' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(user_dir)]
    environment = environment_of_a_child()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.stdout.split()[-1:] != ["True"]:
        if done.returncode:
            why = done.stderr.splitlines()[-1]
        else:
            why = "it does not import this package"
        problem = f"--user-dir {user_dir} cannot stand for this package in fairseq's commands: {why}"
        raise UserError(f"{problem}. Write `import moa_fairseq` at the top of its __init__.py.")


def run_recipe(
    recipe: Recipe,
    hardware: Hardware,
    options: Options,
    executor_class: Callable[..., Executor] = Executor,
    dry_run: bool = False,
) -> Path | None:
    """Carry out the wanted stages, or show their commands. Returns result.json when the recipe was scored.

    Raises UserError; what was finished before stays and is not done again next time.
    """
    folder = options.save_dir or Path("runs") / recipe.experiment
    run = Run(recipe, hardware, folder, options)
    executor = executor_class(hardware.environment)
    if options.record and options.stage != "train" and not (options.wants("score") and recipe.score):
        if recipe.score:
            why = f"--stage {options.stage} does not score"
        else:
            why = "the recipe has no score section"
        raise UserError(f"--record copies a scored result, but {why}: leave --record out.")
    if options.stage in STAGES[2:] and not getattr(recipe, options.stage):
        log.info("%s: the recipe has no %s section; there is nothing to do", options.stage, options.stage)

    def wanted(step: Step) -> bool:
        return options.wants(step.name.partition("-")[0])

    if dry_run:
        run = _fitted(run, _prepared(run, executor, dry_run=True))
        executor.environment = run.hardware.environment
        make(steps(run), folder, executor=executor, dry_run=True, wanted=wanted)
        return None
    if options.restart and folder.exists():
        with locked(folder):  # nobody may be at work in it
            pass
        number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.old-{n}").exists())
        log.info("%s moved to %s", folder, folder.rename(folder.with_name(f"{folder.name}.old-{number}")))
    if hardware.shared:
        _check_shared(run)
    if options.wants("train"):
        check_files(recipe, first_start=not (recipe.finetune or (run.checkpoints / LAST).exists()))
    started = time.time()
    if hardware.shared:
        patience = HANDOVER_SECONDS
    else:
        patience = PATIENCE_SECONDS
    with terminate_as_interrupt(), locked(folder, patience) if hardware.leads else contextlib.nullcontext():
        recall = not options.wants("prepare") and (options.data is None or hardware.shared)
        run = _fitted(run, _recalled(run) if recall or not hardware.leads else _prepared(run, executor))
        executor.environment.update(run.hardware.environment)
        if recipe.training_flags.get("wandb-project"):
            executor.environment["WANDB_DIR"] = str(folder)
        if (world := hardware.world) and world.rank:  # of another program's run: writes nothing but a log
            command = next(step.command for step in steps(run) if step.name == "train")
            name = f"train.process{world.rank}"
            log.info("$ %s", to_shell(command, executor.environment))
            executor.run(command, folder / f"{name}.log")
            log.info("%s is done; the machine of process 0 has the results", name)
            return None
        if not any(run.checkpoints.glob("*.pt")):  # the log of a training that left nothing to go on from
            (folder / "train.jsonl").unlink(missing_ok=True)
        if options.stage != "prepare":
            make(steps(run), folder, executor=executor, wanted=wanted)
        with atomic_write(folder / "recipe.yaml") as stream:
            mapping = {**dataclasses.asdict(recipe), "reproduces": None}  # which result.json tells
            yaml.safe_dump(mapping, stream, sort_keys=False, allow_unicode=True)
        return record(run, started)


def _fitted(run: Run, prepared: Prepared) -> Run:
    """The run on its data, on as many devices as can share an update; says what follows from the data."""
    if prepared.folder.is_dir():
        known = prepared.folder
    else:
        known = None
    recipe, hardware, fewer = fit(run.recipe, run.hardware, known)
    run = dataclasses.replace(run, recipe=recipe, hardware=hardware, prepared=prepared)
    cell = recipe.reproduces
    options = run.options
    sentences = prepared.sentences
    if not hardware.leads:
        return run
    if known and options.training:
        check_sentences(recipe, options.training, known)
    if options.wants("train") and recipe.finetune != "noft":
        if fewer:
            log.warning(fewer)
        if recipe.train.precision == "amp" and not hardware.gpus and not hardware.bfloat16_units:
            log.warning(
                "train.precision amp: this processor has no units for bfloat16, and trains many times as "
                "fast with --set train.precision=fp32"
            )
        batch = plan_batch(recipe.train, hardware.devices)
        log.info(batch.describe())
        if known:
            check_ending(recipe, batch, known)
        if options.training:
            if recipe.train.max_epoch:
                size = training_set(recipe, known)
            else:
                size = None
            if warning := schedule_warning(options.training, planned_updates(recipe.train, batch, size)):
                log.info(warning)
        if world := hardware.world:
            log.info("train: process %s of %s, meeting at %s", world.rank, world.size, world.init_method)
    if known and cell and options.published:
        if not sentences:
            with contextlib.suppress(UserError):
                sentences = {split: len(sentence_sizes(recipe, known, split)[0]) for split in recipe.splits}
        row = f"{cell.paper}, table {cell.table}, {cell.row}, {cell.column}: {cell.value}"
        done = settings(recipe)
        data = data_differences(options.published, known, sentences, claim=True)
        if found := differences(options.published, done, data):
            log.warning("this run does not stand for %s: %s", row, "; ".join(found[:5]))
        else:
            log.info("stands for %s", row)
    elif known and options.data and (other := data_differences(recipe, known, {})):
        log.warning("%s is not what the recipe says: %s", known, "; ".join(map(": ".join, other.items())))
    return run


def _check_shared(run: Run) -> None:
    """Several programs train together; anything else is for one of them alone. Raises UserError."""
    folder = run.folder
    options = run.options
    if options.stage != "train":
        raise UserError(
            f"--stage {options.stage}: several processes share the train stage only. Run --stage prepare on "
            "one machine, --stage train on all, the others on one, as scripts/launch/ does."
        )
    if options.restart:
        raise UserError("--restart moves the run folder aside under the others: give it to --stage prepare.")
    known = prepare_facts(folder)
    if not known:
        raise UserError(
            f"No prepared data is known in {folder}, which all machines must share: run --stage prepare with "
            "the same --save-dir first."
        )
    if options.data and str(options.data.resolve()) not in (known.get("source"), known.get("folder")):
        raise UserError(f"{folder} was prepared from {known.get('source')}, not from --data {options.data}.")


def _prepared(run: Run, executor: Executor, dry_run: bool = False) -> Prepared:
    """The prepare stage; what was done before is found again. dry_run: its commands are shown."""
    options = run.options
    commands = run.folder / COMMANDS
    data = dataclasses.asdict(run.recipe.data)
    if run.folder.exists():
        before = prepare_facts(run.folder)
    else:
        before = {}
    source = options.data or (Path(before["source"]) if before.get("source") else None)
    corpus_root = options.data_root / "embedded_en_de"
    embedded = data["recipe"] in EMBEDDED and source in (None, corpus_root)
    source = corpus_root if embedded else source
    root = prepared_folder(data, source, options.data_root)
    downloads = options.data_root / "downloads"
    places: dict[str, Any] = {"downloads": downloads, "commands": commands, "unread": dry_run}
    places["whole"] = options.preparation
    job = Preparation(data, run.recipe.splits, source, root, executor, **places)
    corpus = ["moa-fairseq", "corpus", "--output", str(source)]
    if dry_run:
        if data["recipe"] == "binarised" or (source and is_binarised(source)):
            return Prepared(source or Path("DATA-BIN"), {}, "")
        if options.wants("prepare"):
            if embedded:
                first = [Step("corpus", corpus_root, corpus)]
            else:
                first = []
            whole = options.preparation
            make([*first, *job.steps()], root, executor=executor, dry_run=True, whole=whole)
        if before and not options.data:
            done = prepared_data(run.folder)
        else:
            done = None
        return Prepared(done or root / "binarised", {}, "")
    require_source(data, source)
    if embedded:  # a second time that does nothing
        shown = to_shell(corpus, executor.environment)
        log.info("$ %s", shown)
        keep_command(shown, commands)
        said: Callable[[str], None] = lambda line: log.info("  %s", line)  # noqa: E731
        executor.run(corpus, run.folder / "corpus.log", errors_too=True, on_line=said)
    prepared = job.run()
    facts = {
        "folder": str(prepared.folder.resolve()),
        "sentences": prepared.sentences,
        "fingerprint": prepared.fingerprint,
        "source": str(source.resolve()) if source else None,
        "settings": {key: data[key] for key in (data if prepared.folder.parent == root else BINARISED_KEYS)},
    }
    put_mark(run.folder, "prepare", inputs={}, facts=facts)
    return prepared


def _recalled(run: Run) -> Prepared:
    """The data that an earlier prepare stage made. Raises UserError when the recipe now asks for other."""
    folder = run.folder
    known = prepare_facts(run.folder)
    now = dataclasses.asdict(run.recipe.data)
    place = prepared_data(folder)
    if "sentences" not in known or place is None:
        raise UserError(f"No prepared data is known in {folder}: run --stage prepare first, or give --data.")
    settings = known.get("settings", {})
    sentences = known["sentences"]
    changed = changes(settings, {key: now.get(key) for key in settings}, "data.")
    found = [f"{key}: {change}" for key, change in changed.items()]
    found += [f"subset {name} is new" for name in run.recipe.splits if name not in sentences]
    if found:
        problem = f"The data of {folder} was prepared with other settings ({'; '.join(found)})"
        raise UserError(f"{problem}: run --stage prepare with the new ones first.")
    return Prepared(place, sentences, known["fingerprint"])
