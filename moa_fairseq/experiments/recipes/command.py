"""Run one experiment from its YAML file: prepare its data, train, average, translate and score.

  moa-fairseq recipe multi30k_ende_moa_tiny --data multi30k/data/task1/raw
  moa-fairseq recipe wmt14_ende_moa_base --dry-run --gpus 8
  moa-fairseq recipe quickstart_moa --set train.max_epoch=2 --save-dir runs/try

Prints the plain fairseq commands that it runs, and saves them in <save-dir>/commands.sh, which repeats the
run in another folder. After an interruption run the same command again: finished stages are
skipped, and training resumes from its last checkpoint. --gpus sets the number of GPUs (default: all visible;
0: the CPU); --update-freq follows, so that an update has the recipe's number of tokens on any machine.

  moa-fairseq recipe wmt14_ende_moa_big --plan                    what it will cost
  bash scripts/launch/slurm.sh --help                  Slurm; multinode.sh and torchrun.sh are next to it
"""

import argparse
import dataclasses
import json
import logging
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import moa_fairseq
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import is_binarised
from moa_fairseq.experiments.recipes.checkpoints import finetuned, prepared_data
from moa_fairseq.experiments.recipes.flags import check_flags
from moa_fairseq.experiments.recipes.hardware import (
    DEVICES,
    Hardware,
    assumed_hardware,
    choose_devices,
    detect_hardware,
    find_world,
)
from moa_fairseq.experiments.recipes.loading import (
    find_recipe,
    load_recipe,
    row_overrides,
)
from moa_fairseq.experiments.recipes.precision import check_parallel_flags
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.running import STAGES, run_recipe
from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.process import environment_of_a_child, flags

ALL_ROWS = "all"  # the value of --row for all rows
log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `moa-fairseq recipe`."""
    add = parser.add_argument
    add(
        "config", type=Path, help="YAML file of the experiment, or the name of a recipe in configs/"
    )
    add("--stage", choices=[*STAGES, "all"], default="all", help="one stage only (default: all)")
    add("--dry-run", action="store_true", help="print the commands and do nothing")
    add(
        "--plan",
        action="store_true",
        help=f"print parameters, MACs, updates, memory and hours for {', '.join(DEVICES)} "
        "(or --gpus N --device-name NAME), and do nothing; sizes are measured if --data is binarised",
    )
    add("--json", action="store_true", help="with --plan: print JSON")
    add("--gpus", type=int, metavar="N", help="number of GPUs; 0 for the CPU (default: all)")
    add(
        "--device-name",
        choices=sorted(DEVICES),
        help="type of GPU for --dry-run and --plan; it need not be in this machine",
    )
    add(
        "--nodes", type=int, metavar="N", help="number of machines that train together (default: 1)"
    )
    add("--node-rank", type=int, metavar="R", help="this machine's number, from 0")
    add("--master", metavar="HOST[:PORT]", help="address of machine number 0 for the others")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="raw data or archives for the recipe's data section (missing public files are "
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
        "--row",
        metavar="ROW",
        help="another row of the paper, listed in the file under `rows`; it gets a separate folder (all: the "
        "file's own row, then each of them)",
    )
    add(
        "--seeds",
        metavar="N,N,...",
        help="seeds (train.seed) of several runs, one after another, each with a separate folder and record",
    )
    add(
        "--user-dir",
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="your own fairseq plugin, which imports moa_fairseq; passed to every command of the run",
    )
    add(
        "--restart",
        action="store_true",
        help="move an existing run folder aside and start over",
    )
    add(
        "--record",
        nargs="?",
        const="",
        metavar="NAME",
        help="copy result.json to results/measured/NAME.json next to configs/ or your own recipe (default: "
        "the experiment's name); with --stage train, write its speed to results/throughput/NAME.json",
    )


def run(args: argparse.Namespace) -> int:
    """Run one recipe, with each of --seeds, or show what it would do. Returns the exit status."""
    config = find_recipe(args.config)
    headlines = []
    for row_args in _with_rows(args, config):
        for run_args in _with_seeds(row_args, config.stem):
            if result := _run_once(run_args, config):
                values = json.loads(result.read_text("utf-8"))
                headlines.append(values["metrics"][values["headline"]])
    of_one_row = args.seeds and args.row != ALL_ROWS
    if of_one_row and len(headlines) > 1 and None not in headlines:  # None: a model that diverged
        mean = statistics.mean(headlines)
        deviation = statistics.stdev(headlines)
        log.info("seeds %s: %.2f, standard deviation %.2f", args.seeds, mean, deviation)
    return 0


def _with_rows(args: argparse.Namespace, config: Path) -> Iterator[argparse.Namespace]:
    """The arguments of one run per selected row of the file; a row in `rows` has a folder of its own."""
    if args.row is None:
        yield args
        return
    recipe = load_recipe(config)  # before the first run, which may take days
    if args.row == ALL_ROWS:
        yield args
    for name in list(recipe.rows) if args.row == ALL_ROWS else [args.row]:
        suffix = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        overrides = [*row_overrides(recipe, name), *args.overrides]
        yield _variant(args, config.stem, suffix, overrides)


def _with_seeds(args: argparse.Namespace, experiment: str) -> Iterator[argparse.Namespace]:
    """The arguments of one run for each of --seeds, with a separate folder and record."""
    if args.seeds is None:
        yield args
        return
    try:
        seeds = dict.fromkeys(map(int, args.seeds.split(",")))
    except ValueError:  # not a number
        raise UserError(
            f"--seeds {args.seeds}: give whole numbers with commas, such as 1,2,3."
        ) from None
    if args.plan or args.stage != "all":
        raise UserError("--seeds needs all stages: leave --plan and --stage out.")
    for seed in seeds:
        overrides = [*args.overrides, f"train.seed={seed}"]
        yield _variant(args, experiment, f"seed{seed}", overrides)


def _variant(
    args: argparse.Namespace, experiment: str, suffix: str, overrides: list[str]
) -> argparse.Namespace:
    """The arguments of one of several runs, whose folder and record end with a suffix."""
    folder = args.save_dir or Path("runs") / experiment
    changes = {"overrides": overrides, "save_dir": Path(f"{folder}_{suffix}")}
    if args.record is not None:
        changes["record"] = f"{args.record or experiment}_{suffix}"
    return argparse.Namespace(**(vars(args) | changes))


def _run_once(args: argparse.Namespace, config: Path) -> Path | None:
    """Run or show one recipe, or print its plan. Returns result.json if it was scored."""
    recipe = load_recipe(config, args.overrides)
    published = _published_recipe(recipe, config, args.overrides)
    recipe = finetuned(recipe)
    folder = args.save_dir or Path("runs") / recipe.experiment
    _check_arguments(args, folder)
    hardware = _requested_hardware(args)
    check_parallel_flags(recipe, hardware)
    plugin = None
    if args.user_dir:
        plugin = Path(args.user_dir).absolute()
        _check_plugin(plugin)
    training_flags = check_flags(recipe)
    data = args.data
    if data and is_binarised(data / "binarised"):  # made by `moa-fairseq prepare`
        data = data / "binarised"
    if args.plan:
        _print_plan(args, recipe, hardware, data or prepared_data(folder), _results_of(config))
        return None
    cwd = str(Path.cwd()) + os.sep  # scripts/ give configs by full paths
    words = [word.removeprefix(cwd) for word in sys.argv[1:]]
    options = Options(
        stage=args.stage,
        data=data,
        save_dir=folder,
        restart=args.restart,
        user_dir=plugin,
        record=None if args.record is None else _record_file(args, config),
        command_line=shlex.join(["moa-fairseq", *words]),
        prepare_command=_prepare_command(args, config, folder, plugin),
        published_recipe=published,
        training_flags=training_flags,
    )
    log.info("%s: %s\nhardware: %s", recipe.experiment, recipe.summary, hardware.describe())
    return run_recipe(recipe, hardware, options, dry_run=args.dry_run)


def _published_recipe(recipe: Recipe, config: Path, overrides: list[str]) -> Recipe | None:
    """The recipe of a paper's row, without any --set, if a run with these overrides may reproduce it."""
    if recipe.reproduces is None:
        return None
    published = load_recipe(config, _row_values(recipe, overrides))
    if published.pretrained != recipe.pretrained:
        log.warning(
            "pretrained is %s, not the row's %s: the run reproduces no row",
            recipe.pretrained,
            published.pretrained,
        )
        return None
    return finetuned(published)


def _row_values(recipe: Recipe, overrides: list[str]) -> list[str]:
    """The `section.key=value` strings that turn a recipe's file into the row of a paper.

    They are the values of the row, and any --set of a key that the row leaves open: the seed, and the
    pretrained model unless the rows differ in it.
    """
    values = row_overrides(recipe, recipe.row) if recipe.row else []
    free = ["train.seed"]
    if not any("pretrained" in row for row in recipe.rows.values()):
        free.append("pretrained")
    for text in overrides:
        if text.partition("=")[0].strip() in free:
            values.append(text)
    return values


def _check_arguments(args: argparse.Namespace, folder: Path) -> None:
    """Raise UserError for conflicting arguments, or a folder that fairseq cannot use."""
    if ":" in str(folder):
        raise UserError(
            f"fairseq cannot use --save-dir {folder}: fairseq takes the ':' in a model's path for the end of "
            "the path. Rename or move the folder."
        )
    if args.json and not args.plan:
        raise UserError("--json needs --plan.")
    if args.device_name and not (args.dry_run or args.plan):
        raise UserError("--device-name needs --dry-run or --plan: a run uses this machine's GPUs.")


def _requested_hardware(args: argparse.Namespace) -> Hardware:
    """The devices requested by the arguments, and this machine's number among several."""
    if args.device_name:
        hardware = assumed_hardware(args.device_name, args.gpus)
    else:
        hardware = choose_devices(detect_hardware(), args.gpus, args.dry_run or args.plan)
    world = find_world(hardware.gpus, args.nodes, args.node_rank, args.master)
    return dataclasses.replace(hardware, world=world)


def _results_of(config: Path) -> Path:
    """results/ next to configs/, or next to a recipe in another place."""
    folders = config.resolve().parents
    roots = (folder.parent for folder in folders if folder.name == "configs")
    return next(roots, folders[0]) / "results"


def _print_plan(
    args: argparse.Namespace, recipe: Recipe, hardware: Hardware, data: Path | None, results: Path
) -> None:
    """Print the plan for this machine; without GPUs and without --gpus, for every type of GPU."""
    from moa_fairseq.experiments.recipes import planner

    machines = [hardware]
    if not hardware.gpus and args.gpus is None:
        machines = []
        for name, device in DEVICES.items():
            machines += [assumed_hardware(name, count) for count in device.counts]
    report = planner.plan(recipe, data, machines, results)
    if args.json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        print(f"{recipe.experiment}: {recipe.summary}\n{report.text()}")


def _record_file(args: argparse.Namespace, config: Path) -> Path:
    """The file to which --record copies the result, or the speed of --stage train."""
    results = _results_of(config)
    is_installed = Path(moa_fairseq.__file__).resolve().parent in results.parents
    if is_installed:
        results = Path("results")
    kind = "throughput" if args.stage == "train" else "measured"
    return results / kind / f"{args.record or config.stem}.json"


def _prepare_command(
    args: argparse.Namespace, config: Path, folder: Path, plugin: Path | None
) -> str:
    """The command line that makes only the data, for commands.sh."""
    values = {"data": args.data and args.data.absolute(), "save-dir": folder, "gpus": args.gpus}
    words = ["moa-fairseq", *flags({"user-dir": plugin}), "recipe", str(config.absolute())]
    words += flags(values | {"stage": "prepare"})
    for text in args.overrides:
        words.append(f"--set={text}")
    return shlex.join(words)


def _check_plugin(user_dir: Path) -> None:
    """Raise UserError unless fairseq also imports moa_fairseq when this folder is its --user-dir."""
    code = (
        "import argparse, sys; from fairseq.utils import import_user_module; "
        "import_user_module(argparse.Namespace(user_dir=sys.argv[1])); print('moa_fairseq' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(user_dir)]
    environment = environment_of_a_child()
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.stdout.split()[-1:] != ["True"]:
        reason = "it does not import this package"
        if result.returncode:
            reason = result.stderr.splitlines()[-1]
        raise UserError(
            f"--user-dir {user_dir} cannot replace this package in fairseq's commands: {reason}. Write "
            "`import moa_fairseq` at the top of its __init__.py."
        )
