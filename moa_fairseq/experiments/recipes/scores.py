"""The output of evaluation programs: read, checked, and in one line."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import datasets
from moa_fairseq.experiments.data.parallel_text import SPLIT, WHOLE
from moa_fairseq.experiments.data.unknown import count_symbols
from moa_fairseq.experiments.recipes.batch import sentence_sizes
from moa_fairseq.experiments.recipes.schema import (
    CAUSAL_LM,
    HEADLINE_METRICS,
    TRANSLATION,
    Recipe,
    Score,
)
from moa_fairseq.experiments.records.json_files import (
    MAPPING,
    TEXT,
    check_kinds,
    is_number,
    read_json,
)
from moa_fairseq.experiments.scoring.chains import CHAINS, DEFAULT_CHAINS
from moa_fairseq.text.languages import writes_no_spaces

log = logging.getLogger(__name__)
_FLOAT = r"(\d+(?:\.\d+)?|inf|nan)"
_PERPLEXITY = re.compile(rf"Loss \(base 2\): {_FLOAT}, Perplexity: {_FLOAT}\s*$", re.MULTILINE)
_TOKENS = re.compile(r"Evaluated (\d{1,3}(?:,\d{3}){0,6}) tokens")
_OWN_BLOCK = re.compile(r"--tokens-per-sample (\d{1,18}): the model's own$", re.MULTILINE)
# Settings of fairseq-eval-lm that belong to the number, in the order in which they are reported.
_SETTINGS = (
    "tokens-per-sample",
    "context-window",
    "carried-chunks",
    "batch-size",
    "sample-break-mode",
    "softmax-batch",
    "post-process",
    "remove-bpe",
)
# Form of the references' hyphens → the BLEU after one compound split: the text or the pipeline splits them.
_BLEU_OF_HYPHENS = {SPLIT: "multi_bleu", WHOLE: "compound_split_bleu"}
_EXAMPLES = {SPLIT: "a @-@ b", WHOLE: "a-b"}


def scores_in(path: Path, recipe: Recipe, data: Path, subset: str) -> dict[str, Any]:
    """The scores that an evaluation of the recipe's kind wrote.

    Args:
        path: output of `moa-fairseq score --json` or fairseq-eval-lm.
        recipe: the recipe; its type of model and its flags are read.
        data: the binarised folder.
        subset: the evaluated subset.

    Returns:
        Metric → "score" and more; "meta": settings of the evaluation, for a language model with the share of
        <unk> among the symbols.

    Raises:
        UserError: for a damaged file, or if it covers only a part of the subset.
    """
    if recipe.kind != CAUSAL_LM:
        return read_scores(path)
    sizes, _ = sentence_sizes(recipe, data, subset)
    # "complete_doc" takes empty lines for document ends
    counts_empty = (recipe.score or Score()).flags.get("sample-break-mode") != "complete_doc"
    tokens = int(sizes[sizes > (0 if counts_empty else 1)].sum())
    scores = read_report(path.read_text(encoding="utf-8", errors="replace"), path, recipe, tokens)
    (symbols,) = count_symbols(data, (), [subset]).values()
    scores["meta"]["evaluation"]["unknown"] = round(symbols.share, 6)
    return scores


def read_report(
    text: str, path: Path, recipe: Recipe, data_tokens: int | None = None
) -> dict[str, Any]:
    """fairseq-eval-lm's output as scores.

    Args:
        text: the output.
        path: the file of the output, for the error.
        recipe: the recipe, whose flags of the evaluation are reported.
        data_tokens: the number of tokens of the data, all of which must be evaluated (None: not checked).

    Returns:
        Metric → "score" (lm_bits is the loss in bits per token); "meta": settings of the evaluation.

    Raises:
        UserError: if the output has no perplexity, or if fewer tokens were evaluated.
    """
    perplexity = _PERPLEXITY.search(text)
    tokens = _TOKENS.search(text)
    if not perplexity:
        raise UserError(f"fairseq-eval-lm printed no perplexity; its output is in {path}.")
    settings = recipe.score.flags if recipe.score else {}
    evaluation = {name.replace("-", "_"): settings[name] for name in _SETTINGS if name in settings}
    if block := _OWN_BLOCK.search(text):  # replaces a default that is too long
        evaluation["tokens_per_sample"] = int(block.group(1))
    if tokens:
        evaluation["tokens"] = count = int(tokens.group(1).replace(",", ""))
        if data_tokens and count < data_tokens:
            length = recipe.training_flags.get("tokens-per-sample")
            raise UserError(
                f"{path}: fairseq-eval-lm evaluated {count:,} of {data_tokens:,} tokens, because it skips "
                f"text longer than the model's limit. Run the recipe again with --set "
                f"score.flags.tokens-per-sample={length} and score.flags.sample-break-mode=none."
            )
    return {
        "lm_ppl": {"score": float(perplexity.group(2)), "loss_base2": float(perplexity.group(1))},
        "lm_bits": {"score": float(perplexity.group(1))},  # per token, which is a byte in enwik8
        "meta": {"evaluation": evaluation},
    }


def read_scores(path: Path) -> dict[str, Any]:
    """The output of `moa-fairseq score --json`, without null values.

    Raises:
        UserError: for a damaged file.
        FileNotFoundError: if there is no file.
    """
    remedy = "It should be the output of moa-fairseq score --json. Delete it and run --stage score again."
    scores = read_json(path, remedy)
    metrics = dict.fromkeys(HEADLINE_METRICS, MAPPING)
    check_kinds(scores, metrics | {"meta": MAPPING, "sacrebleu_signature": TEXT}, str(path), remedy)
    scores = {name: value for name, value in scores.items() if value is not None}
    check_kinds(
        scores.get("meta", {}),
        dict.fromkeys(("evaluation", "hyphens"), MAPPING),
        f"{path}: meta",
        remedy,
    )
    for name in metrics.keys() & scores.keys():
        check_kinds(
            scores[name], {"signature": TEXT}, f"{path}: {name}", remedy, required=("score",)
        )
        for key in ("score", "sd"):  # a diverged model has NaN or infinity
            value = scores[name].get(key)
            if not (value is None or isinstance(value, float) or is_number(value)):
                raise UserError(f"{path}: {name}.{key} is not a number. {remedy}")
    return scores


def flat_metrics(scores: dict[str, Any]) -> dict[str, Any]:
    """{'multi_bleu': {'score': x, ...}, ...} → {'multi_bleu': x, ..., 'sacrebleu_signature': '...'}."""
    metrics = {}
    for name in HEADLINE_METRICS:
        if name in scores:
            value = scores[name]["score"]
            # JSON has neither infinity nor NaN, the scores of a diverged model.
            metrics[name] = value if is_number(value) else None
    for name in list(metrics):
        deviation = scores[name].get("sd")
        if is_number(deviation):
            metrics[f"{name}_sd"] = deviation
    signature = scores.get("sacrebleu", {}).get("signature") or scores.get("sacrebleu_signature")
    if signature:
        metrics["sacrebleu_signature"] = signature
    return metrics


def headline_of(recipe: Recipe, published: Recipe, scores: dict[str, Any]) -> str:
    """The metric of a run's result, which depends on its references.

    For running text it is sacreBLEU with the language's tokeniser.

    Args:
        recipe: the recipe of the run.
        published: the recipe without any --set.
        scores: the scores of the recipe's first subset.
    """
    if recipe.data.running_text:
        return "sacrebleu"
    headline = (recipe.score or Score()).headline
    if _has_no_spaces(recipe, scores):
        headline = _headline_without_spaces(headline, scores)
    return _headline_of_hyphens(headline, published, scores)


def _has_no_spaces(recipe: Recipe, scores: dict[str, Any]) -> bool:
    """Whether the references have no spaces between words, by their text or their language."""
    if recipe.kind != TRANSLATION:
        return False
    measured = scores.get("meta", {}).get("without_spaces") is True
    return measured or writes_no_spaces(recipe.data.target or "")


def _headline_without_spaces(headline: str, scores: dict[str, Any]) -> str:
    """sacreBLEU instead of a metric that counts words, if its tokeniser does not need spaces."""
    signature = str(scores.get("sacrebleu", {}).get("signature"))
    if headline == "sacrebleu" or re.search(r"tok:(13a|none)\b", signature):
        return headline
    log.warning(
        "the references have no spaces between words, but %s counts words: see sacrebleu", headline
    )
    return "sacrebleu"


def _headline_of_hyphens(headline: str, published: Recipe, scores: dict[str, Any]) -> str:
    """The BLEU after one compound split, if the recipe's headline is this BLEU for other hyphens.

    For example, a paper's BLEU is compound_split_bleu, whose pipeline splits a-b into a @-@ b. If the
    tokeniser of the run (`-a`) has split the hyphens of the references, multi_bleu gives the same number.
    """
    if headline != (published.score or Score()).headline:
        return headline  # the user's own choice
    if not _is_after_one_split(headline, published):
        return headline
    hyphens = str((scores.get("meta", {}).get("hyphens") or {}).get("references"))
    bleu = _BLEU_OF_HYPHENS.get(hyphens, headline)
    if bleu == headline:
        return headline
    log.warning(
        "the references' hyphens are %s (%s): the BLEU after one compound split is %s, not %s",
        hyphens,
        _EXAMPLES[hyphens],
        bleu,
        headline,
    )
    return bleu


def _is_after_one_split(headline: str, published: Recipe) -> bool:
    """Whether a recipe's BLEU counts words whose compounds are split once, by the data or by the metric."""
    if headline == _BLEU_OF_HYPHENS[WHOLE]:
        return True
    dataset = datasets().get(published.data.recipe)
    data_splits = dataset is not None and dataset.splits_hyphens
    return data_splits and headline == _BLEU_OF_HYPHENS[SPLIT]


def describe(headline: str, scores: dict[str, dict[str, Any]], paper: float | None = None) -> str:
    """The scores in one line: for each subset the headline metric and additionally requested metrics.

    Args:
        headline: the metric.
        scores: subset → its scores, see `scores_in`.
        paper: the number of the reproduced row.
    """
    names = [headline]
    for name in CHAINS:
        if name not in DEFAULT_CHAINS and CHAINS[name].key != headline:
            names.append(CHAINS[name].key)
    parts = []
    for subset, values in scores.items():
        texts = [f"{name} {values[name]['score']:.2f}" for name in names if name in values]
        share = (values.get("meta", {}).get("evaluation") or {}).get("unknown")
        unknown = ""
        if is_number(share):
            unknown = f" ({share:.2%} of its symbols are <unk>)"
        parts.append(f"{', '.join(texts)} on {subset}{unknown}" if texts else f"{subset} scored")
    return ", ".join(parts) + (f"; the paper prints {paper}" if paper is not None else "")
