"""The comparison of two models: the sentences that they read, and their losses."""

import argparse

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


def test_losses_are_those_of_tokens_and_settings_of_other_versions_do_not_count(tmp_path):
    for language in ("en", "de"):
        (tmp_path / f"dict.{language}.txt").write_text("a 1\n")
    group = {"_name": "translation", "source_lang": "en", "target_lang": "de", "removed": 1}
    cfg = {"task": group, "model": {"adaptive_softmax_cutoff": "5,8"}}
    checkpoint = Checkpoint({}, cfg)
    task = check._task_of(checkpoint, tmp_path)
    assert not check._criterion_of(checkpoint, task, "causal LM").sentence_avg
