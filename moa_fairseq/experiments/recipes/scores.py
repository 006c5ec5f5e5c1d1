"""The scores that an evaluation program wrote, read and checked.

Scores are a dictionary. A metric, one of HEADLINE_METRICS, has a dictionary with its "score" and what belongs
to the number, such as sacreBLEU's "signature" and the standard deviation "sd". "meta" has the settings of the
evaluation and what was measured of its text.

  multi_bleu, compound_split_bleu, get_ende_bleu, moa_release_bleu   BLEU, see `scoring/chains.py`
  sacrebleu                                                          sacreBLEU of running text
  masked_lm_ppl, masked_lm_text_ppl, masked_lm_word_ppl              see `scoring/masked_lm.py`
  lm_ppl, lm_bits                                                    perplexity, and bits per token
  accuracy                                                           see `scoring/classification.py`
"""

import re
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.unknown import count_symbols
from moa_fairseq.experiments.recipes.batch import sentence_sizes
from moa_fairseq.experiments.recipes.schema import (
    CAUSAL_LM,
    HEADLINE_METRICS,
    Recipe,
)
from moa_fairseq.experiments.records.json_files import (
    MAPPING,
    TEXT,
    Values,
    check_kinds,
    is_number,
    read_json,
)
from moa_fairseq.experiments.scoring.chains import CHAINS, DEFAULT_CHAINS

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
Scores = dict[str, Any]  # metric → its score and details; "meta" → facts about the evaluation


def scores_in(path: Path, recipe: Recipe, data: Path, subset: str) -> Scores:
    """The scores of a subset, in the output of the program that evaluates the recipe's kind of model.

    Args:
        path: output of `moa-fairseq score --json` or fairseq-eval-lm.
        recipe: the recipe; its type of model and its flags are read.
        data: the binarised folder.
        subset: the evaluated subset.

    Returns:
        The scores; for a language model with the share of <unk> among the symbols.

    Raises:
        UserError: for a damaged file, or if it covers only a part of the subset.
    """
    if recipe.kind != CAUSAL_LM:
        return read_scores(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    scores = read_report(text, path, recipe, _tokens_to_evaluate(recipe, data, subset))
    (symbols,) = count_symbols(data, (), [subset]).values()
    scores["meta"]["evaluation"]["unknown"] = round(symbols.share, 6)
    return scores


def _tokens_to_evaluate(recipe: Recipe, data: Path, subset: str) -> int:
    sizes, _ = sentence_sizes(recipe, data, subset)
    if recipe.score and recipe.score.flags.get("sample-break-mode") == "complete_doc":
        sizes = sizes[sizes > 1]  # an empty line, of one token, is the end of a document
    return int(sizes.sum())


def read_report(text: str, path: Path, recipe: Recipe, data_tokens: int | None = None) -> Scores:
    """fairseq-eval-lm's output as scores.

    Args:
        text: the output.
        path: the file of the output, for the error.
        recipe: the recipe, whose flags of the evaluation are reported.
        data_tokens: the number of tokens of the data, all of which must be evaluated (None: not checked).

    Raises:
        UserError: if the output has no perplexity, or if fewer tokens were evaluated.
    """
    match = _PERPLEXITY.search(text)
    if not match:
        raise UserError(f"fairseq-eval-lm printed no perplexity; its output is in {path}.")
    bits, perplexity = map(float, match.groups())
    evaluation = _evaluation(text, recipe)
    tokens = evaluation.get("tokens")
    if tokens is not None and data_tokens is not None and tokens < data_tokens:
        length = recipe.training_flags.get("tokens-per-sample")
        raise UserError(
            f"{path}: fairseq-eval-lm evaluated {tokens:,} of {data_tokens:,} tokens, because it skips "
            f"text longer than the model's limit. Run the recipe again with --set "
            f"score.flags.tokens-per-sample={length} and score.flags.sample-break-mode=none."
        )
    return {
        "lm_ppl": {"score": perplexity, "loss_base2": bits},
        "lm_bits": {"score": bits},
        "meta": {"evaluation": evaluation},
    }


def _evaluation(text: str, recipe: Recipe) -> Values:
    """The settings of an evaluation, and the number of tokens if fairseq-eval-lm printed it."""
    flags = recipe.score.flags if recipe.score else {}
    evaluation = {name.replace("-", "_"): flags[name] for name in _SETTINGS if name in flags}
    block = _OWN_BLOCK.search(text)
    if block:  # the model's limit, in place of a longer default
        evaluation["tokens_per_sample"] = int(block[1])
    tokens = _TOKENS.search(text)
    if tokens:
        evaluation["tokens"] = int(tokens[1].replace(",", ""))
    return evaluation


def read_scores(path: Path) -> Scores:
    """The output of `moa-fairseq score --json`, without null values.

    Raises:
        UserError: for a damaged file.
        FileNotFoundError: if there is no file.
    """
    remedy = "It should be the output of moa-fairseq score --json. Delete it and run --stage score again."
    scores = read_json(path, remedy)
    kinds = dict.fromkeys((*HEADLINE_METRICS, "meta"), MAPPING)
    check_kinds(scores, kinds | {"sacrebleu_signature": TEXT}, str(path), remedy)
    scores = {name: value for name, value in scores.items() if value is not None}
    meta_kinds = {"evaluation": MAPPING, "hyphens": MAPPING}
    check_kinds(scores.get("meta", {}), meta_kinds, f"{path}: meta", remedy)
    for name in _metrics_in(scores):
        metric = scores[name]
        check_kinds(metric, {"signature": TEXT}, f"{path}: {name}", remedy, required=("score",))
        for key in ("score", "sd"):
            value = metric.get(key)
            # A diverged model has NaN or infinity
            if not (value is None or isinstance(value, float) or is_number(value)):
                raise UserError(f"{path}: {name}.{key} is not a number. {remedy}")
    return scores


def _metrics_in(scores: Scores) -> list[str]:
    return [name for name in HEADLINE_METRICS if name in scores]


def flat_metrics(scores: Scores) -> Values:
    """{'multi_bleu': {'score': x, ...}, ...} → {'multi_bleu': x, ..., 'sacrebleu_signature': '...'}."""
    names = _metrics_in(scores)
    metrics = {}
    for name in names:
        value = scores[name]["score"]
        # JSON has neither infinity nor NaN, the scores of a diverged model.
        metrics[name] = value if is_number(value) else None
    for name in names:
        deviation = scores[name].get("sd")
        if is_number(deviation):
            metrics[f"{name}_sd"] = deviation
    signature = scores.get("sacrebleu", {}).get("signature") or scores.get("sacrebleu_signature")
    if signature:
        metrics["sacrebleu_signature"] = signature
    return metrics


def describe(headline: str, scores: dict[str, Scores], paper: float | None = None) -> str:
    """The scores in one line: for each subset the headline metric and additionally requested metrics.

    Args:
        headline: the metric.
        scores: subset → its scores.
        paper: the number of the reproduced row.
    """
    requested = (chain.key for name, chain in CHAINS.items() if name not in DEFAULT_CHAINS)
    names = dict.fromkeys((headline, *requested))
    parts = []
    for subset, of_subset in scores.items():
        numbers = [f"{name} {of_subset[name]['score']:.2f}" for name in names if name in of_subset]
        part = f"{', '.join(numbers)} on {subset}" if numbers else f"{subset} scored"
        share = (of_subset.get("meta", {}).get("evaluation") or {}).get("unknown")
        if numbers and is_number(share):
            part += f" ({share:.2%} of its symbols are <unk>)"
        parts.append(part)
    if paper is not None:
        parts[-1] += f"; the paper prints {paper}"
    return ", ".join(parts)
