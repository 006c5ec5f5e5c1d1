"""Scoring straight from a checkpoint, as language models are: once, until model or settings change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Callable, Dict

from moa_fairseq.data_prep.prepare import Prepared
from moa_fairseq.data_prep.stage_folder import fingerprint_of
from moa_fairseq.recipes.stages import Run, origin_of_model, read_scores, require_model, stamp


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
