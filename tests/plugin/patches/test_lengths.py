"""What is longer than a model is an error in an evaluation, or cut to fit; it is never left out."""

import numpy
import pytest
import torch
from fairseq import utils
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.data.indexed_dataset import make_builder
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask

import moa_fairseq  # noqa: F401  (changes fairseq)
from moa_fairseq.errors import UserError
from moa_fairseq.plugin.tasks.language_modeling_truncated_bptt import (
    TruncatedBPTTConfig,
    TruncatedBPTTTask,
)

LINES = (5, 9, 3, 20, 4)  # tokens, the end of the line included
POSITIONS = 16  # of the model


@pytest.fixture
def evaluated(tmp_path):
    """evaluated(task class, config class, **settings) → tokens of all batches of fairseq-eval-lm."""
    words = Dictionary()
    for number in range(40):
        words.add_symbol(f"w{number}")
    words.save(str(tmp_path / "dict.txt"))
    builder = make_builder(str(tmp_path / "test.bin"), "mmap", vocab_size=len(words))
    for size in LINES:
        builder.add_item(torch.tensor([*range(4, 3 + size), words.eos()]))
    builder.finalize(str(tmp_path / "test.idx"))

    def tokens(
        kind=LanguageModelingTask, config=LanguageModelingConfig, context_window=0, **settings
    ):
        cfg = config(data=str(tmp_path), **settings)
        cfg.tokens_per_sample -= context_window  # as fairseq-eval-lm does
        cfg.seed = 1
        cfg.dataset_impl = "mmap"
        cfg.use_plasma_view = False
        cfg.plasma_path = ""
        cfg.update_freq = [1]
        cfg.train_subset = "train"
        cfg.batch_size = 1
        cfg.batch_size_valid = 1
        task = kind.setup_task(cfg)
        task.load_dataset("test")
        batches = task.eval_lm_dataloader(
            dataset=task.dataset("test"),
            max_tokens=1000,
            batch_size=1,
            max_positions=utils.resolve_max_positions(POSITIONS),
            num_workers=0,
            context_window=context_window,
        )
        return sum(batch["ntokens"] for batch in batches)

    return tokens


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({}, True),  # fairseq's default, which means the model's own length
        ({"context_window": 6}, True),
        ({"tokens_per_sample": POSITIONS}, True),
        ({"tokens_per_sample": POSITIONS, "context_window": 6}, True),
        ({"sample_break_mode": "eos"}, False),  # one line is longer than the model
        ({"sample_break_mode": "complete"}, False),
        ({"tokens_per_sample": POSITIONS + 1}, False),
        ({"tokens_per_sample": POSITIONS + 4, "context_window": 6}, False),
    ],
)
def test_a_perplexity_is_over_all_tokens_or_an_error(evaluated, settings, fits):
    if fits:
        assert evaluated(**settings) == sum(LINES)
        return
    with pytest.raises(UserError, match=f"--tokens-per-sample {POSITIONS} or less"):
        evaluated(**settings)
    # The remedy
    assert evaluated(tokens_per_sample=POSITIONS, sample_break_mode="none") == sum(LINES)


def test_texts_in_order_have_chunks_of_any_length(evaluated):
    kind = (TruncatedBPTTTask, TruncatedBPTTConfig)
    assert evaluated(*kind, tokens_per_sample=POSITIONS + 8) == evaluated(*kind) == sum(LINES)


@pytest.mark.parametrize("window", [POSITIONS, POSITIONS + 1, 2000])
def test_a_context_window_of_a_whole_block_is_refused(evaluated, window):
    for settings in ({}, {"tokens_per_sample": POSITIONS}):
        with pytest.raises(UserError, match="--context-window"):
            evaluated(context_window=window, **settings)


def test_the_sentence_that_is_too_long_is_named():
    words = Dictionary()
    task = TranslationTask(TranslationConfig(), words, words)
    sizes = numpy.array(LINES)
    pairs = LanguagePairDataset(
        [torch.full((size,), 4) for size in LINES],
        sizes,
        words,
        [torch.tensor([4, 2])] * 5,
        None,
        words,
    )
    order = numpy.arange(5)
    with pytest.raises(UserError, match=r"Sentence 4 has 20 tokens.*--max-source-positions"):
        task.filter_indices_by_size(order, pairs, (POSITIONS, POSITIONS))
    assert list(task.filter_indices_by_size(order, pairs, (POSITIONS, POSITIONS), True)) == [
        0,
        1,
        2,
        4,
    ]
    assert list(task.filter_indices_by_size(order, pairs, (20, 20))) == [0, 1, 2, 3, 4]
