"""The headline of a run: the metric that is its result, and that a paper's number is compared with."""

import logging
import re
from typing import Any

from moa_fairseq.experiments.data.catalogue import datasets
from moa_fairseq.experiments.data.parallel_text import SPLIT, WHOLE
from moa_fairseq.experiments.recipes.schema import TRANSLATION, Recipe, Score
from moa_fairseq.experiments.scoring.chains import SACREBLEU
from moa_fairseq.text.languages import writes_no_spaces

log = logging.getLogger(__name__)
# Form of the references' hyphens → the BLEU after one compound split: the text or the pipeline splits them.
_BLEU_OF_HYPHENS = {SPLIT: "multi_bleu", WHOLE: "compound_split_bleu"}
_EXAMPLES = {SPLIT: "a @-@ b", WHOLE: "a-b"}


def headline_of(recipe: Recipe, published: Recipe, scores: dict[str, Any]) -> str:
    """The metric of a run's result: the recipe's, unless the references need another.

    For running text, and for text without spaces, it is sacreBLEU with the language's tokeniser. For a BLEU
    after one compound split, it is the BLEU that gives this number for the references' hyphens.

    Args:
        recipe: the recipe of the run.
        published: the recipe without any --set.
        scores: the scores of the recipe's first subset, see `scores_in`.
    """
    headline = (recipe.score or Score()).headline
    if recipe.data.running_text:
        return SACREBLEU
    signature = str(scores.get("sacrebleu", {}).get("signature"))
    counts_words = re.search(r"tok:(13a|none)\b", signature)
    if _has_no_spaces(recipe, scores) and not counts_words:
        if headline != SACREBLEU:
            problem = (
                "the references have no spaces between words, but %s counts words: see sacrebleu"
            )
            log.warning(problem, headline)
        return SACREBLEU
    is_own_choice = headline != (published.score or Score()).headline
    if is_own_choice or not _is_after_one_split(headline, published):
        return headline
    return _bleu_after_one_split(headline, scores)


def _has_no_spaces(recipe: Recipe, scores: dict[str, Any]) -> bool:
    """Whether the references have no spaces between words, by their text or their language."""
    if recipe.kind != TRANSLATION:
        return False
    measured = scores.get("meta", {}).get("without_spaces") is True
    return measured or writes_no_spaces(recipe.data.target or "")


def _is_after_one_split(headline: str, published: Recipe) -> bool:
    """Whether a recipe's BLEU counts words whose compounds are split once, by the data or by the metric."""
    if headline == _BLEU_OF_HYPHENS[WHOLE]:
        return True
    dataset = datasets().get(published.data.recipe)
    data_splits = dataset is not None and dataset.splits_hyphens
    return data_splits and headline == _BLEU_OF_HYPHENS[SPLIT]


def _bleu_after_one_split(headline: str, scores: dict[str, Any]) -> str:
    """The BLEU after one compound split, by the hyphens of the run's references.

    For example, a paper's BLEU is compound_split_bleu, whose pipeline splits a-b into a @-@ b. If the
    tokeniser of the run (`-a`) has split the hyphens of the references, multi_bleu gives the same number.
    """
    hyphens = str((scores.get("meta", {}).get("hyphens") or {}).get("references"))
    bleu = _BLEU_OF_HYPHENS.get(hyphens, headline)
    if bleu != headline:
        log.warning(
            "the references' hyphens are %s (%s): the BLEU after one compound split is %s, not %s",
            hyphens,
            _EXAMPLES[hyphens],
            bleu,
            headline,
        )
    return bleu
