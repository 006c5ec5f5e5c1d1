"""Train several systems with several seeds, and test their differences for significance.

  moa-fairseq study configs/studies/language.yaml --data data/wikitext2_sp512 --tune     first, if it tunes
  moa-fairseq study configs/studies/language.yaml --data data/wikitext2_sp512
  moa-fairseq study configs/studies/language.yaml --data DIR --jobs 2        two runs at a time
  sbatch --array=1-8 --wrap "moa-fairseq study configs/studies/language.yaml --data DIR"       on a cluster
  moa-fairseq study configs/studies/language.yaml --report
  moa-fairseq study configs/studies/translation.yaml --report --references DIR/tokens/test.de
  moa-fairseq study configs/studies/translation.yaml --pack    single files into one

All systems of one seed run back to back, then those of the next seed. Each run is a run folder below
--runs and leaves a record, a line of results/studies/STUDY/records.jsonl. A run that has a record is never
repeated, so an interrupted study resumes; a diverged training counts as the worst.
Several workers may share one study, on one machine or on several with a common file system.
"""

import argparse
import dataclasses
import itertools
import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.plots import save
from moa_fairseq.experiments.recipes.hardware import Hardware, choose_devices, detect_hardware
from moa_fairseq.experiments.records.json_files import write_json
from moa_fairseq.experiments.study.design import Study, runs_of
from moa_fairseq.experiments.study.loading import load_study
from moa_fairseq.experiments.study.pictures import draw
from moa_fairseq.experiments.study.records import pack_study
from moa_fairseq.experiments.study.report import Report, report
from moa_fairseq.experiments.study.report_text import as_text
from moa_fairseq.experiments.study.running import Workspace, open_runs, run_pending
from moa_fairseq.files import atomic_write
from moa_fairseq.process import environment_of_a_child, to_argv
from moa_fairseq.process.signals import (
    die_with_parent,
    handled_by,
    signals_held,
    terminate_as_interrupt,
)

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq study`."""
    parser.add_argument(
        "study", type=Path, metavar="STUDY.yaml", help="study file: systems, seeds, contrasts"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder, the --data of every recipe"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="run folders (runs)"
    )
    parser.add_argument(
        "--records",
        type=Path,
        metavar="DIR",
        help="folder of the records, DIR/STUDY (results/studies next to configs/)",
    )
    parser.add_argument(
        "--gpus", type=int, default=0, metavar="N", help="GPUs per run (0: the CPU)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="parallel runs on this machine (1)"
    )
    parser.add_argument("--tune", action="store_true", help="run the tuning, which must come first")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the remaining runs, and do nothing"
    )
    parser.add_argument(
        "--pack",
        action="store_true",
        help="move records and translations from separate files into records.jsonl, outputs.tar.xz",
    )
    parser.add_argument(
        "--report", action="store_true", help="print the tables; write them to the records"
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="with --report: only the first N seeds"
    )
    parser.add_argument(
        "--references",
        type=Path,
        metavar="FILE",
        help="with --report: also BLEU and chrF; the test set's target side in words, without subwords",
    )
    parser.add_argument("--json", action="store_true", help="with --report: print JSON")


def run(args: argparse.Namespace) -> int:
    """Run or report a study, and return the exit status."""
    # results/ is next to the folder configs/ of configs/studies/NAME.yaml
    above = args.study.resolve().parents
    root = args.records or above[min(2, len(above) - 1)] / "results" / "studies"
    study = load_study(args.study, root, args.tune)
    if args.seeds is not None:
        if not args.report or not 0 < args.seeds <= study.seeds:
            raise UserError(
                f"--seeds {args.seeds} needs --report, and at most the study's {study.seeds}."
            )
        study = dataclasses.replace(study, seeds=args.seeds)
    if args.references and not args.report:
        raise UserError("--references needs --report.")
    if args.pack:
        packed = pack_study(root / study.study)
        log.info("%s: packed %d records and %d translations", root / study.study, *packed)
        return 0
    runs = runs_of(study, args.study.parent, root)
    if args.report:
        content = report(study, runs, args.references)
        _write_report(study, content, root / study.study, args.seeds)
        print(json.dumps(content, indent=1) if args.json else as_text(study, content))
        return 0
    if args.jobs < 1:
        raise UserError(f"--jobs {args.jobs} is less than 1. Give the number of workers.")
    workspace = Workspace(study, args.runs / study.study, args.data, args.gpus)
    remaining = open_runs(runs, workspace)
    log.info("%s: %d of %d runs are left", study.study, len(remaining), len(runs))
    if args.dry_run:
        for run in remaining:
            log.info("%s", run.name)
    elif args.jobs > 1:
        _work_together(args.jobs, choose_devices(detect_hardware(), args.gpus, dry_run=False))
    else:
        run_pending(remaining, workspace)
    return 0


def _write_report(study: Study, content: Report, folder: Path, seeds: int | None) -> None:
    """Write a report as JSON and Markdown; one of all seeds (None) also draws the pictures."""
    name = "report" if seeds is None else f"report-{seeds}-seeds"
    write_json(folder / f"{name}.json", content)
    with atomic_write(folder / f"{name}.md") as stream:
        stream.write(as_text(study, content, markdown=True))
    if seeds is None:
        for picture, figure in draw(study, content).items():
            save(figure, folder / f"{picture}.png")


def _work_together(jobs: int, devices: Hardware) -> None:
    """Start workers on this machine; a failing worker, or Ctrl-C, ends all of them.

    Each worker has its own GPUs. If there are too few, several workers share a GPU.

    Args:
        jobs: the number of workers.
        devices: the GPUs of this machine, and how many a run gets.
    """
    workers: list[subprocess.Popen[bytes]] = []
    command = to_argv(["moa-fairseq", *sys.argv[1:], "--jobs", "1"])
    cards = itertools.cycle(devices.visible)
    with terminate_as_interrupt():
        try:
            for _ in range(jobs):
                environment = environment_of_a_child()
                if devices.gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = ",".join(
                        itertools.islice(cards, devices.gpus)
                    )
                with signals_held() as received:
                    worker = subprocess.Popen(
                        command, env=environment, preexec_fn=die_with_parent()
                    )
                workers.append(worker)
                for number in received:
                    signal.raise_signal(number)
            while any(worker.poll() is None for worker in workers):
                if any(worker.returncode for worker in workers):
                    break
                time.sleep(0.2)
        finally:
            # A second Ctrl-C (or `timeout`, which signals twice) would end this program, and with it the
            # workers, whose trainings are saving.
            with handled_by(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
                for worker in workers:
                    worker.terminate()
                for worker in workers:
                    worker.wait()
    if any(worker.returncode for worker in workers):
        raise UserError(
            "A run failed (see above). Finished runs are kept: fix the cause, run this again."
        )
