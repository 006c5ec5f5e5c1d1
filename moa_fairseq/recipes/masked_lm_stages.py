"""The last stage of a masked language model: its perplexity on each subset, straight from the checkpoint."""

from __future__ import annotations

from typing import Any, Dict, List

from moa_fairseq.data_prep.prepare import Prepared
from moa_fairseq.recipes import commands
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.model_scores import score_once
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.recipes.stages import Run, run_scoring
from moa_fairseq.running import command_line


def score_command(recipe: Recipe, hardware: Hardware, paths: commands.RunPaths, subset: str) -> List[str]:
    """The scoring of one subset, as JSON on stdout; in fp32, so that scores do not depend on the hardware."""
    values = {
        "masked-lm": str(paths.model(recipe)),
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
