"""What each kind of recipe does: prepare its data, train, average, and evaluate in its own way."""

from __future__ import annotations

import functools
from typing import Callable, Dict, List

from moa_fairseq.recipes.jobs import causal_lm, translation
from moa_fairseq.recipes.jobs.shared import checkpoint_scores, preparing
from moa_fairseq.recipes.schema import CAUSAL_LM, CLASSIFICATION, MASKED_LM, TRANSLATION
from moa_fairseq.recipes.steps import OutputStep, Run, Step
from moa_fairseq.recipes.training import training_steps

EVALUATIONS: Dict[str, Callable[[Run], List[OutputStep]]] = {
    TRANSLATION: translation.evaluation,
    MASKED_LM: functools.partial(checkpoint_scores, flag="masked-lm"),
    CAUSAL_LM: causal_lm.evaluation,
    CLASSIFICATION: functools.partial(checkpoint_scores, flag="classifier"),
}


def steps(run: Run) -> List[Step]:
    """All steps of a run, in order: what --dry-run prints and what a run carries out."""
    return [*preparing(run), *training_steps(run), *EVALUATIONS[run.recipe.kind](run)]
