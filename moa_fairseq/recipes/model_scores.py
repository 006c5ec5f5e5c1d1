"""Scoring straight from a checkpoint, without translations: once, until model or settings change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Callable, Dict, List

from moa_fairseq.data_prep.prepare import Prepared
from moa_fairseq.data_prep.stage_folder import fingerprint_of
from moa_fairseq.recipes import commands
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.schema import CLASSIFICATION, MASKED_LM, Recipe
from moa_fairseq.recipes.stages import Run, origin_of_model, read_scores, require_model, run_scoring, stamp
from moa_fairseq.running import command_line

# the flag of `moa-fairseq score` that takes the checkpoint
_MODEL_FLAGS = {MASKED_LM: "masked-lm", CLASSIFICATION: "classifier"}


def score_command(recipe: Recipe, hardware: Hardware, paths: commands.RunPaths, subset: str) -> List[str]:
    """The scoring of one subset, as JSON on stdout; in fp32, so that scores do not depend on the hardware."""
    values = {
        _MODEL_FLAGS[recipe.kind]: str(paths.model(recipe)),
        "data": str(paths.data),
        "subset": subset,
        **recipe.score.flags,
        "json": True,
    }
    scores = paths.save_dir / f"score-{subset}.json"
    device = commands.device_flags(hardware)
    return ["moa-fairseq", "score", *command_line.flags(values), *device, command_line.REDIRECT, str(scores)]


def score(run: Run, prepared: Prepared, subset: str) -> Dict[str, Any]:
    """Score one subset; returns what `score-<subset>.json` holds. Raises UserError without a whole model."""
    command = score_command(run.recipe, run.hardware, run.paths, subset)
    return score_once(run, prepared, subset, lambda output: run_scoring(run, command, output))


def score_once(
    run: Run, prepared: Prepared, subset: str, evaluate: Callable[[Path], Dict[str, Any]]
) -> Dict[str, Any]:
    """What `score-<subset>.json` holds, made by `evaluate(that path)` unless it was made before.

    Raises UserError without a whole model.
    """
    model, output = require_model(run), run.folder / f"score-{subset}.json"
    settings = dataclasses.asdict(run.recipe.score)
    stage, done = f"score-{subset}", fingerprint_of(stamp(model), settings, prepared.fingerprint)
    if run.state.is_done(stage, done, output):
        run.say(f"{stage}: done before ({output})")
        scores = read_scores(output)
    else:
        scores = evaluate(output)
    run.state.put(stage, done=done, settings=settings, **origin_of_model(run))
    return scores
