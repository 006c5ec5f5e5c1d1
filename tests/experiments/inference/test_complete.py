"""`moa-fairseq complete`: what its draws begin from."""

from types import SimpleNamespace

import pytest

from moa_fairseq.cli import main
from moa_fairseq.experiments.inference import complete
from moa_fairseq.experiments.inference.text_model import status_of


class Loading(Exception):
    """The model would be loaded now."""


@pytest.mark.parametrize(
    "flags, seed", [((), 1), (("--seed", "0"), 0), (("--seed", "3"), 3)], ids=str
)
def test_draws_begin_from_the_seed_zero_too(monkeypatch, flags, seed):
    def load(*_):
        raise Loading

    seeds = []
    monkeypatch.setattr(complete.text_model, "load", load)
    monkeypatch.setattr(complete.torch, "manual_seed", seeds.append)
    with pytest.raises(Loading):
        main(["complete", "runs/x", "--sample", "2", *flags])
    assert seeds == [seed]


@pytest.mark.parametrize("flag", ["--sample", "--tokens"])
def test_no_symbols_are_refused(monkeypatch, capsys, flag):
    monkeypatch.delattr(complete.text_model, "load")
    assert main(["complete", "runs/x", flag, "0"]) == 2
    assert f"{flag} 0" in capsys.readouterr().err


@pytest.mark.parametrize("count, words", [(0, ""), (1, "1 line "), (2, "2 lines ")])
def test_lines_that_are_left_out_are_counted_in_words(caplog, count, words):
    assert status_of(count) == int(count > 0)
    assert words in caplog.text and bool(caplog.text) == (count > 0)


@pytest.mark.parametrize("positions, status", [(6, 2), (7, 0)])
def test_one_position_is_left_for_a_text(monkeypatch, positions, status):
    class Reading(Exception):
        pass

    def read(_):
        raise Reading

    model = SimpleNamespace(models=[SimpleNamespace(max_positions=lambda: positions)])
    monkeypatch.setattr(complete.text_model, "load", lambda *_: model)
    monkeypatch.setattr(complete, "lines_of", read)
    if status:
        assert main(["complete", "runs/x", "--tokens", "6"]) == status
    else:
        with pytest.raises(Reading):
            main(["complete", "runs/x", "--tokens", "6"])


def test_log_messages_do_not_go_to_the_standard_output(monkeypatch, capsys):
    def load(*_):
        complete.text_model.log.warning("a note")
        raise Loading

    monkeypatch.setattr(complete.text_model, "load", load)
    with pytest.raises(Loading):
        main(["complete", "runs/x"])
    said = capsys.readouterr()
    assert said.out == "" and "a note" in said.err
