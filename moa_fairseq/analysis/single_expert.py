"""What a trained MAE loses when each module uses one expert instead of the mixture (MAE Table 5).

  moa-fairseq analyze single-expert runs/mae7 --draws 5 --json table5.json

Evaluates the subset with the mixture, with each gate's favourite alone, and with random experts (one for each
module, drawn anew with each seed), using the generate and score settings of the run. The evaluations stay in
RUN_DIR/single-expert; finished ones are not repeated.

fairseq-generate, fairseq-validate and fairseq-eval-lm do the same for any trained model with
--model-overrides "{'mae_evaluate_with': 'random-expert', 'mae_evaluate_seed': 2}" (or 'top-expert').
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import logging
import statistics
from pathlib import Path
from typing import Any, Dict, List, Optional

from moa_fairseq.analysis.routed_model import add_report_arguments, finish
from moa_fairseq.attention.single_expert import MIXTURE, RANDOM_EXPERT, TOP_EXPERT
from moa_fairseq.data_prep.binarised import Prepared
from moa_fairseq.errors import UserError
from moa_fairseq.fairseq_compat import load_checkpoint
from moa_fairseq.recipes.hardware import Hardware, choose_devices, detect_hardware
from moa_fairseq.recipes.jobs import EVALUATIONS
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.result import flat_metrics
from moa_fairseq.recipes.run_folder import RunState
from moa_fairseq.recipes.runner import scores_of
from moa_fairseq.recipes.schema import CAUSAL_LM, TRANSLATION, Recipe
from moa_fairseq.recipes.steps import Run, carry_out
from moa_fairseq.running.folder_lock import locked
from moa_fairseq.running.process import Executor, terminate_as_interrupt

NAME = "single-expert"
SUMMARY = "scores with one expert per module instead of the mixture (MAE Table 5)"
log = logging.getLogger(__name__)

FOLDER = "single-expert"  # in the run folder: one folder for each way to evaluate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run folder of a trained MAE")
    parser.add_argument("--subset", default="valid", help="which part of the run's data (valid)")
    parser.add_argument("--draws", type=int, default=5, metavar="N", help="draws of random experts (5)")
    add_report_arguments(parser)


def analyze(args: argparse.Namespace) -> int:
    """Evaluate and print the rows of Table 5."""
    if args.draws < 0:
        raise UserError(f"--draws {args.draws} must be 0 or more: it is the number of random draws.")
    run, present = open_run(args.run_dir), detect_hardware()
    hardware = choose_devices(present, 0 if args.cpu else min(1, present.gpus), dry_run=False)
    report = evaluate_single_experts(run, args.subset, args.draws, hardware)
    finish(_table(report), report, args.json)
    return 0


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A finished run: its resolved recipe, its data, the checkpoint to evaluate, and its --mae-gate."""

    folder: Path
    recipe: Recipe
    prepared: Prepared
    model: Path
    gate: str


def open_run(folder: Path) -> TrainedRun:
    """Raises UserError if the folder does not hold a trained MAE, or if its recipe evaluates nothing."""
    config, known = folder / "recipe.yaml", RunState(folder).get("prepare")
    if not config.is_file() or not known:
        raise UserError(
            f"{folder} is not a run folder of `moa-fairseq recipe`: it lacks recipe.yaml or state.json."
        )
    recipe = load_recipe(config, of_a_run=True)
    prepared = Prepared(Path(known["folder"]), known["sentences"], known["fingerprint"])
    if not prepared.folder.is_dir():
        raise UserError(f"The data of {folder} is no longer in {prepared.folder}: run --stage prepare again.")
    model = Run(recipe, Hardware(), prepared, folder).model
    gate = _gate_of(model)
    evaluates = recipe.score and (recipe.generate if recipe.kind == TRANSLATION else True)
    if gate is None or not evaluates or recipe.kind not in (TRANSLATION, CAUSAL_LM):
        why = "has no gates of MAE" if gate is None else "comes from a recipe that scores nothing"
        raise UserError(f"{model} {why}: there is no mixture to compare with.")
    return TrainedRun(folder, recipe, prepared, model, gate)


def _gate_of(checkpoint: Path) -> Optional[str]:
    state = load_checkpoint(checkpoint)
    settings = (state.get("cfg") or {}).get("model") or state.get("args")
    settings = settings if isinstance(settings, dict) else vars(settings)  # a dict: fairseq-hydra-train's
    return settings.get("mae_gate")


def evaluate_single_experts(
    run: TrainedRun,
    subset: str,
    draws: int,
    hardware: Hardware,
) -> Dict[str, Any]:
    """Evaluate a subset with the mixture, with the top experts and with `draws` random ones, and compare.

    Each goes through the run's own generate and score settings into RUN_DIR/single-expert/<which>, and is
    not done again while model and settings stay. A uniform gate has no top expert. Returns the report.
    """
    plan = [(MIXTURE, None), (TOP_EXPERT, None), *((RANDOM_EXPERT, seed) for seed in range(1, draws + 1))]
    scores: Dict[str, Dict[str, Any]] = {}
    with terminate_as_interrupt(), locked(run.folder) as lock:
        executor = Executor(hardware.environment, lock)
        for how, seed in plan:
            if how == TOP_EXPERT and run.gate == "uniform":
                log.info("%s is left out: the gates are uniform and prefer no expert.", TOP_EXPERT)
                continue
            name = how if seed is None else f"{how}-{seed}"
            log.info("%s:", name)
            part = _part(run, name, subset, {"mae_evaluate_with": how, "mae_evaluate_seed": seed or 1})
            part = dataclasses.replace(part, hardware=hardware, executor=executor)
            todo = EVALUATIONS[part.recipe.kind](part)
            for step in todo:
                carry_out(part, step)
            scores[name] = flat_metrics(scores_of(todo)[subset])
    return _report(run, subset, scores)


def _part(run: TrainedRun, name: str, subset: str, model_overrides: Dict[str, Any]) -> Run:
    """The run of its recipe, with one subset, the model's overrides and a folder of its own."""
    recipe, folder = run.recipe, run.folder / FOLDER / name
    section = "generate" if recipe.kind == TRANSLATION else "score"
    settings = getattr(recipe, section)
    overrides = {**ast.literal_eval(settings.flags.get("model-overrides", "{}")), **model_overrides}
    flags = {**settings.flags, "model-overrides": str(overrides)}
    settings = dataclasses.replace(settings, flags=flags, subsets=[subset])
    recipe = dataclasses.replace(recipe, **{section: settings})
    part = Run(recipe, Hardware(), run.prepared, folder, trained=run.model)
    trained = RunState(run.folder)
    for stage in ("train", "average"):  # where the model comes from
        if trained.get(stage):
            part.state.put(stage, **trained.get(stage))
    return part


def _report(run: TrainedRun, subset: str, scores: Dict[str, Dict[str, Any]]) -> Dict[str, Any]:
    """The scores and their differences to the mixture's; every number of each evaluation in `metrics`."""
    assert run.recipe.score is not None  # `open_run` has checked it
    metric = run.recipe.score.headline
    values = {name: metrics[metric] for name, metrics in scores.items()}
    mixture = values[MIXTURE]
    drawn = [value for name, value in values.items() if name.startswith(RANDOM_EXPERT)]
    report = {
        "experiment": run.recipe.experiment,
        "checkpoint": str(run.model),
        "subset": subset,
        "metric": metric,
        "gate": run.gate,
        "mixture": mixture,
        "top_expert": None,
        "random_expert": _spread(drawn, mixture) if drawn else None,
        "metrics": scores,
    }
    if TOP_EXPERT in values:
        top = values[TOP_EXPERT]
        report["top_expert"] = {"score": top, "difference": top - mixture}
    return report


def _spread(drawn: List[float], mixture: float) -> Dict[str, Any]:
    """sd: the sample standard deviation over the draws (the difference has the same); None for one draw."""
    mean = statistics.mean(drawn)
    sd = statistics.stdev(drawn) if len(drawn) > 1 else None
    return {"scores": drawn, "mean": mean, "sd": sd, "difference": mean - mixture}


def _table(report: Dict[str, Any]) -> str:
    """The paper's rows: score and difference to the mixture."""
    lines = [f"{report['metric']} on {report['subset']}, {report['checkpoint']} ({report['gate']} gates)"]
    lines.append(f"{'mixture':32}{report['mixture']:8.2f}")
    top, drawn = report["top_expert"], report["random_expert"]
    if top:
        lines.append(f"{'most specialised expert':32}{top['score']:8.2f}{top['difference']:+8.2f}")
    if drawn:
        label = f"one random expert, {len(drawn['scores'])} draw(s)"
        line = f"{label:32}{drawn['mean']:8.2f}{drawn['difference']:+8.2f}"
        lines.append(line if drawn["sd"] is None else f"{line} ± {drawn['sd']:.2f}")
    return "\n".join(lines)
