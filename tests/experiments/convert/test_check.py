"""The comparison of two models: the sentences that they read, and their losses."""

import argparse
import copy

import pytest
import torch

from moa_fairseq.experiments.convert import check
from moa_fairseq.experiments.convert.models import Checkpoint


class Reader(torch.nn.Module):
    """Keeps the lengths of what it reads."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(20, 2)
        self.lengths = []

    def forward(self, tokens):
        assert not self.training
        self.lengths.append(tokens.size(1))
        return (torch.ones(*tokens.shape, 20),)


@pytest.mark.parametrize("limit", check._MAX_POSITIONS)
@pytest.mark.parametrize(("positions", "length"), [(99, 9), (9, 8), (6, 5), (2, 1), (1, 1)])
def test_models_are_compared_on_sentences_that_they_read(limit, positions, length):
    """The smallest of all limits counts. A sentence includes its end."""
    settings = dict.fromkeys(check._MAX_POSITIONS, 1024) | {limit: positions}
    one, other = Reader(), Reader()
    check.largest_difference(one, other, "masked LM", argparse.Namespace(**settings))
    assert one.lengths == other.lengths == [length]


class Translator(torch.nn.Module):
    """Two dictionaries; returns the logits [B, T, V] of random weights."""

    def __init__(self, source_symbols, target_symbols):
        super().__init__()
        self.encoder = torch.nn.ModuleDict(
            {"embed_tokens": torch.nn.Embedding(source_symbols, 4)}
        )
        self.decoder = torch.nn.ModuleDict(
            {"embed_tokens": torch.nn.Embedding(target_symbols, 4)}
        )

    def forward(self, source, lengths, tokens):
        context = self.encoder["embed_tokens"](source).mean(1, keepdim=True)
        words = self.decoder["embed_tokens"]
        return ((words(tokens) + context) @ words.weight.T,)


@pytest.mark.parametrize("symbols", [(9, 30), (30, 9)])
def test_sentences_have_words_of_both_dictionaries(symbols):
    model = Translator(*symbols)
    settings = argparse.Namespace(max_source_positions=50, max_target_positions=50)
    assert check.largest_difference(model, copy.deepcopy(model), "translation", settings) == 0


def test_losses_are_those_of_tokens_and_settings_of_other_versions_do_not_count(tmp_path):
    for language in ("en", "de"):
        (tmp_path / f"dict.{language}.txt").write_text("a 1\n")
    group = {"_name": "translation", "source_lang": "en", "target_lang": "de", "removed": 1}
    cfg = {"task": group, "model": {"adaptive_softmax_cutoff": "5,8"}}
    checkpoint = Checkpoint({}, cfg)
    task = check._task_of(checkpoint, tmp_path)
    assert not check._criterion_of(checkpoint, task, "causal LM").sentence_avg
