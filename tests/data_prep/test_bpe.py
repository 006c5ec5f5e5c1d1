"""Learning and applying subwords: the same as subword-nmt's own commands."""

import io

import pytest
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from moa_fairseq.data_prep import bpe
from moa_fairseq.data_prep.bpe import learn_codes, load_codes
from moa_fairseq.errors import UserError


@pytest.fixture
def texts(tmp_path, made):
    paths = [tmp_path / f"train.{language}" for language in ("en", "de")]
    for path, language in zip(paths, ("en", "de")):
        path.write_text(made.text([*made.sentences(200, language), "", "  two  spaces "]), encoding="utf-8")
    return paths


def test_the_same_codes_as_subword_nmt(texts, tmp_path):
    learn_codes(texts, 50, tmp_path / "codes")
    expected = io.StringIO()
    learn_bpe([line for path in texts for line in path.read_text("utf-8").split("\n")], expected, 50)
    assert (tmp_path / "codes").read_text("utf-8") == expected.getvalue()


def test_the_same_subwords_as_subword_nmt(texts, tmp_path, made):
    learn_codes(texts, 50, tmp_path / "codes")
    with open(tmp_path / "codes", encoding="utf-8") as stream:
        expected = BPE(stream)
    for line in made.sentences(50, "de", seed=3):
        assert load_codes(str(tmp_path / "codes")).segment(line) == expected.segment(line)


def test_new_codes_under_an_old_name_are_noticed(texts, tmp_path):
    learn_codes(texts, 2, tmp_path / "codes")
    first = load_codes(str(tmp_path / "codes"))
    learn_codes(texts, 50, tmp_path / "codes")
    assert load_codes(str(tmp_path / "codes")) is not first


def test_the_memory_of_words_has_an_end(texts, tmp_path, monkeypatch):
    learn_codes(texts, 50, tmp_path / "codes")
    monkeypatch.setattr(bpe, "REMEMBERED", 10)
    codes = load_codes(str(tmp_path / "codes"))
    before = [codes.segment(f"Straße{number} Haus") for number in range(40)]
    assert len(codes.cache) <= 12
    assert before == [codes.segment(f"Straße{number} Haus") for number in range(40)]


def test_nothing_to_learn_from(tmp_path):
    (tmp_path / "train.en").write_text("a b\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"train\.en: there is no word of two letters"):
        learn_codes([tmp_path / "train.en"], 5, tmp_path / "codes")


def test_fewer_merges_than_asked_for(tmp_path):
    (tmp_path / "train.en").write_text("abc abc\n", encoding="utf-8")
    learn_codes([tmp_path / "train.en"], 500, tmp_path / "codes")
    assert (tmp_path / "codes").read_text("utf-8").count("\n") == 3
