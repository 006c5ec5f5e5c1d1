"""The headline of a run: the metric that is its result, and that a paper's number is compared with.

A paper's BLEU may count words whose compounds are split once, a-b into a @-@ b. If the references are split
already, the metric is multi_bleu; if they are whole, it is compound_split_bleu, whose pipeline splits them.
"""

import logging
import re

from moa_fairseq.experiments.data.catalogue import datasets
from moa_fairseq.experiments.data.parallel_text import SPLIT, WHOLE
from moa_fairseq.experiments.recipes.schema import TRANSLATION, Recipe, Score
from moa_fairseq.experiments.recipes.scores import Scores
from moa_fairseq.experiments.scoring.chains import SACREBLEU
from moa_fairseq.text.languages import writes_no_spaces

log = logging.getLogger(__name__)
# Form of the references' hyphens → the BLEU of words whose compounds are split once
_SPLIT_BLEU = {SPLIT: "multi_bleu", WHOLE: "compound_split_bleu"}
_EXAMPLES = {SPLIT: "a @-@ b", WHOLE: "a-b"}


def headline_of(recipe: Recipe, published: Recipe, scores: Scores) -> str:
    """The metric of a run's result: the recipe's, unless the references need another.

    For running text, and for text without spaces, it is sacreBLEU with the language's tokeniser. For the
    BLEU of split compounds, the form of the references' hyphens decides.

    Args:
        recipe: the recipe of the run.
        published: the recipe without any --set.
        scores: the scores of the recipe's first subset, see `scores_in`.
    """
    headline = (recipe.score or Score()).headline
    if recipe.data.running_text:
        return SACREBLEU
    signature = str(scores.get("sacrebleu", {}).get("signature"))
    has_word_tokeniser = re.search(r"tok:(13a|none)\b", signature)
    if _has_no_spaces(recipe, scores) and not has_word_tokeniser:
        if headline != SACREBLEU:
            log.warning(
                "the references have no spaces between words, but %s counts words: see sacrebleu",
                headline,
            )
        return SACREBLEU
    published_headline = (published.score or Score()).headline
    if headline == published_headline and _counts_split_compounds(headline, published):
        return _split_bleu(headline, scores)
    return headline


def _has_no_spaces(recipe: Recipe, scores: Scores) -> bool:
    """Whether the references have no spaces between words, by their text or their language."""
    if recipe.kind != TRANSLATION:
        return False
    measured = scores.get("meta", {}).get("without_spaces") is True
    return measured or writes_no_spaces(recipe.data.target or "")


def _counts_split_compounds(headline: str, published: Recipe) -> bool:
    """Whether a recipe's BLEU counts words whose compounds are split once, by the data or by the metric."""
    dataset = datasets().get(published.data.recipe)
    if dataset and dataset.splits_hyphens and headline == _SPLIT_BLEU[SPLIT]:
        return True
    return headline == _SPLIT_BLEU[WHOLE]


def _split_bleu(headline: str, scores: Scores) -> str:
    """The BLEU of split compounds for the references' hyphens, which the run's tokeniser may have split."""
    hyphens = str((scores.get("meta", {}).get("hyphens") or {}).get("references"))
    bleu = _SPLIT_BLEU.get(hyphens, headline)
    if bleu != headline:
        log.warning(
            "the references' hyphens are %s (%s): the BLEU after one compound split is %s, not %s",
            hyphens,
            _EXAMPLES[hyphens],
            bleu,
            headline,
        )
    return bleu
