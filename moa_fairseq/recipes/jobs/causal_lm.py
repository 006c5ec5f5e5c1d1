"""A causal language model: words, sub-words or bytes, and the perplexity by fairseq-eval-lm."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Dict, List

from moa_fairseq.errors import UserError
from moa_fairseq.recipes.jobs.shared import preparing
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.recipes.steps import Run, Step, keep_scores
from moa_fairseq.recipes.training import training_steps
from moa_fairseq.running.command_line import flags, positional

METRIC, BITS = "lm_ppl", "lm_bits"  # bits: of a token, which is a byte of enwik8
_FLOAT = r"(\d+(?:\.\d+)?|inf|nan)"
_PERPLEXITY = re.compile(rf"Loss \(base 2\): {_FLOAT}, Perplexity: {_FLOAT}\s*$", re.MULTILINE)
_TOKENS = re.compile(r"Evaluated (\d{1,3}(?:,\d{3}){0,6}) tokens")
# Settings of fairseq-eval-lm that belong to the number, in the order in which they are reported.
_SETTINGS = (
    *("tokens-per-sample", "context-window", "carried-chunks", "batch-size"),
    *("sample-break-mode", "softmax-batch"),
)


def steps(run: Run) -> List[Step]:
    """Preparation, training, average, an evaluation of each subset."""
    evaluations = (_evaluation(run, subset) for subset in run.recipe.subsets)
    return [*preparing(run), *training_steps(run), *evaluations]


def _evaluation(run: Run, subset: str) -> Step:
    """fairseq-eval-lm, in fp32, so that scores do not depend on the hardware."""
    section, output = run.recipe.score, run.folder / f"score-{subset}.json"
    captured = run.folder / f"eval-lm-{subset}.txt"
    values = {**run.task_flags(), "path": str(run.model), "gen-subset": subset, **section.flags}

    def read(report: Path) -> Dict[str, Any]:
        return read_report(report.read_text(encoding="utf-8", errors="replace"), report, run.recipe)

    return Step(
        output.stem,
        "score",
        ["fairseq-eval-lm", positional(run.data), *flags(values), *run.device_flags()],
        lambda: run.model_inputs(section),
        output,
        captured,
        errors_too=True,  # its log goes where whoever configured logging first wants it
        finish=functools.partial(keep_scores, captured, output, read),
        remember=lambda: run.model_origin(section),
    )


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
