"""Text that is too long for the evaluation is detected before the training."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.batch import MAX_POSITIONS, sentence_sizes
from moa_fairseq.experiments.recipes.schema import (
    CLASSIFICATION,
    LARGEST,
    MASKED_LM,
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
    begins_with_s = recipe.kind == MASKED_LM or getattr(training, "init_token", None) is not None
    start = int(begins_with_s)
    for split, limits, remedy in _limits(recipe, training):
        for lines, limit in zip(sentence_sizes(recipe, data, split), limits):
            sizes = lines + start
            too_long = numpy.flatnonzero(sizes > limit)
            if len(too_long):
                raise UserError(
                    f"{data}: sentence {too_long[0] + 1:,} of {split} has {sizes[too_long[0]]:,} tokens, but "
                    f"the model reads at most {limit:,}; {len(too_long):,} of {len(sizes):,} are too long. "
                    f"Remove them from the text, or {remedy.format(int(sizes.max()))}."
                )


def _limits(
    recipe: Recipe, training: argparse.Namespace
) -> Iterator[tuple[str, tuple[int, int], str]]:
    """(subset, limits of its source and target sentences in tokens, how to raise the limits)."""
    subsets = [] if recipe.generate and recipe.generate.flags.get(SKIP) else list(recipe.subsets)
    if not recipe.training_flags.get(SKIP):
        subsets.append("valid")
    if getattr(training, "shorten_method", "none") != "none":
        cut = training.shorten_data_split_list.split(",")
        subsets = [subset for subset in subsets if subset not in cut]
        if cut == [""]:
            subsets = []
    if recipe.kind in (TRANSLATION, CLASSIFICATION):
        names = ["max_source_positions", "max_target_positions"]
        if recipe.kind == CLASSIFICATION:
            names = ["max_positions"] * 2
        source, target = (getattr(training, name, None) or MAX_POSITIONS for name in names)
        flags = []
        for name in dict.fromkeys(names):
            word = name.replace("_", "-")
            section = "train" if word in recipe.train.flags else "model"
            flags.append(f"{section}.flags.{word}={{0}}")
        if getattr(training, "truncate_source", False):
            source = LARGEST
        set_hint = f"set {' and '.join(flags)} before the training"
        skip_hint = (
            f"generate.flags.{SKIP}=true, which scores the others and reproduces no row of a paper"
        )
        for subset in dict.fromkeys(subsets):
            leave_out = ""
            if recipe.generate and subset in recipe.subsets:
                leave_out = f", or at any time {skip_hint}"
            yield subset, (source, target), set_hint + leave_out
        return
    block = training.tokens_per_sample
    for subset in dict.fromkeys(subsets):
        section = "train"
        flags_of_mode = recipe.training_flags
        # A masked LM's text is cut as in training by default
        if subset in recipe.subsets and recipe.score:
            section = "score"
            flags_of_mode = flags_of_mode | recipe.score.flags
            if recipe.kind != MASKED_LM:
                flags_of_mode = recipe.score.flags
        if flags_of_mode.get(BREAK_MODE) in WHOLE_LINES:
            yield (
                subset,
                (block, block),
                f"set {section}.flags.{BREAK_MODE}=none, which cuts lines to fit",
            )
