"""Filling a gap with a trained model."""

import json

import pytest
from fairseq.models import MODEL_REGISTRY

from moa_fairseq.cli import main


def filled(capsys, checkpoint, text, top):
    assert main(["fill-mask", str(checkpoint), text, "--top", str(top), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_most_probable_tokens_stand_in_the_gap(toy_masked_lm, toy_wiki_data, capsys):
    rows = filled(capsys, toy_masked_lm, "the <mask> sat", 3)
    assert len(rows) == 3
    assert rows[0]["probability"] >= rows[1]["probability"] >= rows[2]["probability"] > 0
    assert all(row["text"] == f"the{row['token']} sat" for row in rows)
    # Every token of the encoding can be asked for (256 bytes and seven merges); </s> and the like never come.
    everything = filled(capsys, toy_masked_lm, "the <mask>", 10_000)
    assert len(everything) == 263 and sum(row["probability"] for row in everything) < 1
    assert main(["fill-mask", str(toy_masked_lm), "<mask> sat", "--top", "1"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_the_gap_is_filled_as_fairseq_fills_it(toy_masked_lm, toy_wiki_data, capsys):
    """The best token only: fairseq's list gets out of step with its probabilities after an </s>."""
    names = {"gpt2_encoder_json": "encoder.json", "gpt2_vocab_bpe": "vocab.bpe"}
    encoding = {name: str(toy_wiki_data / file) for name, file in names.items()}
    folder = str(toy_masked_lm.parent)
    data = str(toy_wiki_data)
    model = MODEL_REGISTRY["moa_roberta"]
    hub = model.from_pretrained(folder, toy_masked_lm.name, data, bpe="gpt2", **encoding)
    ((text, probability, token),) = hub.eval().fill_mask("the <mask> sat", topk=1)
    (ours,) = filled(capsys, toy_masked_lm, "the <mask> sat", 1)
    assert (ours["token"], ours["text"]) == (token, text)
    assert ours["probability"] == pytest.approx(probability, rel=1e-4)


def test_a_text_may_be_as_long_as_the_model_reads(toy_masked_lm):
    for letters, status in ((21, 0), (22, 2)):  # between <s> and </s>, of 24 positions
        assert main(["fill-mask", str(toy_masked_lm), "x" * letters + "<mask>"]) == status


@pytest.mark.parametrize(
    "args, says",
    [
        (["no gap"], "exactly one <mask>"),
        (["<mask> and <mask>"], "exactly one <mask>"),
        (["a <mask>", "--top", "0"], "--top"),
        (["x " * 30 + "<mask>"], "positions for 24"),
    ],
)
def test_bad_input(toy_masked_lm, capsys, args, says):
    assert main(["fill-mask", str(toy_masked_lm), *args]) == 2
    assert says in capsys.readouterr().err
