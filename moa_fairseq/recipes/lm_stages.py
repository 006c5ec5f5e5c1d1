"""What is particular to a causal language model's recipe: its perplexity by fairseq-eval-lm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, List

from moa_fairseq.data_prep.binarised import Prepared
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write
from moa_fairseq.recipes import commands
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.model_scores import score_once
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.recipes.stages import Run
from moa_fairseq.running import command_line

METRIC, BITS = "lm_ppl", "lm_bits"  # bits: of a token, which is a byte of enwik8
_FLOAT = r"(\d+(?:\.\d+)?|inf|nan)"
_PERPLEXITY = re.compile(rf"Loss \(base 2\): {_FLOAT}, Perplexity: {_FLOAT}\s*$", re.MULTILINE)
_TOKENS = re.compile(r"Evaluated (\d{1,3}(?:,\d{3}){0,6}) tokens")
# Settings of fairseq-eval-lm that belong to the number, in the order in which they are reported.
_SETTINGS = (
    *("tokens-per-sample", "context-window", "carried-chunks", "batch-size"),
    *("sample-break-mode", "softmax-batch"),
)


def score_command(recipe: Recipe, hardware: Hardware, paths: commands.RunPaths, subset: str) -> List[str]:
    """The evaluation of one subset; in fp32, so that scores do not depend on the hardware."""
    values = {
        "user-dir": str(paths.user_dir),
        "task": recipe.train.task,
        "path": str(paths.model(recipe)),
        "gen-subset": subset,
        **recipe.score.flags,
    }
    device = commands.device_flags(hardware)
    return ["fairseq-eval-lm", command_line.positional(paths.data), *command_line.flags(values), *device]


def score(run: Run, prepared: Prepared, subset: str) -> Dict[str, Any]:
    """Score one subset; returns what `score-<subset>.json` holds. Raises UserError without a whole model."""

    def evaluate(output: Path) -> Dict[str, Any]:
        command = score_command(run.recipe, run.hardware, run.paths, subset)
        run.show(command)
        report = run.folder / f"eval-lm-{subset}.txt"
        # Where its log goes depends on who configured logging first: standard output, or standard error.
        run.executor.run(command, run.log(output.stem), output=report, errors_too=True)
        scores = read_report(report.read_text(encoding="utf-8", errors="replace"), report, run.recipe)
        with atomic_write(output) as stream:
            json.dump(scores, stream, indent=1)
        return scores

    return score_once(run, prepared, subset, evaluate)


def read_report(text: str, path: Path, recipe: Recipe) -> Dict[str, Any]:
    """fairseq-eval-lm's output as scores. Raises UserError if it holds no perplexity."""
    found, tokens = _PERPLEXITY.search(text), _TOKENS.search(text)
    if not found:
        raise UserError(f"fairseq-eval-lm printed no perplexity; its output is in {path}.")
    evaluation = {name: recipe.score.flags[name] for name in _SETTINGS if name in recipe.score.flags}
    if tokens:
        evaluation["tokens"] = int(tokens.group(1).replace(",", ""))
    return {
        METRIC: {"score": float(found.group(2)), "loss_base2": float(found.group(1))},
        BITS: {"score": float(found.group(1))},
        "meta": {"evaluation": {name.replace("-", "_"): value for name, value in evaluation.items()}},
    }
