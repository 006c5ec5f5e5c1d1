"""A classifier of sentences: generated expressions, and the accuracy of their classes."""

from __future__ import annotations

import logging
from typing import Any, List, Mapping

from moa_fairseq.data_prep.binarised import (
    INPUT,
    LABEL,
    check_classification,
    check_place,
    classification_flags,
)
from moa_fairseq.data_prep.catalogue import classification_sets
from moa_fairseq.data_prep.prepare import Prepared, given_fingerprint
from moa_fairseq.data_prep.prepare_classification import ClassificationPreparation
from moa_fairseq.recipes.jobs.shared import DataRequest, preparing, scoring_of_the_model
from moa_fairseq.recipes.steps import Run, Step
from moa_fairseq.recipes.training import training_steps

log = logging.getLogger(__name__)


def steps(run: Run) -> List[Step]:
    """Preparation of sentences and classes, training, average, scores."""
    return [*preparing(run, _preprocess), *training_steps(run), *scoring_of_the_model(run, "classifier")]


def prepare(asked: DataRequest) -> Prepared:
    """Draw the data set that is asked for, or use `source` as it is. Raises UserError."""
    source = asked.source
    if source is None:
        dataset = classification_sets()[asked.settings["recipe"]]
        return ClassificationPreparation(dataset, asked.root, asked.preprocess, log.info).run()
    check_place(source)
    lines = check_classification(source, asked.subsets)
    log.info("%s: binarised already; used as it is", source)
    return Prepared(source, lines, given_fingerprint(source / INPUT))


def _preprocess(run: Run) -> List[Mapping[str, Any]]:
    splits = classification_sets()[run.recipe.data.recipe].subsets
    return [classification_flags(run.root / "text", run.data, name, splits) for name in (INPUT, LABEL)]
