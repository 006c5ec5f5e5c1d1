"""What each kind of recipe does: a job lists the steps of a run."""

from __future__ import annotations

from typing import List

from moa_fairseq.recipes.jobs import causal_lm, classification, masked_lm, translation
from moa_fairseq.recipes.schema import CAUSAL_LM, CLASSIFICATION, MASKED_LM, TRANSLATION
from moa_fairseq.recipes.steps import Run, Step

JOBS = {
    TRANSLATION: translation,
    MASKED_LM: masked_lm,
    CAUSAL_LM: causal_lm,
    CLASSIFICATION: classification,
}


def steps(run: Run) -> List[Step]:
    """All steps of a run, in order: what --dry-run prints and what a run carries out."""
    return JOBS[run.recipe.kind].steps(run)
