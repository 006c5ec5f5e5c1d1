"""Text that is too long for the evaluation is detected before the training."""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.batch import MAX_POSITIONS, sentence_sizes
from moa_fairseq.experiments.recipes.schema import (
    CLASSIFICATION,
    LARGEST,
    MASKED_LM,
    POSITIONS,
    SKIP,
    TRANSLATION,
    Recipe,
)
from moa_fairseq.plugin.patches.lengths import DEFAULT_BLOCK

# Values of --sample-break-mode by which a line of any length stays whole.
WHOLE_LINES = ("complete", "complete_doc", "eos")
JOINED = "@@ "  # the only value of --post-process that fairseq-eval-lm supports
BREAK_MODE = "sample-break-mode"


def check_blocks(
    recipe: Recipe, training: argparse.Namespace, evaluation: argparse.Namespace
) -> None:
    """Check the blocks that fairseq-eval-lm would cut a language model's text into.

    Args:
        recipe: the recipe, whose task the message names.
        training, evaluation: the flags of fairseq-train and fairseq-eval-lm, as fairseq parsed them.

    Raises:
        UserError: if the blocks are longer than the language model's limit, if a context window leaves no
            token to evaluate or is combined with carried chunks, and for a value of --post-process that
            fairseq-eval-lm does not support.
    """
    if evaluation.post_process not in (None, JOINED):
        raise UserError(
            "score.flags.post-process (or remove-bpe): fairseq-eval-lm joins sub-words that end with @@, "
            f"for {JOINED!r} only. Set \"score.flags.post-process='{JOINED}'\", or leave it out."
        )
    limit = getattr(training, "max_target_positions", None) or training.tokens_per_sample
    block = evaluation.tokens_per_sample
    window = evaluation.context_window
    if hasattr(evaluation, "carried_chunks"):
        if window:
            raise UserError(
                f"score.flags.context-window: {window} and train.task {recipe.train.task} are two ways to "
                "look back. Leave context-window out, or set train.task: language_modeling."
            )
        return  # chunks may have any length
    if block > limit and block != DEFAULT_BLOCK:
        raise UserError(
            f"score.flags.tokens-per-sample: blocks of {block:,} tokens are longer than the model's limit "
            f"({limit:,}, train.flags.tokens-per-sample). Set score.flags.tokens-per-sample={limit}."
        )
    if window >= min(block, limit):
        raise UserError(
            f"score.flags.context-window: {window:,} leaves no token to evaluate in a block of "
            f"{min(block, limit):,}. Use a smaller value."
        )


def check_sentences(recipe: Recipe, training: argparse.Namespace, data: Path) -> None:
    """Raise an error if a sentence to evaluate is longer than the model's limit.

    fairseq would stop at it after the training, or skip it.

    Args:
        recipe: the recipe; its kind of model, its subsets and its flags are read.
        training: the flags of fairseq-train, as fairseq parsed them.
        data: the binarised folder.

    Raises:
        UserError: for a sentence that is too long; the message names the settings that help, also after the
            training.
    """
    adds_start = recipe.kind == MASKED_LM or getattr(training, "init_token", None) is not None
    for subset in _subsets_read_whole(recipe, training):
        if recipe.kind not in (TRANSLATION, CLASSIFICATION):
            limits = _line_limits(recipe, training, subset)
        else:
            limits = _model_limits(recipe, training, subset)
        if limits:
            for sizes, limit in zip(sentence_sizes(recipe, data, subset), limits.tokens):
                _check_sizes(data, subset, sizes + adds_start, limit, limits.remedy)


def _check_sizes(data: Path, subset: str, sizes: numpy.ndarray, limit: int, remedy: str) -> None:
    """Raise UserError if one of the sizes, [N] int64, exceeds the limit."""
    too_long = numpy.flatnonzero(sizes > limit)
    if len(too_long):
        first = too_long[0]
        raise UserError(
            f"{data}: sentence {first + 1:,} of {subset} has {sizes[first]:,} tokens, but the model "
            f"reads at most {limit:,}; {len(too_long):,} of {len(sizes):,} are too long. Remove them "
            f"from the text, or {remedy.replace('LONGEST', str(sizes.max()))}."
        )


class _Limits(NamedTuple):
    """The largest numbers of tokens of a subset's sentences.

    Args:
        tokens: the limits of source and target, which are equal for a language model.
        remedy: what to set for longer sentences; LONGEST stands for the number of tokens of the longest.
    """

    tokens: tuple[int, int]
    remedy: str


def _subsets_read_whole(recipe: Recipe, training: argparse.Namespace) -> list[str]:
    """The subsets that training and evaluation read, without those whose sentences are skipped or cut."""
    subsets = [] if recipe.generate and recipe.generate.flags.get(SKIP) else list(recipe.subsets)
    if not recipe.training_flags.get(SKIP):
        subsets.append("valid")
    if getattr(training, "shorten_method", "none") != "none":
        cut = training.shorten_data_split_list.split(",")
        if cut == [""]:  # every subset is cut
            return []
        subsets = [subset for subset in subsets if subset not in cut]
    return list(dict.fromkeys(subsets))


def _model_limits(recipe: Recipe, training: argparse.Namespace, subset: str) -> _Limits:
    """The positions of a translation model or a classifier."""
    names = POSITIONS if recipe.kind == TRANSLATION else ["max-positions"] * 2
    source, target = (
        getattr(training, name.replace("-", "_"), None) or MAX_POSITIONS for name in names
    )
    if getattr(training, "truncate_source", False):
        source = LARGEST
    settings = []
    for name in dict.fromkeys(names):
        section = "train" if name in recipe.train.flags else "model"
        settings.append(f"{section}.flags.{name}=LONGEST")
    remedy = f"set {' and '.join(settings)} before the training"
    if recipe.generate and subset in recipe.subsets:
        remedy += (
            f", or at any time generate.flags.{SKIP}=true, which scores the others and reproduces no row of "
            "a paper"
        )
    return _Limits((source, target), remedy)


def _line_limits(recipe: Recipe, training: argparse.Namespace, subset: str) -> _Limits | None:
    """The block of a language model; None if lines of the subset are cut."""
    section = "train"
    flags = recipe.training_flags
    if recipe.score and subset in recipe.subsets:
        section = "score"
        # A masked LM's text is cut as in training by default
        flags = (flags if recipe.kind == MASKED_LM else {}) | recipe.score.flags
    if flags.get(BREAK_MODE) not in WHOLE_LINES:
        return None
    remedy = f"set {section}.flags.{BREAK_MODE}=none, which cuts lines to fit"
    return _Limits((training.tokens_per_sample, training.tokens_per_sample), remedy)
