"""Every data set end to end on miniature archives with the real layout and names."""

import gzip
import json
import tarfile

import pytest

from moa_fairseq.data_prep import catalogue
from moa_fairseq.data_prep.catalogue import TRANSLATION, datasets, public_files
from moa_fairseq.data_prep.manifest import summary
from moa_fairseq.data_prep.prepare import Preparation
from moa_fairseq.errors import UserError

MERGES = 20


@pytest.fixture
def prepare(tables, preprocess, tmp_path, said):
    """prepare(name, folder of archives, ...) → (Prepared, output folder, what was said)."""
    tables()

    def run(
        name, at_hand, source=None, target=None, out="out", subsets=("train", "valid", "test"), **settings
    ):
        said.clear()
        root, dataset, values = tmp_path / out, datasets()[name], {"recipe": name, "flags": {}}
        if dataset.kind == TRANSLATION:
            values = {
                **values,
                "source": source or dataset.languages[0],
                "target": target or dataset.languages[1],
                "bpe": MERGES if dataset.merges else None,
                "joined_dictionary": dataset.joined_dictionary,
                "lowercase": False,
                **settings,
            }
        folders = (at_hand, root, preprocess, tmp_path / "downloads")
        return Preparation(values, subsets, *folders, offline=True, workers=1).run(), root, list(said)

    return run


def lines_of(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def said_of(root):
    return summary(manifest_of(root), root)


def manifest_of(root):
    return json.loads((root / "manifest.json").read_text(encoding="utf-8"))


def test_wmt14_en_de(prepare, miniature):
    prepared, root, _ = prepare("wmt14_en_de", miniature("wmt14_en_de"))
    # 60 + 20 + 30 pairs, and three of CommonCrawl that cleaning drops for three reasons
    assert prepared.sentences == {"train": 110, "valid": 5, "test": 5}
    manifest = manifest_of(root)
    assert manifest["stages"]["tokens"]["train"]["dropped"] == {
        "empty side": 1,
        "length ratio above 9": 1,
        "longer than 80 tokens": 1,
    }
    english, german = (lines_of(root / "tokens" / f"test.{language}") for language in ("en", "de"))
    # test text keeps its quotes but for ’; training text is normalised; hyphens are split in both
    assert english[-1] == "It &apos;s “ here ” ." and "alt @-@ modisch" in " ".join(german)
    assert "„" not in (root / "tokens" / "train.de").read_text(encoding="utf-8")
    assert "@@" in (root / "bpe" / "train.de").read_text(encoding="utf-8")
    assert (root / "binarised" / "dict.en.txt").read_bytes() == (
        root / "binarised" / "dict.de.txt"
    ).read_bytes()
    source = manifest["sources"]["wmt13/training-parallel-europarl-v7.tgz"]
    assert len(source["sha256"]) == 64 and source["origin"] and "urls" not in source
    assert manifest["lines"]["valid"] == {"found": 5, "expected": 3000}
    assert {"python", "subword-nmt", "sacremoses", "moa_fairseq"} <= set(manifest["tools"])
    assert all(len(row["sha256"]) == 64 for row in manifest["outputs"].values())


def test_the_other_direction_takes_the_other_files(prepare, miniature):
    with pytest.raises(UserError, match=r"newstest2013\.de or dev/newstest2013-src\.de\.sgm"):
        prepare("wmt14_en_de", miniature("wmt14_en_de"), "de", "en")  # the miniature has one direction only


def test_vaswani_is_segmented_already(prepare, miniature):
    prepared, root, _ = prepare("wmt14_en_de_vaswani", miniature("wmt14_en_de_vaswani"))
    assert prepared.sentences == {"train": 40, "valid": 4, "test": 5}
    assert not (root / "bpe").exists()
    assert (root / "codes").read_text(encoding="utf-8") == "#version: 0.2\n"  # for fine-tuning
    assert "e@@ " in (root / "tokens" / "train.en").read_text(encoding="utf-8")


def test_vaswani_rebuilt_from_public_archives(prepare, miniature, made):
    archives = miniature("wmt14_en_de")
    news = {
        f"training-parallel-nc-v11/news-commentary-v11.de-en.{lang}": made.text(made.sentences(30, lang, 3))
        for lang in ("en", "de")
    }
    made.write_tar(archives / "training-parallel-nc-v11.tgz", news)
    prepared, root, _ = prepare("wmt14_en_de_vaswani_rebuilt", archives)
    assert prepared.sentences == {"train": 110, "valid": 5, "test": 5}
    dropped = manifest_of(root)["stages"]["tokens"]["train"]["dropped"]
    assert set(dropped) == {"empty side", "length ratio above 9", "longer than 80 tokens"}
    tokens = (root / "tokens" / "train.en").read_text(encoding="utf-8")
    # neither -a nor normalised: hyphens and typographic quotes stay
    assert "old-fashioned" in tokens and "@-@" not in tokens and "“ quick ”" in tokens
    everything = datasets()["wmt14_en_de_vaswani_rebuilt"]
    assert everything.merges == 32000 and everything.expected["train"] == 4500966


def test_wmt14_en_fr_cleans_after_bpe_and_holds_out(prepare, miniature):
    prepared, root, _ = prepare("wmt14_en_fr", miniature("wmt14_en_fr"))
    tokens = {split: len(lines_of(root / "tokens" / f"{split}.fr")) for split in ("train", "valid", "test")}
    assert tokens == {"train": 1419, "valid": 1, "test": 5}  # 1,420 pairs; the 1,333rd is valid
    dropped = manifest_of(root)["stages"]["bpe"]["train"]["dropped"]
    assert prepared.sentences["train"] == 1419 - sum(dropped.values()) and "length ratio above 1.5" in dropped
    assert lines_of(root / "tokens" / "test.fr")[-1] == "C&apos; est « ici » ."


@pytest.mark.parametrize(("source", "target"), [("de", "en"), ("en", "de")])
def test_iwslt14(prepare, miniature, source, target):
    prepared, root, _ = prepare("iwslt14_de_en", miniature("iwslt14_de_en"), source, target)
    tokens = root / "tokens"
    train, valid = (lines_of(tokens / f"{split}.de") for split in ("train", "valid"))
    dropped = manifest_of(root)["stages"]["tokens"]["train"]["dropped"]
    # title, description and speaker lines stay, as in fairseq's script; three headers go
    read = manifest_of(root)["stages"]["tokens"]["train"]["read"]
    assert read == 63 and len(train) + len(valid) == read - sum(dropped.values())
    assert len(valid) == (len(train) + len(valid)) // 23
    assert len(lines_of(tokens / "test.en")) == 2 + 3 + 4 + 5 + 6
    everything = (tokens / "train.de").read_text(encoding="utf-8")
    assert everything == everything.lower() and "talkid" not in everything and "title&gt;" not in everything
    assert prepared.sentences["test"] == 20
    assert (root / "binarised" / f"dict.{source}.txt").read_bytes() != (
        root / "binarised" / f"dict.{target}.txt"
    ).read_bytes()


@pytest.mark.parametrize(("source", "target"), [("en", "de"), ("en", "fr"), ("fr", "en")])
def test_multi30k(prepare, miniature, source, target):
    prepared, root, _ = prepare("multi30k", miniature("multi30k"), source, target)
    assert prepared.sentences == {"train": 60, "valid": 5, "test": 6, "test1": 4, "test2": 3}
    assert next(iter(manifest_of(root)["sources"])) == f"multi30k/test_2016_flickr.{min(source, target)}.gz"


def test_multi30k_is_compared_with_the_published_text(prepare, miniature, monkeypatch):
    """Only the published pair with the published merges; the miniature is another text, and then its own."""
    archives = miniature("multi30k")
    published = datasets()["multi30k"].published
    assert published.merges == 10000 and len(published.md5) == 6
    merges = {"bpe": published.merges}
    _, root, _ = prepare("multi30k", archives, "en", "de", **merges)
    assert any("train.en" in line and "not the published text" in line for line in said_of(root))
    found = {name: one["md5"] for name, one in manifest_of(root)["published"].items()}
    assert set(found) == {f"bpe/{name}" for name in published.md5}
    monkeypatch.setattr(
        *(catalogue.Published, "__getattribute__"),
        lambda self, key: (
            {name[4:]: md5 for name, md5 in found.items()}
            if key == "md5"
            else object.__getattribute__(self, key)
        ),
    )
    for source, target in (("en", "de"), ("de", "en")):  # one text, whichever way it is read
        _, root, _ = prepare("multi30k", archives, source, target, out=f"{source}-again", **merges)
        assert any("equal to the published text, byte for byte" in line for line in said_of(root))
    for source, target, changed in (("en", "de", {}), ("en", "fr", merges)):
        _, root, _ = prepare("multi30k", archives, source, target, **changed)
        assert manifest_of(root)["published"] == {}


def test_wikitext_words(prepare, miniature):
    prepared, root, _ = prepare("wikitext103_word", miniature("wikitext103_word"))
    assert prepared.sentences == {"train": 160, "valid": 12, "test": 14}
    assert lines_of(root / "text" / "train")[1] == " "
    words = {line.split()[0] for line in lines_of(root / "binarised" / "dict.txt")}
    assert "house" in words and "<unk>" not in words and "street" not in words


def test_wikitext_pieces(prepare, miniature):
    prepared, root, _ = prepare("wikitext103_sp8k", miniature("wikitext103_sp8k"))
    facts = manifest_of(root)["stages"]["text"]
    assert {split: fact["lines"] for split, fact in facts.items()} == {"train": 160, "valid": 12, "test": 14}
    text = (root / "text" / "train").read_text(encoding="utf-8")
    assert text.count("\n") == 1 and "▁" in text  # line ends are forgotten; digits stand apart
    assert prepared.sentences["train"] == 1
    assert (root / "model" / "sentencepiece.model").stat().st_size
    model = (root / "model" / "sentencepiece.model").stat().st_mtime_ns
    prepare("wikitext103_sp8k", root.parent / "archives" / "wikitext103_sp8k")
    assert (root / "model" / "sentencepiece.model").stat().st_mtime_ns == model


def test_wikitext_raw_is_plain_text(prepare, miniature):
    prepared, root, _ = prepare("wikitext103_raw", miniature("wikitext103_raw"))
    assert prepared.folder == root / "text" and not (root / "binarised").exists()
    assert len(lines_of(root / "text" / "train")) == 160


def test_enwik8_is_bytes(prepare, miniature, made):
    prepared, root, _ = prepare("enwik8", miniature("enwik8"))
    raw = made.text(made.sentences(90, "fr", 9)).encode()[:2000]
    numbers = [[int(number) for number in line.split()] for line in lines_of(root / "text" / "valid")]
    assert b"\n".join(map(bytes, numbers)) == raw[1800:1900].rstrip(b"\n")
    # one symbol of fairseq per byte, as a line end stands for the line feed
    assert sum(len(line) + 1 for line in numbers) == 100 + (raw[1899:1900] != b"\n")
    assert prepared.sentences["valid"] == len(numbers)


def test_enwik8_cut_off(prepare, tmp_path):
    (tmp_path / "enwik8").write_bytes(b"x" * 1999)
    with pytest.raises(UserError, match="1,999 bytes instead of 2,000"):
        prepare("enwik8", tmp_path)


def test_extracted_files_serve_as_well_as_archives(prepare, miniature, tmp_path, made):
    archives = miniature("iwslt14_de_en")
    _, closed, _ = prepare("iwslt14_de_en", archives, out="closed")
    for archive in archives.glob("*.tgz"):
        with tarfile.open(archive) as package:
            package.extractall(tmp_path / "open")
    _, opened, _ = prepare("iwslt14_de_en", tmp_path / "open", out="opened")
    assert made.tree(closed / "bpe") == made.tree(opened / "bpe")


def test_gzipped_extracted_files(prepare, miniature, tmp_path, made):
    archives = miniature("wmt14_en_de_vaswani")
    _, closed, _ = prepare("wmt14_en_de_vaswani", archives, out="closed")
    (tmp_path / "open").mkdir()
    with tarfile.open(archives / "wmt16_en_de.tar.gz") as package:
        for member in package:
            content = gzip.compress(package.extractfile(member).read())
            (tmp_path / "open" / f"{member.name}.gz").write_bytes(content)
    _, opened, _ = prepare("wmt14_en_de_vaswani", tmp_path / "open", out="opened")
    assert made.tree(closed / "tokens") == made.tree(opened / "tokens")


def test_tokenised_text_of_ones_own_only_gets_bpe(prepare, tmp_path, made):
    own = tmp_path / "own"
    own.mkdir()
    for split, count in (("train", 30), ("valid", 3), ("test", 3)):
        for language in ("en", "de"):
            (own / f"{split}.{language}").write_text(made.text(made.sentences(count, language)), "utf-8")
    prepared, root, said = prepare("wmt14_en_de", own)
    assert "taken as tokenised" in said[0] and prepared.sentences["train"] == 30
    assert lines_of(root / "tokens" / "train.de") == made.sentences(30, "de")


def test_a_second_time_is_a_no_op(prepare, miniature, made):
    archives = miniature("wmt14_en_de")
    first, root, _ = prepare("wmt14_en_de", archives)
    before = made.tree(root)
    again, _, said = prepare("wmt14_en_de", archives)
    assert again == first and made.tree(root) == before
    assert sum("done before" in line for line in said) == 5 + 4  # five archives, three stages, the manifest


def test_languages_and_subsets_that_are_not_there(prepare, miniature):
    with pytest.raises(UserError, match="no language cs"):
        prepare("wmt14_en_de", miniature("wmt14_en_de"), "cs", "en")
    with pytest.raises(UserError, match=r"no subset test9.*train, valid, test"):
        prepare("iwslt14_de_en", miniature("iwslt14_de_en"), subsets=("test9",))


def test_tables_hold_together(tables):
    """Every archive of a data set is a public file, with an address and a known kind of checksum."""
    from moa_fairseq.text.pipeline import STEPS

    for dataset in datasets().values():
        archives = {part.archive for parts in dataset.splits.values() for part in parts if part.archive}
        assert archives <= set(public_files())
        for split in dataset.subsets:
            assert {name for name, _ in dataset.steps_for(split, "en")} <= set(STEPS)
    for source in public_files().values():
        assert source.urls and all(url.startswith(("http", "pip:")) and "{" not in url for url in source.urls)
        assert source.sha256 is None or len(source.sha256) == 64
        assert source.md5 is None or len(source.md5) == 32
    ready = {name: data.kind for name, data in datasets().items() if data.downloadable}
    downloadable = {name for name, kind in ready.items() if kind == TRANSLATION}
    names = {"wmt14_en_de", "wmt14_en_de_vaswani", "wmt14_en_fr", "iwslt14_de_en", "iwslt14_de_en_cased"}
    assert downloadable == {*names, "multi30k", "wmt14_en_de_vaswani_rebuilt"}
    for dataset in datasets().values():
        assert not dataset.downloadable or (dataset.licence and dataset.disk)
    assert all(name in ready for name, data in datasets().items() if data.kind == "language_modeling")
