"""Run one experiment: prepare its data, train, average, translate and score, as its YAML file says.

  moa-fairseq recipe configs/multi30k_ende_moa_tiny.yaml --data multi30k/data/task1/raw
  moa-fairseq recipe configs/wmt14_ende_moa_base.yaml --dry-run --gpus 8
  moa-fairseq recipe configs/quickstart_moa.yaml --set train.max_epoch=2 --save-dir runs/try

Prints the plain fairseq commands that it runs; they also stand in <save-dir>/commands.sh. Run the same
line again after an interruption: finished stages are skipped, training goes on from its last
checkpoint. --gpus says how many GPUs to use (all that torch sees; 0: the CPU); --update-freq follows,
so that one update has the recipe's number of tokens on any machine.

  moa-fairseq recipe configs/wmt14_ende_moa_big.yaml --plan                    what it will cost
  moa-fairseq recipe configs/wmt14_ende_moa_big.yaml --data BIN --hydra DIR    for fairseq-hydra-train
  bash scripts/launch/slurm.sh --help                  Slurm; multinode.sh and torchrun.sh beside it
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import List

import moa_fairseq
from moa_fairseq.data_prep.binarised import is_binarised
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.batch import fit_devices, plan_batch, with_floor
from moa_fairseq.recipes.finetune import resolve
from moa_fairseq.recipes.hardware import (
    DEVICES,
    Hardware,
    assumed_hardware,
    choose_devices,
    detect_hardware,
)
from moa_fairseq.recipes.launch.world import find_world
from moa_fairseq.recipes.loading import find_recipe, load_recipe
from moa_fairseq.recipes.planner.throughput import Row, read_rows
from moa_fairseq.recipes.preflight import (
    check_plugin,
    check_scale,
    check_schedule,
    check_train_command,
    fairseq_is_installed,
)
from moa_fairseq.recipes.row_data import on_the_rows_data
from moa_fairseq.recipes.runner import (
    STAGES,
    Options,
    planned_commands,
    prepared_before,
    run_folder_of,
    run_recipe,
)
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.running.command_line import to_shell

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `moa-fairseq recipe`."""
    parser.add_argument(
        "config", type=Path, help="the experiment's YAML file, or the name of one in configs/"
    )
    parser.add_argument(
        "--stage", choices=[*STAGES, "all"], default="all", help="one stage only (default: all)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and do nothing")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print parameters, MACs, updates, memory and hours for V100, A100, H100 and H200 (or --gpus N "
        "--device-name NAME), and do nothing; sizes are measured where --data is a binarised folder",
    )
    parser.add_argument(
        "--hydra",
        nargs="?",
        const="",
        metavar="DIR",
        help="write the training's config for fairseq-hydra-train to DIR (default: the run folder), print "
        "the line that trains by it, and do nothing else",
    )
    parser.add_argument("--json", action="store_true", help="with --plan: print JSON")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="how many GPUs to use; 0 for the CPU (default: all)"
    )
    parser.add_argument(
        "--device-name",
        choices=sorted(DEVICES),
        help="for --dry-run and --plan: the kind of GPU, which need not be at hand",
    )
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="how many machines train together (default: 1)"
    )
    parser.add_argument("--node-rank", type=int, metavar="R", help="this machine's number, from 0")
    parser.add_argument("--master", metavar="HOST[:PORT]", help="machine number 0, as the others reach it")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="raw data or archives as the recipe's data section wants them (what is public and lacking is "
        "downloaded to data/downloads), or a folder made by fairseq-preprocess or `moa-fairseq prepare`",
    )
    parser.add_argument(
        "--save-dir", type=Path, metavar="DIR", help="run folder (default: runs/<experiment>)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one value of the YAML file, e.g. train.max_epoch=5; may be repeated",
    )
    parser.add_argument(
        "--user-dir",
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="a fairseq plugin of your own, which imports moa_fairseq: every command of the run gets it",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="move an existing run folder aside and start from the beginning",
    )
    parser.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="NAME",
        help="copy result.json to results/measured/NAME.json beside configs/ (default: the experiment); with "
        "--stage train, write the speed to results/throughput/NAME.json, for --plan",
    )


def run(args: argparse.Namespace) -> int:
    """Run one recipe, or tell what it would do (--dry-run, --plan, --hydra). Returns the exit status."""
    config = find_recipe(args.config)
    recipe = resolve(load_recipe(config, args.overrides))
    if args.json and not args.plan:
        raise UserError("--json goes with --plan.")
    hardware = _hardware(args)
    results = config.resolve().parent.parent / "results"
    installed = Path(moa_fairseq.__file__).resolve().parent in results.parents
    kind = (Path("results") if installed else results) / (
        "throughput" if args.stage == "train" else "measured"
    )
    here = str(Path.cwd()) + os.sep  # scripts/ name configs in full
    inside = args.data / "binarised" if args.data else None  # where `moa-fairseq prepare` made it
    options = Options(
        stage=args.stage,
        data=inside if inside and is_binarised(inside) else args.data,
        save_dir=args.save_dir,
        restart=args.restart,
        user_dir=Path(args.user_dir).absolute() if args.user_dir else None,
        record=None if args.record is None else kind / f"{args.record or config.stem}.json",
        command_line=shlex.join(["moa-fairseq", *(word.removeprefix(here) for word in sys.argv[1:])]),
    )
    if (args.plan or args.hydra is not None) and not fairseq_is_installed():
        raise UserError("--plan and --hydra ask fairseq: run `bash scripts/setup.sh` first.")
    if options.user_dir:
        check_plugin(options.user_dir)
    data = options.data or prepared_before(recipe, options)
    if args.plan:
        return _plan(args, recipe, hardware, data, read_rows(results))
    known = data if data and is_binarised(data) else None
    # What is assumed of data that nobody has seen yet is for a dry run; a run measures it.
    sized = with_floor(recipe, known, assume=args.dry_run)
    used, fewer = fit_devices(sized, hardware)
    warnings = [check_scale(sized, used)]
    if args.hydra is not None:
        return _hydra(args, sized, used, dataclasses.replace(options, data=known), fewer)
    commands = planned_commands(sized, used, options)
    log.info("%s: %s\nhardware: %s", recipe.experiment, recipe.summary, hardware.describe())
    for command in commands:
        if command[0] == "fairseq-train" and used.leads and (fairseq_is_installed() or not args.dry_run):
            warnings.append(check_schedule(sized, used, check_train_command(command), known))
    for warning in filter(None, warnings):
        log.info(warning)
    if not args.dry_run:
        run_recipe(recipe, hardware, options)
        return 0
    if known:
        on_the_rows_data(recipe, known)
    if fewer:
        log.info(fewer if known else f"{fewer} (That length is assumed until the data is prepared.)")
    log.info("batch: %s", plan_batch(sized.train, used.devices).describe())
    for command in commands:
        log.info("$ %s", to_shell(command, used.environment))
    return 0


def _hydra(
    args: argparse.Namespace, recipe: Recipe, hardware: Hardware, options: Options, warning: str | None
) -> int:
    from moa_fairseq.recipes.hydra import write_hydra

    if options.data is None:
        raise UserError(
            "--hydra needs binarised data: run --stage prepare first with the same --save-dir, or give "
            "--data a folder made by fairseq-preprocess or `moa-fairseq prepare`."
        )
    folder = Path(args.hydra) if args.hydra else run_folder_of(recipe, options) / "hydra"
    if recipe.finetune == "noft":
        raise UserError("--hydra writes the config of a training, and finetune: noft trains nothing.")
    (training,) = planned_commands(recipe, hardware, dataclasses.replace(options, stage="train"))
    header = f"{recipe.summary}\nMade by: {options.command_line}\nThe same as: {to_shell(training)}"
    line = to_shell(write_hydra(training, folder, recipe.experiment, header))
    print(f"{warning}\n{line}" if warning else line)
    return 0


def _hardware(args: argparse.Namespace) -> Hardware:
    """The devices that the command line asks for, and who trains together with them."""
    if args.device_name:
        if not (args.dry_run or args.plan):
            raise UserError("--device-name goes with --dry-run or --plan: a run uses the GPUs it has.")
        hardware = assumed_hardware(args.device_name, args.gpus)
    else:
        hardware = choose_devices(detect_hardware(), args.gpus, args.dry_run or args.plan)
    world = find_world(hardware.gpus, args.nodes, args.node_rank, args.master)
    return dataclasses.replace(hardware, world=world)


def _plan(
    args: argparse.Namespace, recipe: Recipe, hardware: Hardware, data: Path | None, rows: List[Row]
) -> int:
    from moa_fairseq.recipes.planner import plan

    recipe = with_floor(recipe, data)
    machines = plan.machines_to_plan(hardware, args.gpus, args.device_name)
    report = plan.plan(recipe, plan.workload(recipe, data), machines, rows)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"{recipe.experiment}: {recipe.summary}\n{plan.as_text(report)}")
    return 0
