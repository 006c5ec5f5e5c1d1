"""Samples that are longer than a model can read: no evaluation leaves one out."""

import logging
from collections.abc import Callable
from typing import Any

from fairseq.tasks.language_modeling import LanguageModelingConfig

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches.table import patch

logger = logging.getLogger(__name__)

DEFAULT_BLOCK: int = LanguageModelingConfig().tokens_per_sample
_TASK = "fairseq.tasks.language_modeling:LanguageModelingTask"
_TESTS = "plugin/patches/test_lengths.py::"


@patch(f"{_TASK}.load_dataset", f"{_TESTS}test_a_context_window_of_a_whole_block_is_refused")
def refuse_empty_blocks(load_dataset: Callable, task: Any, *args: Any, **options: Any) -> Any:
    """Refuse a --context-window that leaves no token to evaluate.

    --context-window is subtracted from --tokens-per-sample; if nothing is left, training ends in a traceback.

    Raises:
        UserError: if no token is left.
    """
    if task.args.tokens_per_sample < 1:
        raise UserError(
            f"--tokens-per-sample minus --context-window is {task.args.tokens_per_sample}, so there is no "
            "token to evaluate: give a smaller --context-window."
        )
    return load_dataset(task, *args, **options)


@patch(f"{_TASK}.eval_lm_dataloader", f"{_TESTS}test_a_perplexity_is_over_all_tokens_or_an_error")
def evaluate_every_token(
    dataloader: Callable,
    task: Any,
    dataset: Any,
    *args: Any,
    max_positions: int | None = None,
    context_window: int = 0,
    **options: Any,
) -> Any:
    """Evaluate every token: cut the text into blocks of the model's length, or refuse longer blocks.

    fairseq-eval-lm skips blocks that are longer than the model, and prints the perplexity of the rest (1.00
    if there is none); its default --tokens-per-sample, 1,024, is longer than many models.

    Only the default --tokens-per-sample is replaced by the model's length.

    Raises:
        UserError: if blocks of a length that the user chose are too long, and would be left out.
    """
    subset = next((name for name, each in task.datasets.items() if each is dataset), "")

    if max_positions and _longest(dataset, context_window) > max_positions:
        if task.args.tokens_per_sample + context_window == DEFAULT_BLOCK:
            task.args.tokens_per_sample = max_positions - context_window
            task.load_dataset(subset)
            dataset = task.dataset(subset)
            logger.info(f"--tokens-per-sample {max_positions}: the model's own")
        longest = _longest(dataset, context_window)
        if longest > max_positions and not getattr(task, "reads_any_length", False):
            remedy = ""
            if str(task.args.sample_break_mode or "none") != "none":
                remedy = "--sample-break-mode none, which cuts lines to fit, and "
            raise UserError(
                f"--gen-subset {subset}: a block has {longest:,} tokens, but the model accepts "
                f"{max_positions:,}, and fairseq would skip such blocks. Give {remedy}"
                f"--tokens-per-sample {max_positions} or less."
            )
    return dataloader(
        task,
        dataset,
        *args,
        max_positions=max_positions,
        context_window=context_window,
        **options,
    )


def _longest(dataset: Any, context_window: int) -> int:
    return int(dataset.sizes.max(initial=0)) + context_window


@patch(
    "fairseq.tasks.fairseq_task:FairseqTask.filter_indices_by_size",
    f"{_TESTS}test_the_sentence_that_is_too_long_is_named",
)
def name_the_sentence_that_is_too_long(
    filter_indices_by_size: Callable,
    task: Any,
    indices: Any,
    dataset: Any,
    max_positions: Any = None,
    ignore_invalid_inputs: bool = False,
) -> Any:
    """Refuse sentences that are longer than the model, unless a flag leaves them out.

    A sentence that is longer than the model ends in a traceback, whose remedy scores fewer sentences.

    Raises:
        UserError: names the first sentence that is too long.
    """
    if ignore_invalid_inputs:
        return filter_indices_by_size(task, indices, dataset, max_positions, True)
    fitting, left_out = dataset.filter_indices_by_size(indices, max_positions)
    if len(left_out):
        index = min(left_out)
        raise UserError(
            f"Sentence {index + 1} has {dataset.num_tokens(index):,} tokens, but the model or "
            f"--max-tokens allows {max_positions}; {len(left_out)} of {len(indices)} are too long. "
            "Remove them from the data, or train with larger --max-source-positions and "
            "--max-target-positions (for a language model --tokens-per-sample). With "
            "--skip-invalid-size-inputs-valid-test the result covers fewer sentences."
        )
    return fitting
