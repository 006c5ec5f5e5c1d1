"""Encoding text: ids by hand, counts, several processes, and an interrupted run that goes on."""

import json

import pytest

from moa_fairseq.data_prep import gpt2_bpe
from moa_fairseq.data_prep.gpt2_bpe import _load_encoder, encode_file, encode_line


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


def test_counts_and_empty_lines(tmp_path, toy_gpt2):
    (tmp_path / "text").write_text(" \n the cat @-@ <unk> \n\nsat\n", encoding="utf-8")
    facts = encode_file(tmp_path / "text", tmp_path / "ids", tmp_path / "parts", toy_gpt2)
    lines = (tmp_path / "ids").read_text().split("\n")
    assert [bool(line) for line in lines] == [False, True, False, True, False]
    subwords = sum(len(line.split()) for line in lines)
    assert facts == {"lines": 4, "words": 5, "subwords": subwords, "unk": 1, "hyphen": 1}
    assert not list((tmp_path / "parts").iterdir())


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, toy_gpt2, monkeypatch):
    (tmp_path / "text").write_text("".join(f"the cat {number}\n" for number in range(10)))
    whole = tmp_path / "whole"
    expected = encode_file(tmp_path / "text", whole, tmp_path / "p", toy_gpt2, processes=1, part_lines=3)
    encoded, real = [], gpt2_bpe.encode_line

    def counting(line, encoder):
        encoded.append(line)
        if line == "the cat 7":
            raise KeyboardInterrupt
        return real(line, encoder)

    monkeypatch.setattr(gpt2_bpe, "encode_line", counting)
    arguments = (tmp_path / "text", tmp_path / "ids", tmp_path / "parts", toy_gpt2, 1, 3)
    with pytest.raises(KeyboardInterrupt):
        encode_file(*arguments)
    assert not (tmp_path / "ids").exists() and len(list((tmp_path / "parts").iterdir())) == 2
    encoded.clear()
    monkeypatch.setattr(gpt2_bpe, "encode_line", lambda *both: (encoded.append(both[0]), real(*both))[1])
    assert encode_file(*arguments) == expected
    assert encoded == [f"the cat {number}" for number in (6, 7, 8, 9)]
    assert (tmp_path / "ids").read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_several_processes_keep_the_order(tmp_path, toy_gpt2):
    (tmp_path / "text").write_text("".join(f"the cat {number}\n" for number in range(10)))
    results = []
    for processes in (1, 2):
        output = tmp_path / f"ids{processes}"
        facts = encode_file(
            tmp_path / "text", output, tmp_path / f"parts{processes}", toy_gpt2, processes, part_lines=4
        )
        results.append((json.dumps(facts), output.read_bytes()))
    assert results[0] == results[1]
