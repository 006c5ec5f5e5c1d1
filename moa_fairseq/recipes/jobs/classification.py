"""A classifier of sentences: generated expressions, and the accuracy of their classes."""

from __future__ import annotations

from typing import List

from moa_fairseq.recipes.jobs.shared import preparing, scoring_of_the_model
from moa_fairseq.recipes.steps import Run, Step
from moa_fairseq.recipes.training import training_steps


def steps(run: Run) -> List[Step]:
    """Preparation of sentences and classes, training, average, scores."""
    return [*preparing(run), *training_steps(run), *scoring_of_the_model(run, "classifier")]
