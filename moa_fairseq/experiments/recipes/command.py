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
import dataclasses
import itertools
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
from typing import Any

import moa_fairseq
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import is_binarised
from moa_fairseq.experiments.recipes.checkpoints import finetuned, prepared_data
from moa_fairseq.experiments.recipes.hardware import (
    DEVICES,
    Hardware,
    assumed_hardware,
    check_sharding,
    choose_devices,
    detect_hardware,
    find_world,
)
from moa_fairseq.experiments.recipes.loading import check_flags, find_recipe, load_recipe, row_overrides
from moa_fairseq.experiments.recipes.running import STAGES, run_recipe
from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.experiments.recipes.steps import Options
from moa_fairseq.process import environment_of_a_child, flags

ALL_ROWS = "all"  # of --row
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
        "--row",
        metavar="ROW",
        help="another row of the paper, which the file has under `rows`, in a folder of its own; all: the "
        "file's own row, and then each of them",
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
    rows = [args] if args.row is None else _with_rows(args, config)
    runs = ([row] if row.seeds is None else _with_seeds(row, config.stem) for row in rows)
    for one in itertools.chain.from_iterable(runs):
        if result := _run_once(one, config):
            values = json.loads(result.read_text(encoding="utf-8"))
            headlines.append(values["metrics"][values["headline"]])
    of_one_row = args.seeds and args.row != ALL_ROWS
    if of_one_row and len(headlines) > 1 and None not in headlines:  # None: a model that diverged
        mean = statistics.mean(headlines)
        deviation = statistics.stdev(headlines)
        log.info("seeds %s: %.2f, standard deviation %.2f", args.seeds, mean, deviation)
    return 0


def _with_rows(args: argparse.Namespace, config: Path) -> Iterator[argparse.Namespace]:
    """The arguments of a run of --row, or of each row that the file has; those of `rows` have own folders."""
    recipe = load_recipe(config)
    if args.row == ALL_ROWS:
        yield args
        names = list(recipe.rows)
    else:
        names = [args.row]
    for name in names:
        suffix = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        own: dict[str, Any] = {"overrides": [*row_overrides(recipe, name), *args.overrides]}
        own["save_dir"] = Path(f"{args.save_dir or Path('runs') / config.stem}_{suffix}")
        if args.record is not None:
            own["record"] = f"{args.record or config.stem}_{suffix}"
        yield argparse.Namespace(**{**vars(args), **own})


def _with_seeds(args: argparse.Namespace, experiment: str) -> Iterator[argparse.Namespace]:
    """The arguments of one run for each of --seeds, with a folder and a record of its own."""
    try:
        seeds = dict.fromkeys(map(int, args.seeds.split(",")))
    except ValueError:  # of int
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
    recipe = load_recipe(config, args.overrides)
    # The row of a paper is what the file says of it, with any seed, and with whatever it is fine-tuned from
    # unless that is what rows differ in.
    free = ["train.seed"]
    if not any("pretrained" in values for values in recipe.rows.values()):
        free.append("pretrained")
    kept = [text for text in args.overrides if text.partition("=")[0].strip() in free]
    row = load_recipe(config, [*(row_overrides(recipe, recipe.row) if recipe.row else ()), *kept])
    stands = recipe.reproduces is not None and row.pretrained == recipe.pretrained
    if recipe.reproduces and not stands:
        log.warning(
            "pretrained is %s, and not the row's %s: it stands for none", recipe.pretrained, row.pretrained
        )
    if recipe.finetune:
        recipe = finetuned(recipe)
        row = finetuned(row)
    folder = args.save_dir or Path("runs") / recipe.experiment
    _check_arguments(args, folder)
    hardware = _hardware(args)
    check_sharding(recipe, hardware)
    plugin = None
    if args.user_dir:
        plugin = Path(args.user_dir).absolute()
        _check_plugin(plugin)
    training = check_flags(recipe)
    data = args.data
    if data and is_binarised(data / "binarised"):  # where `moa-fairseq prepare` made it
        data = data / "binarised"
    if args.plan:
        _print_plan(args, recipe, hardware, data or prepared_data(folder), _results_of(config))
        return None
    record = None
    if args.record is not None:
        record = _place_of_record(args, config)
    here = str(Path.cwd()) + os.sep  # scripts/ name configs in full
    options = Options(
        stage=args.stage,
        data=data,
        save_dir=folder,
        restart=args.restart,
        user_dir=plugin,
        record=record,
        command_line=shlex.join(["moa-fairseq", *(word.removeprefix(here) for word in sys.argv[1:])]),
        preparation=_preparation(args, config, folder, plugin),
        published=row if stands else None,
        training=training,
    )
    log.info("%s: %s\nhardware: %s", recipe.experiment, recipe.summary, hardware.describe())
    return run_recipe(recipe, hardware, options, dry_run=args.dry_run)


def _check_arguments(args: argparse.Namespace, folder: Path) -> None:
    """Raise UserError for arguments that do not go together, or a folder that fairseq cannot use."""
    if ":" in str(folder):
        why = "fairseq takes a ':' in the path of a model for the end of that path"
        raise UserError(f"--save-dir {folder} cannot be used: {why}. Give the folder another name or place.")
    if args.json and not args.plan:
        raise UserError("--json goes with --plan.")
    if args.device_name and not (args.dry_run or args.plan):
        raise UserError("--device-name goes with --dry-run or --plan: a run uses the GPUs it has.")


def _hardware(args: argparse.Namespace) -> Hardware:
    """The devices that the arguments ask for, and this machine's place among several."""
    if args.device_name:
        hardware = assumed_hardware(args.device_name, args.gpus)
    else:
        hardware = choose_devices(detect_hardware(), args.gpus, args.dry_run or args.plan)
    world = find_world(hardware.gpus, args.nodes, args.node_rank, args.master)
    return dataclasses.replace(hardware, world=world)


def _results_of(config: Path) -> Path:
    """results/ beside configs/, or beside a recipe that lies elsewhere."""
    folders = config.resolve().parents
    return next((folder.parent for folder in folders if folder.name == "configs"), folders[0]) / "results"


def _print_plan(
    args: argparse.Namespace, recipe: Recipe, hardware: Hardware, data: Path | None, results: Path
) -> None:
    """What the run will cost on this machine or, where it has no GPU and none is named, on every kind."""
    from moa_fairseq.experiments.recipes import planner

    machines = [hardware]
    if not hardware.gpus and args.gpus is None:
        machines = [assumed_hardware(name, n) for name, device in DEVICES.items() for n in device.counts]
    if data and not is_binarised(data):
        data = None
    report = planner.plan(recipe, data, machines, results)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"{recipe.experiment}: {recipe.summary}\n{planner.as_text(report)}")


def _place_of_record(args: argparse.Namespace, config: Path) -> Path:
    """Where --record copies the result, or the speed of --stage train."""
    results = _results_of(config)
    installed = Path(moa_fairseq.__file__).resolve().parent in results.parents
    if installed:
        results = Path("results")
    kind = "measured"
    if args.stage == "train":
        kind = "throughput"
    return results / kind / f"{args.record or config.stem}.json"


def _preparation(args: argparse.Namespace, config: Path, folder: Path, plugin: Path | None) -> str:
    """The line that makes the data alone, for commands.sh."""
    given = {"data": args.data and args.data.absolute(), "save-dir": folder, "gpus": args.gpus}
    words = ["moa-fairseq", *flags({"user-dir": plugin}), "recipe", str(config.absolute())]
    words += [*flags({**given, "stage": "prepare"}), *(f"--set={text}" for text in args.overrides)]
    return shlex.join(words)


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
