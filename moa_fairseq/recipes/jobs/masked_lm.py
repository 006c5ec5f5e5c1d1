"""A masked language model: GPT-2's BPE, and the perplexity of masked tokens."""

from __future__ import annotations

import logging
from typing import Any, List, Mapping

from moa_fairseq.data_prep.prepare import Prepared
from moa_fairseq.data_prep.prepare_text import TextPreparation, text_preprocess_flags
from moa_fairseq.recipes.jobs.shared import DataRequest, preparing, scoring_of_the_model
from moa_fairseq.recipes.steps import Run, Step
from moa_fairseq.recipes.training import training_steps

log = logging.getLogger(__name__)


def steps(run: Run) -> List[Step]:
    """Preparation, training, average, scores."""
    return [*preparing(run, _preprocess), *training_steps(run), *scoring_of_the_model(run, "masked-lm")]


def prepare(asked: DataRequest) -> Prepared:
    """Carry out the data section that is asked for. Raises UserError."""
    return TextPreparation(*asked[:5], log.info, downloads=asked.downloads).run()


def _preprocess(run: Run) -> List[Mapping[str, Any]]:
    return [text_preprocess_flags(run.root / "bpe", run.data, run.recipe.splits, run.recipe.data.flags)]
