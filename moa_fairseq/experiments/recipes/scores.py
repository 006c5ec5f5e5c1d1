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
    *("tokens-per-sample", "context-window", "carried-chunks", "batch-size"),
    *("sample-break-mode", "softmax-batch", "post-process", "remove-bpe"),
)


def scores_in(path: Path, recipe: Recipe, data: Path, subset: str) -> dict[str, Any]:
    """The scores that an evaluation of the recipe's kind wrote.

    Args:
        path: output of `moa-fairseq score --json` or fairseq-eval-lm.
        recipe: for its type and flags.
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


def read_report(text: str, path: Path, recipe: Recipe, wanted: int = 0) -> dict[str, Any]:
    """fairseq-eval-lm's output as scores.

    Args:
        text: the output.
        path: its file, for the error.
        recipe: for the flags of its evaluation.
        wanted: tokens of the data, all of which must be evaluated.

    Returns:
        Metric → "score" (lm_bits is the loss in bits per token); "meta": settings of the evaluation.

    Raises:
        UserError: if it has no perplexity, or fewer tokens.
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
        if count < wanted:
            length = recipe.training_flags.get("tokens-per-sample")
            raise UserError(
                f"{path}: fairseq-eval-lm evaluated {count:,} of {wanted:,} tokens, because it skips text "
                f"longer than the model's limit. Run the recipe again with --set "
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
        for key in ("score", "sd"):  # for a diverged model also a float, though not a number
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

    For running text, and without spaces between words, it is sacreBLEU with the language's tokeniser. A
    row's BLEU may include one compound split, done by the tokeniser (`-a`) or the BLEU pipeline: for text
    with the other type of hyphens, the other pipeline gives the same number.

    Args:
        recipe: of the run.
        published: the recipe without any --set.
        scores: of the recipe's first subset.
    """
    headline = (recipe.score or Score()).headline
    if recipe.data.running_text:
        return "sacrebleu"
    measured = scores.get("meta", {}).get("without_spaces") is True
    if recipe.kind == TRANSLATION and (measured or writes_no_spaces(recipe.data.target or "")):
        signature = str(scores.get("sacrebleu", {}).get("signature"))
        if headline != "sacrebleu" and not re.search(r"tok:(13a|none)\b", signature):
            log.warning(
                "the references have no spaces between words, but %s counts words: see sacrebleu",
                headline,
            )
            return "sacrebleu"
    dataset = datasets().get(published.data.recipe)
    split_once = {SPLIT: "multi_bleu", WHOLE: "compound_split_bleu"}
    hyphens = str((scores.get("meta", {}).get("hyphens") or {}).get("references"))
    expected = (published.score or Score()).headline
    is_of_split_text = expected == split_once[WHOLE] or (
        expected == split_once[SPLIT] and dataset is not None and dataset.splits_hyphens
    )
    if (
        not is_of_split_text
        or headline != expected
        or split_once.get(hyphens, headline) == headline
    ):
        return headline
    log.warning(
        "the references' hyphens are %s (%s): the BLEU after one compound split is %s, not %s",
        *(hyphens, "a @-@ b" if hyphens == SPLIT else "a-b", split_once[hyphens], headline),
    )
    return split_once[hyphens]


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
