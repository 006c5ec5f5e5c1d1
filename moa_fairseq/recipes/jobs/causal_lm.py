"""A causal language model: words, sub-words or bytes, and the perplexity by fairseq-eval-lm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List

from moa_fairseq.errors import UserError
from moa_fairseq.recipes.schema import Recipe, Score
from moa_fairseq.recipes.steps import OutputStep, Run
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


def evaluation(run: Run) -> List[OutputStep]:
    """fairseq-eval-lm on each subset, in fp32, so that scores do not depend on the hardware."""
    section = run.recipe.score or Score()

    def read(path: Path) -> Dict[str, Any]:
        return read_report(path.read_text(encoding="utf-8", errors="replace"), path, run.recipe)

    found = []
    for subset in section.subsets:
        values = {**run.task_flags(), "path": str(run.model), "gen-subset": subset, **section.flags}
        step = run.evaluation(
            "score",
            ["fairseq-eval-lm", positional(run.data), *flags(values), *run.device_flags()],
            run.folder / f"score-{subset}.json",
            section,
            captured=run.folder / f"eval-lm-{subset}.txt",
            errors_too=True,  # its log goes where whoever configured logging first wants it
            scores=read,
        )
        found.append(step)
    return found


def read_report(text: str, path: Path, recipe: Recipe) -> Dict[str, Any]:
    """fairseq-eval-lm's output as scores. Raises UserError if it holds no perplexity."""
    found, tokens = _PERPLEXITY.search(text), _TOKENS.search(text)
    if not found:
        raise UserError(f"fairseq-eval-lm printed no perplexity; its output is in {path}.")
    said = recipe.score.flags if recipe.score else {}
    evaluation = {name: said[name] for name in _SETTINGS if name in said}
    if tokens:
        evaluation["tokens"] = int(tokens.group(1).replace(",", ""))
    return {
        METRIC: {"score": float(found.group(2)), "loss_base2": float(found.group(1))},
        BITS: {"score": float(found.group(1))},
        "meta": {"evaluation": {name.replace("-", "_"): value for name, value in evaluation.items()}},
    }
