"""Text to binarised text: the stages, their manifest, and what is refused."""

import gzip
import json
import shutil
import zipfile
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils

from moa_fairseq.cli import main
from moa_fairseq.data_prep import download
from moa_fairseq.data_prep import prepare as prepare_module
from moa_fairseq.data_prep.binarised import is_binarised
from moa_fairseq.data_prep.manifest import read_manifest
from moa_fairseq.data_prep.prepare import Preparation
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.command import Options, run_recipe
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.loading import load_recipe

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SPLITS = ["train", "valid", "test"]


@pytest.fixture
def prepare(tmp_path, toy_gpt2, preprocess, monkeypatch, said):
    """prepare(source, recipe, **flags) → (Prepared, what was said)."""

    monkeypatch.setattr(prepare_module, "obtain_gpt2_files", lambda folders, offline: toy_gpt2)

    def run(source, recipe="wikitext2_gpt2bpe", subsets=SPLITS, **flags):
        said.clear()
        settings = {"recipe": recipe, "flags": flags}
        return Preparation(settings, subsets, source, tmp_path / "out", preprocess).run(), list(said)

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
    assert again == first and sum("done before" in line for line in said) == 2
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
    with pytest.raises(UserError, match=r"no data folder .*train\.txt"):
        prepare(tmp_path / "nowhere", "text_gpt2bpe")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"lacks train\.txt\[\.gz\], valid\.txt"):
        prepare(tmp_path / "empty", "text_gpt2bpe")
    (tmp_path / "empty" / "wiki.valid.raw").write_text("x\n")
    with pytest.raises(UserError, match=r"lacks wiki\.train\.raw\[\.gz\], wiki\.test\.raw"):
        prepare(tmp_path / "empty")
    with pytest.raises(UserError, match="no subset test9"):
        prepare(tmp_path / "empty", subsets=["train", "test9"])
    assert not is_binarised(tmp_path / "empty")


@pytest.mark.parametrize(
    ("config", "size"), [("wikitext103_mlm_transformer", 103), ("wikitext2_mlm_transformer_tiny", 2)]
)
def test_a_masked_language_model_needs_no_data_of_its_users(
    tables, miniature, tmp_path, preprocess, toy_gpt2, monkeypatch, config, size, said
):
    """`bash scripts/wikitext103_mlm_*.sh` without --data: what is in data/downloads is used, else fetched."""
    tables()
    monkeypatch.setattr(prepare_module, "obtain_gpt2_files", lambda folders, offline: toy_gpt2)
    served = []

    def serve(source, folder, pauses):
        served.append(source.name)
        target = folder / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(miniature("wikitext103_raw") / target.name, target)
        return target

    monkeypatch.setattr(download, "download", serve)

    recipe = load_recipe(CONFIGS / f"{config}.yaml", [])
    options = Options("prepare", save_dir=tmp_path / "run", data_root=tmp_path / "data")
    for _ in range(2):
        run_recipe(recipe, Hardware(), options, lambda environment: preprocess)
    assert served == [f"wikitext/wikitext-{size}-raw-v1.zip"]
    state = json.loads((tmp_path / "run" / "state.json").read_text("utf-8"))["prepare"]["facts"]
    assert state["sentences"] == {"train": 160, "valid": 12, "test": 14} and state["source"] is None
    facts = read_manifest(Path(state["folder"]))
    assert facts["licence"].startswith("Creative Commons BY-SA") and list(facts["sources"]) == served
    assert any("terms of use: Creative Commons BY-SA" in line for line in said)
    assert sum("done before" in line for line in said) == 3  # the archive and two stages


def test_prepare_takes_archives_in_a_folder_offline(
    tables, miniature, tmp_path, toy_gpt2, monkeypatch, capsys
):
    tables()
    monkeypatch.setattr(prepare_module, "obtain_gpt2_files", lambda folders, offline: toy_gpt2)
    archives = miniature("wikitext103_raw")
    words = ["prepare", "wikitext103_gpt2bpe", "--from", str(archives), "--offline", "--workers", "1"]
    assert main([*words, str(tmp_path / "out")]) == 0
    assert f"{tmp_path / 'out' / 'binarised'} is ready" in capsys.readouterr().out
    zipped = tmp_path / "zipped"
    words[3] = str(archives / "wikitext-103-raw-v1.zip")
    assert main([*words, str(zipped)]) == 0
    assert (zipped / "binarised" / "train.bin").read_bytes() == (
        tmp_path / "out" / "binarised" / "train.bin"
    ).read_bytes()
    (tmp_path / "empty").mkdir()
    words[3] = str(tmp_path / "empty")
    assert main([*words, str(tmp_path / "other")]) == 2
    assert "wikitext-103-raw-v1.zip is not in" in capsys.readouterr().err


@pytest.mark.slow
def test_text_of_ones_own(tmp_path, toy_wiki, toy_gpt2, monkeypatch, capsys):
    monkeypatch.setattr(prepare_module, "obtain_gpt2_files", lambda folders, offline: toy_gpt2)
    own = tmp_path / "own"
    own.mkdir()
    for path in toy_wiki.iterdir():
        shutil.copyfile(path, own / path.name.replace("wiki.", ""))
    words = ["prepare", "text_gpt2bpe", str(tmp_path / "out"), "--workers", "1"]
    assert main(words) == 2 and "name its folder with --from" in capsys.readouterr().err
    words += ["--from", str(own)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert (
        "$ fairseq-preprocess --only-source" in said and f"{tmp_path / 'out' / 'binarised'} is ready" in said
    )
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["recipe"] == "text_gpt2bpe" and report["splits"]["test"]["lines"] == 40
