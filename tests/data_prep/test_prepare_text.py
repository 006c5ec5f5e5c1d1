"""Text to binarised text: the stages, their manifest, and what is refused."""

import gzip
import json
import shutil
import zipfile

import pytest
from fairseq.data import Dictionary, data_utils

from moa_fairseq.cli import main
from moa_fairseq.data_prep.prepare_text import TextPreparation, is_binarised_text, read_manifest
from moa_fairseq.errors import UserError

SPLITS = ["train", "valid", "test"]


@pytest.fixture
def prepare(tmp_path, toy_gpt2, preprocess):
    """prepare(source, recipe, **flags) → (Prepared, what was said)."""

    def run(source, recipe="wikitext2_gpt2bpe", subsets=SPLITS, **flags):
        said = []
        settings = {"recipe": recipe, "flags": flags}
        arguments = (settings, subsets, source, tmp_path / "out", preprocess, said.append)
        return TextPreparation(*arguments, gpt2_files=lambda folders, say: toy_gpt2).run(), said

    return run


def test_text_to_binarised(prepare, toy_wiki, toy_gpt2):
    prepared, said = prepare(toy_wiki)
    assert prepared.sentences == {"train": 160, "valid": 40, "test": 40}
    dictionary = Dictionary.load(str(prepared.folder / "dict.txt"))
    assert len(dictionary) == 4 + 263
    first, second = (
        data_utils.load_indexed_dataset(str(prepared.folder / "train"), dictionary)[i] for i in (0, 1)
    )
    assert first.tolist() == [dictionary.eos()]  # an empty line stays one
    ids = (prepared.folder.parent / "bpe" / "train").read_text().splitlines()[1]
    assert dictionary.string(second) == ids and dictionary.unk() not in second
    facts = read_manifest(prepared.folder)
    text = (toy_wiki / "wiki.train.raw").read_text()
    assert facts["splits"]["train"]["words"] == len(text.split())
    assert facts["splits"]["train"]["unk"] == text.count("<unk>")
    assert facts["dictionary"] == "roberta" and facts["splits"]["train"]["file"] == "wiki.train.raw"
    assert (prepared.folder / "encoder.json").read_bytes() == toy_gpt2.encoder.read_bytes()
    assert any("WARNING: 2,088,628 words were expected" in line for line in said)


def test_a_second_time_is_a_no_op_and_the_result_can_be_given_as_data(prepare, toy_wiki):
    first, _ = prepare(toy_wiki)
    again, said = prepare(toy_wiki)
    assert again == first and sum("up to date" in line for line in said) == 2
    given, said = prepare(first.folder, subsets=["train", "test"])
    assert given.folder == first.folder and set(given.sentences) == {"train", "test"}
    assert "binarised already" in said[0]
    (first.folder / "test.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"test\.bin"):
        prepare(first.folder)


def test_another_dictionary_is_said_in_the_manifest(prepare, toy_wiki):
    prepared, said = prepare(toy_wiki, srcdict=None)
    assert len((prepared.folder / "dict.txt").read_text().splitlines()) < 263
    assert read_manifest(prepared.folder)["dictionary"] == "data.flags.srcdict"
    assert any("of the training text" in line for line in said)


def test_archives_and_compressed_files(prepare, toy_wiki, tmp_path):
    plain, _ = prepare(toy_wiki)
    binary = (plain.folder / "train.bin").read_bytes()
    archive = tmp_path / "wikitext-2-raw-v1.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for path in toy_wiki.iterdir():
            target.write(path, f"wikitext-2-raw/{path.name}")
    unpacked, _ = prepare(archive)
    assert (unpacked.folder / "train.bin").read_bytes() == binary
    packed = tmp_path / "packed"
    packed.mkdir()
    for path in toy_wiki.iterdir():
        split = path.name.split(".")[1]
        (packed / f"wikitext-2.{split}.txt.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert (prepare(packed)[0].folder / "train.bin").read_bytes() == binary


def test_raw_files_come_before_tokens_and_kinds_are_not_mixed(prepare, toy_wiki, tmp_path):
    mixed = tmp_path / "mixed"
    shutil.copytree(toy_wiki, mixed)
    for split in SPLITS:
        (mixed / f"wiki.{split}.tokens").write_text("tokens\n")
    assert read_manifest(prepare(mixed)[0].folder)["splits"]["test"]["file"] == "wiki.test.raw"
    (mixed / "wiki.test.raw").unlink()
    facts = read_manifest(prepare(mixed)[0].folder)["splits"]
    assert {split["file"].rpartition(".")[2] for split in facts.values()} == {"tokens"}


def test_what_is_missing_is_named(prepare, tmp_path):
    with pytest.raises(UserError, match=r"no data folder .*wiki\.train\.raw"):
        prepare(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"lacks wiki\.train\.raw, wiki\.valid\.raw"):
        prepare(tmp_path / "empty")
    with pytest.raises(UserError, match="no subset test9"):
        prepare(tmp_path / "empty", subsets=["train", "test9"])
    assert not is_binarised_text(tmp_path / "empty")


@pytest.mark.slow
def test_the_command(tmp_path, toy_wiki, toy_gpt2, monkeypatch, capsys):
    def at_hand(folders, say):
        return toy_gpt2

    monkeypatch.setattr(TextPreparation.__init__, "__defaults__", (print, at_hand))
    command = ["gpt2-bpe", "wikitext2_gpt2bpe", "--from", str(toy_wiki), "--output", str(tmp_path / "out")]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "$ fairseq-preprocess --only-source" in said and said.rstrip().endswith("as --data")
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["folder"] == str(tmp_path / "out" / "binarised") and report["splits"]["test"]["lines"] == 40
