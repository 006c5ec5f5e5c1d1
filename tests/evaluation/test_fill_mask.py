"""Filling a gap with a trained model."""

import json

import pytest

from moa_fairseq.cli import main
from moa_fairseq.evaluation.fill_mask import fill_mask, load_hub


@pytest.fixture(scope="module")
def hub(toy_masked_lm, toy_wiki_data):
    return load_hub(toy_masked_lm)


def test_the_most_probable_tokens_stand_in_the_gap(toy_masked_lm, capsys):
    assert main(["fill-mask", str(toy_masked_lm), "the <mask> sat", "--top", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 3
    assert rows[0]["probability"] >= rows[1]["probability"] >= rows[2]["probability"] > 0
    assert all(row["text"] == f"the{row['token']} sat" for row in rows)
    assert main(["fill-mask", str(toy_masked_lm), "<mask> sat", "--top", "1"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_symbols_that_are_no_text_are_passed_over(hub):
    """Every token of the encoding can be asked for; </s> and the like never come."""
    everything = fill_mask(hub, "the <mask>", top=10_000)
    assert len(everything) == 263  # 256 bytes and seven merges
    assert sum(entry.probability for entry in everything) < 1


def test_the_gap_is_filled_as_fairseq_fills_it(hub):
    """The best token only: fairseq's list gets out of step with its probabilities after an </s>."""
    ((text, probability, token),) = hub.fill_mask("the <mask> sat", topk=1)
    (ours,) = fill_mask(hub, "the <mask> sat", top=1)
    assert (ours.token, ours.text) == (token, text)
    assert ours.probability == pytest.approx(probability, rel=1e-4)


@pytest.mark.parametrize(
    "args, says",
    [
        (["no gap"], "exactly one <mask>"),
        (["<mask> and <mask>"], "it holds 2"),
        (["a <mask>", "--top", "0"], "--top 0"),
        (["x " * 30 + "<mask>"], "positions for 24"),
    ],
)
def test_bad_input(toy_masked_lm, capsys, args, says):
    assert main(["fill-mask", str(toy_masked_lm), *args]) == 2
    assert says in capsys.readouterr().err
