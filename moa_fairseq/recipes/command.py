"""Run one experiment: prepare its data, train, average, translate and score, as its YAML file says.

  moa-fairseq recipe configs/multi30k_ende_moa_tiny.yaml --data multi30k/data/task1/raw
  moa-fairseq recipe configs/wmt14_ende_moa_base.yaml --dry-run --gpus 8
  moa-fairseq recipe configs/quickstart_moa.yaml --set train.max_epoch=2 --save-dir runs/try

Prints the plain fairseq commands that it runs; they also stand in <save-dir>/commands.sh. Run the same
line again after an interruption: finished stages are skipped, training goes on from its last
checkpoint. --gpus says how many GPUs to use (all that torch sees; 0: the CPU); --update-freq follows,
so that one update has the recipe's number of tokens on any machine.

  moa-fairseq recipe configs/wmt14_ende_moa_big.yaml --plan                    what it will cost
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

import moa_fairseq
from moa_fairseq.data_prep.binarised import is_binarised
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.finetune import prepared_data, resolve
from moa_fairseq.recipes.flags import check_flags, check_plugin, check_sharding
from moa_fairseq.recipes.hardware import DEVICES, assumed_hardware, choose_devices, detect_hardware
from moa_fairseq.recipes.loading import find_recipe, load_recipe
from moa_fairseq.recipes.runner import STAGES, Options, run_folder_of, run_recipe
from moa_fairseq.recipes.world import find_world

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
        help="print parameters, MACs, updates, memory and rough hours for V100, A100, H100 and H200 (or "
        "--gpus N --device-name NAME), and do nothing; sizes are measured where --data is a binarised folder",
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
    """Run one recipe, or tell what it would do (--dry-run, --plan). Returns the exit status."""
    config = find_recipe(args.config)
    recipe = resolve(load_recipe(config, args.overrides))
    # The row of a paper is that of the file, with whatever it is fine-tuned from.
    published = load_recipe(config) if recipe.reproduces else None
    if published and recipe.finetune:
        published = dataclasses.replace(published, finetune=recipe.finetune, pretrained=recipe.pretrained)
        published = resolve(published)
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
    plugin = Path(args.user_dir).absolute() if args.user_dir else None
    if plugin:
        check_plugin(plugin)
    training = check_flags(recipe)
    check_sharding(recipe, hardware)
    results = config.resolve().parent.parent / "results"
    installed = Path(moa_fairseq.__file__).resolve().parent in results.parents
    kind = "throughput" if args.stage == "train" else "measured"
    record = (Path("results") if installed else results) / kind / f"{args.record or config.stem}.json"
    here = str(Path.cwd()) + os.sep  # scripts/ name configs in full
    inside = args.data / "binarised" if args.data else None  # where `moa-fairseq prepare` made it
    options = Options(
        stage=args.stage,
        data=inside if inside and is_binarised(inside) else args.data,
        save_dir=args.save_dir,
        restart=args.restart,
        user_dir=plugin,
        record=None if args.record is None else record,
        command_line=shlex.join(["moa-fairseq", *(word.removeprefix(here) for word in sys.argv[1:])]),
        published=published,
        training=training,
    )
    if args.plan:
        from moa_fairseq.recipes import planner

        data = options.data or prepared_data(run_folder_of(recipe, options))
        machines = [hardware]
        if not hardware.gpus and args.gpus is None:  # none here, and no wish: every kind
            machines = [assumed_hardware(name, count) for name in DEVICES for count in planner.COUNTS]
        report = planner.plan(recipe, data if data and is_binarised(data) else None, machines, results)
        head = f"{recipe.experiment}: {recipe.summary}"
        print(json.dumps(report, indent=1) if args.json else f"{head}\n{planner.as_text(report)}")
        return 0
    log.info("%s: %s\nhardware: %s", recipe.experiment, recipe.summary, hardware.describe())
    run_recipe(recipe, hardware, options, dry_run=args.dry_run)
    return 0
