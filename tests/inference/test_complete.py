"""`moa-fairseq complete`: what its draws begin from."""

import pytest

from moa_fairseq.cli import main
from moa_fairseq.inference import complete
from moa_fairseq.inference.text_model import status_of


class Loading(Exception):
    """The model would be loaded now."""


@pytest.mark.parametrize("flags, seed", [((), 1), (("--seed", "0"), 0), (("--seed", "3"), 3)], ids=str)
def test_draws_begin_from_the_seed_zero_too(monkeypatch, flags, seed):
    def load(*_):
        raise Loading

    seeds = []
    monkeypatch.setattr(complete.text_model, "load", load)
    monkeypatch.setattr(complete.torch, "manual_seed", seeds.append)
    with pytest.raises(Loading):
        main(["complete", "runs/x", "--sample", "2", *flags])
    assert seeds == [seed]


@pytest.mark.parametrize("count, words", [(0, ""), (1, "1 line was left out"), (2, "2 lines were left out")])
def test_lines_that_are_left_out_are_counted_in_words(caplog, count, words):
    assert status_of(count) == int(count > 0)
    assert words in caplog.text and bool(caplog.text) == (count > 0)
