"""What each data set becomes, on miniature archives with the real layout and names."""

import gzip
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import download, pieces
from moa_fairseq.experiments.data.catalogue import datasets, public_files
from moa_fairseq.experiments.data.manifest import read_manifest, summary
from moa_fairseq.experiments.inference.text_codec import codec_of
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.loading import load_recipe, shipped_recipes
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.running import run_recipe
from moa_fairseq.text.steps import STEPS


def lines_of(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def dictionaries(root):
    return [path.read_bytes() for path in sorted((root / "binarised").glob("dict.*.txt"))]


def test_wmt14_en_de(prepare, miniature):
    prepared, root = prepare("wmt14_en_de", miniature("wmt14_en_de"))
    # 60 + 20 + 30 pairs, and three of CommonCrawl that cleaning drops for three reasons
    assert prepared.sentences == {"train": 110, "valid": 5, "test": 5}
    manifest = read_manifest(root)
    dropped = manifest["stages"]["tokens"]["train"]["dropped"]
    assert dropped == {"empty side": 1, "length ratio above 9": 1, "longer than 80 tokens": 1}
    english, german = (
        lines_of(root / "tokens" / f"test.{language}") for language in ("en", "de")
    )
    # test text keeps its quotes but for ’; training text is normalised; hyphens are split in both
    assert english[-1] == "It &apos;s “ here ” ." and "alt @-@ modisch" in " ".join(german)
    assert "„" not in (root / "tokens" / "train.de").read_text("utf-8")
    assert "@@" in (root / "bpe" / "train.de").read_text("utf-8")
    assert len(set(dictionaries(root))) == 1
    source = manifest["sources"]["wmt13/training-parallel-europarl-v7.tgz"]
    assert len(source["sha256"]) == 64 and source["origin"] and "urls" not in source
    assert manifest["lines"]["valid"] == {"found": 5, "expected": 3000}
    assert {"python", "subword-nmt", "sacremoses", "moa_fairseq"} <= set(manifest["tools"])


def test_vaswani_is_segmented_already(prepare, miniature):
    prepared, root = prepare("wmt14_en_de_vaswani", miniature("wmt14_en_de_vaswani"))
    assert prepared.sentences == {"train": 40, "valid": 4, "test": 5}
    assert not (root / "bpe").exists()
    assert (root / "codes").read_text("utf-8") == "#version: 0.2\n"  # for fine-tuning
    assert "e@@ " in (root / "tokens" / "train.en").read_text("utf-8")


def test_vaswani_rebuilt_from_public_archives(prepare, miniature, made):
    archives = miniature("wmt14_en_de")
    news = {
        f"training-parallel-nc-v11/news-commentary-v11.de-en.{lang}": made.text(
            made.sentences(30, lang, 3)
        )
        for lang in ("en", "de")
    }
    made.write_tar(archives / "training-parallel-nc-v11.tgz", news)
    prepared, root = prepare("wmt14_en_de_vaswani_rebuilt", archives)
    assert prepared.sentences == {"train": 110, "valid": 5, "test": 5}
    dropped = read_manifest(root)["stages"]["tokens"]["train"]["dropped"]
    assert set(dropped) == {"empty side", "length ratio above 9", "longer than 80 tokens"}
    tokens = (root / "tokens" / "train.en").read_text("utf-8")
    # neither -a nor normalised: hyphens and typographic quotes stay
    assert "old-fashioned" in tokens and "@-@" not in tokens and "“ quick ”" in tokens


def test_wmt14_en_fr_cleans_after_bpe_and_holds_out(prepare, miniature):
    prepared, root = prepare("wmt14_en_fr", miniature("wmt14_en_fr"))
    tokens = {
        split: len(lines_of(root / "tokens" / f"{split}.fr"))
        for split in ("train", "valid", "test")
    }
    assert tokens == {"train": 1419, "valid": 1, "test": 5}  # 1,420 pairs; the 1,333rd is valid
    manifest = read_manifest(root)
    dropped = manifest["stages"]["bpe"]["train"]["dropped"]
    assert (
        prepared.sentences["train"] == 1419 - sum(dropped.values())
        and "length ratio above 1.5" in dropped
    )
    assert manifest["lines"]["train"]["found"] == prepared.sentences["train"]
    assert lines_of(root / "tokens" / "test.fr")[-1] == "C&apos; est « ici » ."


@pytest.mark.parametrize(("source", "target"), [("de", "en"), ("en", "de")])
def test_iwslt14(prepare, miniature, source, target):
    prepared, root = prepare(
        "iwslt14_de_en", miniature("iwslt14_de_en"), source=source, target=target
    )
    train, valid = (lines_of(root / "tokens" / f"{split}.de") for split in ("train", "valid"))
    assert len(valid) == (len(train) + len(valid)) // 23
    assert (
        prepared.sentences["test"]
        == len(lines_of(root / "tokens" / "test.en"))
        == 2 + 3 + 4 + 5 + 6
    )
    everything = "\n".join(train)
    assert (
        everything == everything.lower()
        and "talkid" not in everything
        and "title&gt;" not in everything
    )
    assert len(set(dictionaries(root))) == 2


@pytest.mark.parametrize(("source", "target"), [("en", "de"), ("fr", "en")])
def test_multi30k(prepare, miniature, source, target):
    prepared, root = prepare("multi30k", miniature("multi30k"), source=source, target=target)
    assert prepared.sentences == {"train": 60, "valid": 5, "test": 6, "test1": 4, "test2": 3}
    assert (
        next(iter(read_manifest(root)["sources"]))
        == f"multi30k/test_2016_flickr.{min(source, target)}.gz"
    )


def test_multi30k_is_compared_with_the_published_text(prepare, miniature, monkeypatch):
    """Only the published pair with the published merges; the miniature is another text, and then its own."""

    def compared(out, source="en", target="de", bpe=10000):
        _, root = prepare("multi30k", archives, out, source=source, target=target, bpe=bpe)
        manifest = read_manifest(root)
        return manifest["published"], "\n".join(summary(manifest, root))

    archives = miniature("multi30k")
    published = datasets()["multi30k"].published
    found, said = compared("one")
    assert set(found) == {f"bpe/{name}" for name in published["md5"]} and len(found) == 6
    assert "train.en" in said and "! " in said and "md5" in said
    monkeypatch.setitem(published, "md5", {name[4:]: one["md5"] for name, one in found.items()})
    for pair in (("en", "de"), ("de", "en")):  # one text, whichever way it is read
        assert (
            "equal to the published text, byte for byte" in compared("-".join(pair), *pair)[1]
        )
    assert not compared("merges", bpe=20)[0] and not compared("fr", target="fr")[0]


def test_wikitext_words(prepare, miniature):
    prepared, root = prepare("wikitext103_word", miniature("wikitext103_word"))
    assert prepared.sentences == {"train": 160, "valid": 12, "test": 14}
    assert lines_of(root / "text" / "train")[1] == " "
    words = {line.split()[0] for line in lines_of(root / "binarised" / "dict.txt")}
    assert "house" in words and "<unk>" not in words and "street" not in words


def test_wikitext_pieces(prepare, miniature):
    _, root = prepare("wikitext103_sp8k", miniature("wikitext103_sp8k"))
    facts = read_manifest(root)["stages"]["text"]
    assert {split: fact["lines"] for split, fact in facts.items()} == {
        "train": 160,
        "valid": 12,
        "test": 14,
    }
    text = (root / "text" / "train").read_text("utf-8")
    assert text.count("\n") == 1 and "▁" in text  # line ends are forgotten; digits stand apart


@pytest.mark.parametrize("name", ["wikitext2_sp512", "text_sp"])
def test_the_published_unknown_word_is_one_piece(prepare, made, tmp_path, name):
    stem = {"text_sp": "{}.txt", "wikitext2_sp512": "wikitext-2.{}.txt"}[name]
    line = "the <unk> river <unk> flows , <s> a < b </s>"
    for split in ("train", "valid", "test"):
        rows = [line, *made.sentences(40, "en")]
        (tmp_path / stem.format(split)).write_text(made.text(rows), "utf-8")
    prepared, root = prepare(name, tmp_path, bpe=60)
    text = (root / "text" / "valid").read_text("utf-8").split()
    assert text.count("▁<unk>") == 2 and "<unk>" not in text
    known = {
        row.split()[0] for row in (prepared.folder / "dict.txt").read_text("utf-8").splitlines()
    }
    assert "▁<unk>" in known and not known & {"<unk>", "<s>", "</s>"}
    codec = codec_of(prepared.folder, "language_modeling")
    assert codec.decode(codec.encode(line)).strip() == line
    settings = read_manifest(root)["stages"]["model"]["settings"]
    assert settings["user_defined_symbols"] == ["▁<unk>"] and "<" in settings["required_chars"]


def test_pieces_of_other_settings_are_learnt_again(prepare, made, tmp_path, monkeypatch):
    for split in ("train", "valid", "test"):
        rows = ["the <unk> river", *made.sentences(40, "en")]
        (tmp_path / f"{split}.txt").write_text(made.text(rows), "utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(pieces, "LANGUAGE_MODEL", pieces.RELEASED)
        before, root = prepare("text_sp", tmp_path, bpe=60)
        assert "▁<unk>" not in (root / "text" / "train").read_text("utf-8")
    after, root = prepare("text_sp", tmp_path, bpe=60)
    assert "▁<unk>" in (root / "text" / "train").read_text("utf-8").split()
    assert before.fingerprint != after.fingerprint


def test_pieces_of_a_release_are_as_its_code_learns_them(prepare, miniature):
    _, root = prepare("wikitext103_sp8k", miniature("wikitext103_sp8k"))
    assert read_manifest(root)["stages"]["model"]["settings"] == {
        "model_type": "bpe",
        "split_digits": True,
    }
    released = {name for name, dataset in datasets().items() if dataset.released_pieces}
    assert released == {"wikitext103_sp8k", "c4", "pes2o"}


def test_wikitext_raw_is_plain_text(prepare, miniature):
    prepared, root = prepare("wikitext103_raw", miniature("wikitext103_raw"))
    assert prepared.folder == root / "text" and not (root / "binarised").exists()
    assert len(lines_of(root / "text" / "train")) == 160


def test_enwik8_is_bytes(prepare, miniature, made):
    prepared, root = prepare("enwik8", miniature("enwik8"))
    raw = made.text(made.sentences(90, "fr", 9)).encode()[:2000]
    numbers = [
        [int(number) for number in line.split()] for line in lines_of(root / "text" / "valid")
    ]
    assert b"\n".join(map(bytes, numbers)) == raw[1800:1900].rstrip(b"\n")
    # one symbol of fairseq per byte, as a line end stands for the line feed
    assert sum(len(line) + 1 for line in numbers) == 100 + (raw[1899:1900] != b"\n")
    assert prepared.sentences["valid"] == len(numbers)


def test_gpt2s_encoding(prepare, toy_wiki, toy_gpt2, said):
    prepared, root = prepare("wikitext2_gpt2bpe", toy_wiki)
    assert prepared.sentences == {"train": 160, "valid": 40, "test": 40}
    dictionary = Dictionary.load(str(prepared.folder / "dict.txt"))
    assert len(dictionary) == 4 + 263
    data = data_utils.load_indexed_dataset(str(prepared.folder / "train"), dictionary)
    assert data[0].tolist() == [dictionary.eos()]  # an empty line stays one
    assert dictionary.string(data[1]) == lines_of(root / "bpe" / "train")[1]
    assert dictionary.unk() not in data[1]
    facts = read_manifest(prepared.folder)
    text = (toy_wiki / "wiki.train.raw").read_text()
    assert facts["splits"]["train"]["words"] == len(text.split())
    assert facts["splits"]["train"]["unk"] == text.count("<unk>")
    assert (
        facts["dictionary"] == "roberta"
        and facts["splits"]["train"]["file"] == "wiki.train.raw"
    )
    assert (prepared.folder / "encoder.json").read_bytes() == toy_gpt2.encoder.read_bytes()
    assert any(
        line.startswith("WARNING") and "2,088,628 words were expected" in line for line in said
    )
    prepared, _ = prepare("wikitext2_gpt2bpe", toy_wiki, "other", flags={"srcdict": None})
    assert len(lines_of(prepared.folder / "dict.txt")) < 263
    assert read_manifest(prepared.folder)["dictionary"] == "data.flags.srcdict"


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("wikitext2_gpt2bpe", "wiki.{}.tokens"),
        ("wikitext2_gpt2bpe", "wikitext-2.{}.txt.gz"),
        ("text_gpt2bpe", "{}.txt"),
        ("text_gpt2bpe", "{}.raw.gz"),
    ],
)
def test_running_text_under_its_other_names(
    prepare, toy_wiki, toy_wiki_data, tmp_path, recipe, name
):
    (tmp_path / "own").mkdir()
    for path in toy_wiki.iterdir():
        content = (
            gzip.compress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
        )
        (tmp_path / "own" / name.format(path.name.split(".")[1])).write_bytes(content)
    other, _ = prepare(recipe, tmp_path / "own")
    expected = (toy_wiki_data / "train.bin").read_bytes()
    assert (other.folder / "train.bin").read_bytes() == expected
    # the raw text of a set comes before its other editions
    if recipe == "wikitext2_gpt2bpe":
        shutil.copytree(toy_wiki, tmp_path / "own", dirs_exist_ok=True)
        again, _ = prepare(recipe, tmp_path / "own", "again")
        assert read_manifest(again.folder)["splits"]["test"]["file"] == "wiki.test.raw"


@pytest.mark.parametrize(
    ("name", "packed"), [("iwslt14_de_en", True), ("wmt14_en_de_vaswani", False)]
)
def test_extracted_files_serve_as_well_as_archives(
    prepare, miniature, tmp_path, made, name, packed
):
    archives = miniature(name)
    _, closed = prepare(name, archives, "closed")
    for archive in archives.glob("*gz"):
        with tarfile.open(archive) as package:
            package.extractall(tmp_path / "open", filter="data")
    for path in [path for path in (tmp_path / "open").rglob("*") if packed and path.is_file()]:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    _, opened = prepare(name, tmp_path / "open", "opened")
    assert made.tree(closed / "binarised") == made.tree(opened / "binarised")


def test_tokenised_text_of_ones_own_only_gets_bpe(prepare, own_text, made, said):
    prepared, root = prepare("wmt14_en_de", own_text)
    assert (
        "train.de" in said[0] and "tokenised" in said[0] and prepared.sentences["train"] == 30
    )
    assert lines_of(root / "tokens" / "train.de") == made.sentences(30, "de")


def test_languages_and_directions_that_are_not_there(prepare, miniature):
    archives = miniature("wmt14_en_de")
    with pytest.raises(UserError, match="no language cs"):
        prepare("wmt14_en_de", archives, source="cs", target="en")
    with pytest.raises(UserError, match=r"newstest2013\.de or dev/newstest2013-src\.de\.sgm"):
        # The miniature has one direction only
        prepare("wmt14_en_de", archives, source="de", target="en")


@pytest.mark.parametrize(
    ("config", "name", "done"),
    [
        ("wmt14_ende_moa_base", "wmt14_en_de", 5 + 4),
        ("wikitext103_mlm_transformer", "wikitext103_gpt2bpe", 1 + 2),
        ("wikitext2_mlm_transformer_tiny", "wikitext103_gpt2bpe", 1 + 2),
    ],
)
def test_a_recipe_needs_no_data_of_its_users(
    prepare, miniature, tmp_path, preprocess, monkeypatch, config, name, done, said
):
    """`moa-fairseq recipe` without --data: what is in data/downloads is used, else fetched."""
    archives = miniature(name)
    served = []

    def serve(source, folder, pauses):
        served.append(source.name)
        (folder / source.name).parent.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copyfile(archives / Path(source.name).name, folder / source.name))

    monkeypatch.setattr(download, "download", serve)
    recipe = load_recipe(
        shipped_recipes()[config], ["data.bpe=20"] if name == "wmt14_en_de" else []
    )
    options = Options("prepare", save_dir=tmp_path / "run", data_root=tmp_path / "data")
    run_recipe(recipe, Hardware(), options, lambda environment: preprocess)
    files = datasets()[recipe.data.recipe].files(("en", "de") if name == "wmt14_en_de" else ())
    assert served == [file.name for file in files]
    known = [line for line in said if line.startswith("$ ")]
    state = json.loads((tmp_path / "run" / "state.json").read_text("utf-8"))["prepare"]["facts"]
    assert state["sentences"]["train"] in (110, 160) and state["source"] is None
    place = Path(state["folder"])
    facts = read_manifest(place) or read_manifest(place.parent)
    assert set(facts["sources"]) == set(served) and all(
        row["urls"] for row in facts["sources"].values()
    )
    assert facts["licence"] and any(
        f"terms of use: {facts['licence'][:20]}" in line for line in said
    )
    said.clear()
    run_recipe(recipe, Hardware(), options, dry_run=True)
    # What a dry run shows is what was run
    assert known == [line for line in said if line.startswith("$ ")]
    said.clear()
    run_recipe(recipe, Hardware(), options, lambda environment: preprocess)
    assert sum("done before" in line for line in said) == done and len(served) == len(files)


def test_tables_hold_together():
    """Every archive of a data set is a public file, with an address and a known kind of checksum."""
    for dataset in datasets().values():
        assert all(
            part.source for parts in dataset.splits.values() for part in parts if part.archive
        )
        for split in dataset.subsets:
            assert {name for name, _ in dataset.steps_for(split, "en", {})} <= set(STEPS)
        assert not dataset.downloadable or (dataset.licence and dataset.disk)
    for source in public_files().values():
        assert source.urls and all(
            url.startswith(("http", "pip:")) and "{" not in url for url in source.urls
        )
        assert source.sha256 is None or len(source.sha256) == 64
        assert source.md5 is None or len(source.md5) == 32
