"""Faults of the text that are met while pieces are learnt: named with file and line, and no other remedy."""

import gzip
import json
import re

import pytest

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import pieces

FAULTS = {
    "null": ('{"text": null}', "null"),
    "no text": ('{"content": "abc"}', "missing"),
    "number": ('{"text": 3}', "number"),
    "list": ('["text"]', "list"),
    "cut": ('{"text": "abc de', "column"),
    "surrogate": ('{"text": "abc \\ud83d def"}', r"\\ud83d"),
    "brackets": ('{"text": ' + "[" * 100_000, '"text"'),
    "digits": ('{"text": ' + "9" * 5_000 + "}", '"text"'),
    "NUL": ("\0", "NUL"),
}


@pytest.fixture
def own(tmp_path, made):
    def write(fault, name="train.jsonl"):
        folder = tmp_path / "own"
        for split in ("train", "valid", "test"):
            made.documents(
                folder / f"{split}.jsonl", [{"text": line} for line in made.sentences(40, "en")]
            )
        lines = (folder / "train.jsonl").read_text("utf-8").splitlines()
        (folder / "train.jsonl").unlink()
        raw = "\n".join([*lines[:20], fault, *lines[20:], ""]).encode()
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return folder

    return write


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_line(prepare, own, fault, name):
    line, word = FAULTS[fault]
    with pytest.raises(UserError, match=rf"{name}, line 21: .*{word}") as error:
        prepare("text_sp", own(line, name), bpe=60)
    assert "--bpe" not in str(error.value) and "SentencePiece" not in str(error.value)


def test_a_blank_line_is_no_document(prepare, own):
    _, root = prepare("text_sp", own("  "), bpe=60)
    assert json.loads((root / "manifest.json").read_text())["lines"]["train"]["found"] == 40


def test_a_file_that_is_still_copied_is_named(prepare, own):
    folder = own("", "train.jsonl.gz")
    whole = (folder / "train.jsonl.gz").read_bytes()
    (folder / "train.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"train\.jsonl\.gz .*gzip.* line \d+ "):
        prepare("text_sp", folder, bpe=60)


@pytest.mark.parametrize("text", ["", "\n\n", " \n\u3000\n", "\u200b\n"])
def test_text_without_letters_is_no_matter_of_a_number(tmp_path, text):
    with pytest.raises(UserError, match="WHAT has no text") as error:
        pieces.learn(text.split("\n"), "WHAT", 60, tmp_path / "model", **pieces.LANGUAGE_MODEL)
    assert "--bpe" not in str(error.value)


def test_documents_that_a_release_leaves_out_are_named(prepare, made, tmp_path):
    for name in ("train-00000-of-00020.json.gz", "train-00001-of-00020.json.gz"):
        made.documents(tmp_path / name, [{"text": "a paper " * 1000}] * 3)
    made.documents(
        tmp_path / "validation-00000-of-00002.json.gz", [{"text": "a paper " * 1000}]
    )
    with pytest.raises(UserError, match="4,192") as error:
        prepare("pes2o", tmp_path, subsets=("train", "valid"))
    assert "--bpe" not in str(error.value)


def test_a_number_that_the_data_set_has_is_not_asked_for(prepare, made, tmp_path):
    for name in ("c4-train.00000-of-01024.json.gz", "c4-train.00001-of-01024.json.gz"):
        made.documents(tmp_path / name, [{"text": "a b"}])
    made.documents(tmp_path / "c4-validation.00000-of-00008.json.gz", [{"text": "a b"}])
    with pytest.raises(UserError, match=r"has only \d+.*text_sp"):
        prepare("c4", tmp_path, subsets=("train", "valid"))


@pytest.mark.parametrize("asked", [1, 10**10])
def test_a_number_that_no_text_has(tmp_path, asked):
    with pytest.raises(UserError, match=rf"cannot learn {asked:,} pieces on WHAT.*--bpe N"):
        pieces.learn(
            ["a river"] * 9, "WHAT", asked, tmp_path / "model", **pieces.LANGUAGE_MODEL
        )


@pytest.mark.thorough(keep="[5]")
@pytest.mark.parametrize("asked", [5, 99_999])
def test_the_number_that_an_error_names_is_learnt(own, tmp_path, capsys, asked, in_process):
    line = f"prepare text_sp {tmp_path}/out --from {own('')} --workers 1 --bpe".split()
    assert main([*line, str(asked)]) == 2
    number = re.search(r"--bpe (\d+)", capsys.readouterr().err)[1]
    assert main([*line, number]) == 0


def test_an_interruption_stays_one(tmp_path):
    def lines():
        yield "a river"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pieces.learn(lines(), "text", 60, tmp_path / "model", **pieces.LANGUAGE_MODEL)
    assert not (tmp_path / "model").exists()
