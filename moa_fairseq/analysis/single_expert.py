"""What a trained MAE loses when each module uses one expert instead of the mixture (MAE Table 5)."""

from __future__ import annotations

import ast
import dataclasses
import logging
import statistics
from pathlib import Path
from typing import Any, Dict, List, Optional

import yaml

from moa_fairseq.attention.single_expert import MIXTURE, RANDOM_EXPERT, TOP_EXPERT
from moa_fairseq.data_prep.prepare import Prepared
from moa_fairseq.errors import UserError
from moa_fairseq.fairseq_compat import load_checkpoint
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.jobs import steps
from moa_fairseq.recipes.loading import build
from moa_fairseq.recipes.result import flat_metrics
from moa_fairseq.recipes.run_folder import RunState
from moa_fairseq.recipes.runner import scores_of
from moa_fairseq.recipes.schema import CAUSAL_LM, TRANSLATION, Recipe
from moa_fairseq.recipes.steps import Run, carry_out
from moa_fairseq.running.folder_lock import locked
from moa_fairseq.running.process import Executor, terminate_as_interrupt

log = logging.getLogger(__name__)

FOLDER = "single-expert"  # in the run folder: one folder for each way to evaluate


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A finished run: its resolved recipe, its data, the checkpoint to evaluate and that one's --mae-gate."""

    folder: Path
    recipe: Recipe
    prepared: Prepared
    model: Path
    gate: str


def open_run(folder: Path) -> TrainedRun:
    """Raises UserError if the folder is none of a trained MAE, or if its recipe evaluates nothing."""
    config, known = folder / "recipe.yaml", RunState(folder).get("prepare")
    if not config.is_file() or not known:
        raise UserError(
            f"{folder} is no run folder of `moa-fairseq recipe`: it lacks recipe.yaml or state.json."
        )
    recipe = build(Recipe, yaml.safe_load(config.read_text(encoding="utf-8")), str(config), "")
    prepared = Prepared(Path(known["folder"]), known["sentences"], known["fingerprint"])
    if not prepared.folder.is_dir():
        raise UserError(f"The data of {folder} is no longer in {prepared.folder}: run --stage prepare again.")
    model = Run(recipe, Hardware(), prepared.folder, folder).model
    gate = _gate_of(model)
    evaluates = recipe.score and (recipe.generate if recipe.kind == TRANSLATION else True)
    if gate is None or not evaluates or recipe.kind not in (TRANSLATION, CAUSAL_LM):
        why = "has no gates of MAE" if gate is None else "comes from a recipe that scores nothing"
        raise UserError(f"{model} {why}: there is no mixture to compare with.")
    return TrainedRun(folder, recipe, prepared, model, gate)


def _gate_of(checkpoint: Path) -> Optional[str]:
    state = load_checkpoint(checkpoint)
    settings = (state.get("cfg") or {}).get("model") or state.get("args")
    settings = settings if isinstance(settings, dict) else vars(settings)  # of fairseq-hydra-train, or not
    return settings.get("mae_gate")


def evaluate_single_experts(
    run: TrainedRun,
    subset: str,
    draws: int,
    hardware: Hardware,
    environment: Optional[Dict[str, str]] = None,
) -> Dict[str, Any]:
    """Evaluate a subset with the mixture, with the top experts and with `draws` random ones, and compare.

    Each goes through the run's own generate and score settings into RUN_DIR/single-expert/<which>, and is
    not done again while model and settings stay. A uniform gate has no top expert. Returns the report.
    """
    plan = [(MIXTURE, None), (TOP_EXPERT, None), *((RANDOM_EXPERT, seed) for seed in range(1, draws + 1))]
    scores: Dict[str, Dict[str, Any]] = {}
    with terminate_as_interrupt(), locked(run.folder) as lock:
        executor = Executor(environment, lock)
        for how, seed in plan:
            if how == TOP_EXPERT and run.gate == "uniform":
                log.info("%s is left out: the gates are uniform and prefer no expert.", TOP_EXPERT)
                continue
            name = how if seed is None else f"{how}-{seed}"
            log.info("%s:", name)
            part = _part(run, name, subset, {"mae_evaluate_with": how, "mae_evaluate_seed": seed or 1})
            part = dataclasses.replace(part, hardware=hardware, executor=executor)
            todo = [step for step in steps(part) if step.stage in ("generate", "score")]
            for step in todo:
                carry_out(part, step)
            scores[name] = flat_metrics(scores_of(todo)[subset])
    return _report(run, subset, scores)


def _part(run: TrainedRun, name: str, subset: str, model_overrides: Dict[str, Any]) -> Run:
    """The run as its recipe has it, but for one subset, the model's overrides and a folder of its own."""
    recipe, folder = run.recipe, run.folder / FOLDER / name
    section = "generate" if recipe.kind == TRANSLATION else "score"
    settings = getattr(recipe, section)
    overrides = {**ast.literal_eval(settings.flags.get("model-overrides", "{}")), **model_overrides}
    flags = {**settings.flags, "model-overrides": str(overrides)}
    settings = dataclasses.replace(settings, flags=flags, subsets=[subset])
    recipe = dataclasses.replace(recipe, **{section: settings})
    part = Run(recipe, Hardware(), run.prepared.folder, folder, trained=run.model, prepared=run.prepared)
    trained = RunState(run.folder)
    for stage in ("train", "average"):  # where the model comes from
        if trained.get(stage):
            part.state.put(stage, **trained.get(stage))
    return part


def _report(run: TrainedRun, subset: str, scores: Dict[str, Dict[str, Any]]) -> Dict[str, Any]:
    """The scores and their differences to the mixture's; every number of each evaluation in `metrics`."""
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
