"""Encoding text: ids by hand, counts, several processes, and an interrupted run that goes on."""

import pytest

from moa_fairseq.data_prep import gpt2_bpe
from moa_fairseq.data_prep.gpt2_bpe import _load_encoder, encode_line, encode_texts


@pytest.fixture
def encoder(toy_gpt2):
    return _load_encoder(str(toy_gpt2.encoder), str(toy_gpt2.vocab))


def test_ids_by_hand(encoder):
    # merges in order: Ġt=256 he=257 Ġthe=258 ca=259 cat=260 Ġcat=261 sa=262; bytes from "!" = 0 on
    byte = {letter: ord(letter) - ord("!") for letter in "sthe"}
    assert encode_line(" the cat the \n", encoder) == f"{byte['t']} 257 261 258"
    assert encode_line("", encoder) == encode_line(" \n", encoder) == ""


def test_encoding_loses_nothing(encoder):
    for text in ("naïve café — 日本語 😀", "it's  two   spaces", "a @-@ b <unk>"):
        assert encoder.decode([int(token) for token in encode_line(text, encoder).split()]) == text


def encode(folder, text, files, workers=1):
    (folder / "text").write_text(text, encoding="utf-8")
    (folder / "out").mkdir(exist_ok=True)
    return encode_texts({"train": folder / "text"}, folder / "out", files, workers)["train"]


def test_counts_and_empty_lines(tmp_path, toy_gpt2):
    facts = encode(tmp_path, " \n the cat @-@ <unk> \n\nsat\n", toy_gpt2)
    lines = (tmp_path / "out" / "train").read_text().split("\n")
    assert [bool(line) for line in lines] == [False, True, False, True, False]
    subwords = sum(len(line.split()) for line in lines)
    assert facts == {"file": "text", "lines": 4, "words": 5, "subwords": subwords, "unk": 1, "hyphen": 1}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]


NUMBERED = "".join(f"the cat {number}\n" for number in range(10))


@pytest.mark.slow
def test_several_processes_keep_the_order(tmp_path, toy_gpt2, monkeypatch):
    monkeypatch.setattr(gpt2_bpe, "CHUNK", 2)
    results = []
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        facts = encode(tmp_path / str(workers), NUMBERED, toy_gpt2, workers)
        results.append((facts, (tmp_path / str(workers) / "out" / "train").read_bytes()))
    assert results[0] == results[1]
