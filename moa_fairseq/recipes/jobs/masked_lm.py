"""A masked language model: GPT-2's BPE, and the perplexity of masked tokens."""

from __future__ import annotations

from typing import List

from moa_fairseq.recipes.jobs.shared import preparing, scoring_of_the_model
from moa_fairseq.recipes.steps import Run, Step
from moa_fairseq.recipes.training import training_steps


def steps(run: Run) -> List[Step]:
    """Preparation, training, average, scores."""
    return [*preparing(run), *training_steps(run), *scoring_of_the_model(run, "masked-lm")]
