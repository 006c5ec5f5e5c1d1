"""Text of which so many pieces are used: C4 and peS2o, in files that a test makes as the hub has them."""

import gzip
import json
import os
import shutil
import sys

import pytest
import sentencepiece

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import monolingual, obtain, pieces
from moa_fairseq.experiments.data.catalogue import Part, datasets, public_files
from moa_fairseq.experiments.data.manifest import read_manifest
from moa_fairseq.experiments.data.parallel_text import DOCUMENT_END, TextFile, read_documents
from moa_fairseq.experiments.data.prepare import prepared_folder
from moa_fairseq.files import checksum

SPLITS = ("train", "valid")


def pieces_of(path):
    return path.read_text("utf-8").split()


def digests(files):
    return lambda part: checksum(files[part].path)


@pytest.fixture
def text(tmp_path, made):
    """Three files of documents, the model learnt on them, and all of their pieces in order."""
    parts = [Part((f"{number}.json.gz",)) for number in range(3)]
    files = {}
    for number, part in enumerate(parts):
        path = tmp_path / part.members[0]
        rows = [
            {"text": "\n".join(made.sentences(3, "en", seed))}
            for seed in range(10 * number, 10 * number + 7)
        ]
        made.documents(path, [*rows, {"text": ""}])
        files[part] = TextFile(path, "documents")
    model = tmp_path / "model" / pieces.MODEL
    documents = [line for piece in files.values() for line in piece.lines()]
    pieces.learn(documents, "text", 60, model, **pieces.LANGUAGE_MODEL)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = [number for line in documents for number in processor.encode(line)]
    return parts, files, model, processor.id_to_piece(ids)


@pytest.mark.parametrize("most", [1, 99, 700, "all"])
def test_the_first_pieces_are_written_and_no_file_behind_them_is_asked_for(
    text, tmp_path, monkeypatch, most
):
    parts, files, model, expected = text
    monkeypatch.setattr(monolingual, "ROW", 50)
    most = len(expected) if most == "all" else most
    asked = []

    def fetch(part):
        asked.append(part)
        return files[part]

    facts = monolingual.grow_pieces(
        parts, fetch, digests(files), model, tmp_path / "new" / "train", most, 2
    )
    found = pieces_of(tmp_path / "new" / "train")
    assert found == expected[:most] and facts["tokens"] == most and facts["parts"] == len(asked)
    assert len(asked) == {1: 1, 99: 1}.get(most, 3 if most == len(expected) else len(asked))


@pytest.mark.parametrize("stop", [0, 6, 7, 20])  # of 21 lines, seven in each file
def test_an_interrupted_text_is_gone_on_with_as_if_nothing_had_been(
    text, tmp_path, monkeypatch, stop
):
    parts, files, model, expected = text
    monkeypatch.setattr(monolingual, "ROW", 30)
    monkeypatch.setattr(monolingual, "SAVED", 1)
    monkeypatch.setattr(monolingual, "BATCH", 2)
    whole = tmp_path / "a" / "train"
    other = tmp_path / "b" / "train"
    most = len(expected) - 5
    facts = monolingual.grow_pieces(parts, files.get, digests(files), model, whole, most, 1)
    read = []

    class Stopping(TextFile):
        def lines(self, mark_bad=False):
            for line in super().lines():
                read.append(line)
                if len(read) == stop + 1:
                    raise KeyboardInterrupt
                yield line

    def fetch(part):
        return Stopping(*files[part])

    with pytest.raises(KeyboardInterrupt):
        monolingual.grow_pieces(parts, fetch, digests(files), model, other, most, 1)
    with open(other, "ab") as stream:  # what was written and not yet noted down
        stream.write("▁half a".encode())
    before = len(read)
    assert monolingual.grow_pieces(parts, fetch, digests(files), model, other, most, 1) == facts
    assert other.read_bytes() == whole.read_bytes()
    done_before = stop // 7  # whole files, which are not opened again
    assert len(read) - before <= 21 - 7 * done_before


def test_pieces_are_on_the_disk_before_the_record_that_counts_them(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(os, "fsync", lambda handle: events.append(os.fstat(handle).st_size))
    monkeypatch.setattr(
        monolingual, "write_json", lambda path, content: events.append("record")
    )
    progress = monolingual._Progress({"most": 9})
    with open(tmp_path / "train", "wb") as stream:
        stream.write(b"three")
        progress.save(stream, tmp_path / "train.json")
    assert events == [5, "record"] and progress.bytes == 5


def test_a_text_that_was_cut_after_an_interrupt_begins_anew(text, tmp_path, monkeypatch):
    parts, files, model, expected = text
    for name, value in (("ROW", 30), ("SAVED", 1)):
        monkeypatch.setattr(monolingual, name, value)
    path = tmp_path / "new" / "train"

    def fetch(part):
        if part == parts[1] and not path.with_name("cut").exists():
            path.with_name("cut").touch()
            raise KeyboardInterrupt
        return files[part]

    with pytest.raises(KeyboardInterrupt):
        monolingual.grow_pieces(parts, fetch, digests(files), model, path, len(expected), 1)
    os.truncate(path, path.stat().st_size // 2)
    monolingual.grow_pieces(parts, fetch, digests(files), model, path, len(expected), 1)
    assert pieces_of(path) == expected


def test_another_number_of_pieces_begins_anew(text, tmp_path):
    parts, files, model, expected = text
    path = tmp_path / "new" / "train"
    for most in (300, 200, 400):
        monolingual.grow_pieces(parts, files.get, digests(files), model, path, most, 1)
        assert pieces_of(path) == expected[:most]


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_file_that_was_edited_begins_the_text_anew(text, tmp_path, monkeypatch, is_gone):
    """One that is gone does not: what it held is in the text."""
    parts, files, model, expected = text
    for name, value in (("ROW", 30), ("SAVED", 1), ("BATCH", 2)):
        monkeypatch.setattr(monolingual, name, value)
    most = len(expected) - 200
    opened = []
    stops = parts[1:2]

    def fetch(part):
        opened.append(part)
        if part in stops:
            stops.remove(part)
            raise KeyboardInterrupt
        return files[part]

    def digest(part):
        return checksum(files[part].path) if files[part].path.is_file() else None

    def grow(name):
        path = tmp_path / name / "train"
        return monolingual.grow_pieces(parts, fetch, digest, model, path, most, 1), path

    with pytest.raises(KeyboardInterrupt):
        grow("new")
    first = files[parts[0]].path
    if not is_gone:
        raw = gzip.decompress(first.read_bytes()).replace(b"the", b"eht")
        first.write_bytes(gzip.compress(raw, mtime=0))
    facts, whole = grow("whole")
    if is_gone:
        first.unlink()
    opened.clear()
    found, new = grow("new")
    assert opened[0] == parts[is_gone]
    assert found == facts and new.read_bytes() == whole.read_bytes()


def hub_of(folder, made, first):
    """Two training files and a validation file of C4, with other sentences for another `first`."""
    names = [f"c4-train.{number:05d}-of-01024.json.gz" for number in range(2)]
    for number, name in enumerate([*names, "c4-validation.00000-of-00008.json.gz"]):
        rows = [{"text": line} for line in made.sentences(100, "en", first + number)]
        made.documents(folder / name, rows)
    return folder


def test_other_text_of_the_same_names_is_prepared_anew(prepare, made, tmp_path, said):
    one, same, other = (
        hub_of(tmp_path / name, made, seed) for name, seed in zip("abc", (0, 0, 7))
    )
    first, root = prepare("c4", one, subsets=SPLITS)
    before = (root / "text/train").read_bytes()
    again, _ = prepare("c4", same, subsets=SPLITS)
    assert again == first and sum("done before" in line for line in said) == 4
    changed, _ = prepare("c4", other, subsets=SPLITS)
    assert (
        changed.fingerprint != first.fingerprint
        and (root / "text/train").read_bytes() != before
    )
    assert not any("done before" in line for line in said)
    # one file of the validation text alone
    shutil.copy(one / "c4-validation.00000-of-00008.json.gz", other)
    prepare("c4", other, subsets=SPLITS)
    assert [line.partition(":")[0] for line in said if "done before" in line] == ["model"]
    content = read_manifest(root)["stages"]["text"]["train"]["files"]
    assert content == {path.name: checksum(path) for path in other.glob("*train.00000*")}
    for path in other.glob("*"):  # the disk is needed
        path.unlink()
    prepare("c4", other, subsets=SPLITS)
    assert sum("done before" in line for line in said) == 4


def test_another_model_in_the_same_place_begins_anew(text, tmp_path):
    parts, files, model, expected = text
    path = tmp_path / "new" / "train"
    monolingual.grow_pieces(parts, files.get, digests(files), model, path, 300, 1)
    lines = [line for part in parts for line in files[part].lines()]
    assert pieces.learn(lines, "text", 90, model, **pieces.LANGUAGE_MODEL)["pieces"] == 90
    monolingual.grow_pieces(parts, files.get, digests(files), model, path, 300, 1)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    new = processor.id_to_piece([number for line in lines for number in processor.encode(line)])
    assert pieces_of(path) == new[:300] != expected[:300]


def test_each_digit_of_a_language_models_text_is_a_piece(tmp_path):
    pieces.learn(
        ["in 1984 and 1985"] * 9, "text", 20, tmp_path / "model", **pieces.LANGUAGE_MODEL
    )
    assert pieces.encode(str(tmp_path / "model"), "1984").split()[-4:] == [*"1984"]


def test_too_little_text_is_an_error(text, tmp_path):
    parts, files, model, expected = text
    with pytest.raises(UserError, match=rf"has {len(expected):,} pieces.* 9,999 .*--tokens"):
        monolingual.grow_pieces(
            parts, files.get, digests(files), model, tmp_path / "train", 9999, 1
        )


@pytest.mark.parametrize("name", ["c4", "pes2o"])
def test_the_hubs_files_become_a_binarised_folder(prepare, miniature, said, name, tmp_path):
    given = miniature(name)
    prepared, root = prepare(name, given, subsets=SPLITS)
    most = datasets()[name].tokens
    assert {split: len(pieces_of(root / "text" / split)) for split in SPLITS} == most
    assert prepared.folder == root / "binarised" and set(prepared.sentences) == set(SPLITS)
    assert DOCUMENT_END.strip("<>")[:5] in "".join(pieces_of(root / "text" / "train"))
    manifest = read_manifest(root)
    assert manifest["settings"]["tokens"] == most and not (root / "growing").exists()
    train = [file for file in manifest["sources"] if "train" in file]
    assert 0 < len(train) < len(list(given.glob("*train*")))
    assert sum("terms of use" in line for line in said) == 1 and any(
        "of disk" in line for line in said
    )
    before = (root / "model" / pieces.MODEL).read_bytes()
    learnt_on = sorted(given.glob("*train*"))[: datasets()[name].learn_on]
    lines = [line for path in learnt_on for line in read_documents(path)]
    pieces.learn(lines, "text", 60, tmp_path / "again", **pieces.RELEASED)
    assert len(learnt_on) == 2 and (tmp_path / "again").read_bytes() == before
    prepare(name, given, subsets=SPLITS, tokens=most["train"] // 2)
    assert len(pieces_of(root / "text" / "train")) == most["train"] // 2
    assert len(pieces_of(root / "text" / "valid")) == most["valid"]
    assert (root / "model" / pieces.MODEL).read_bytes() == before
    assert any(line.startswith("model: done before") for line in said)


def test_a_file_that_is_lacking_is_named_with_its_address(prepare, miniature):
    given = miniature("c4")
    (given / "c4-train.00001-of-01024.json.gz").unlink()
    with pytest.raises(
        UserError,
        match=r"c4-train\.00001-of-01024\.json\.gz is not in .*--offline.*http://.*--from",
    ):
        prepare("c4", given, subsets=SPLITS)


def test_the_disk_is_looked_at_before_anything_is_made(
    prepare, miniature, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        obtain.shutil, "disk_usage", lambda place: obtain.shutil._ntuple_diskusage(1, 1, 1000)
    )
    with pytest.raises(UserError, match="c4 needs about"):
        prepare("c4", miniature("c4"), subsets=SPLITS)
    assert not (tmp_path / "out" / "model").exists()


def test_the_table_knows_the_hubs_names():
    for name, train, valid in (("c4", 1024, 8), ("pes2o", 20, 2)):
        parts = datasets()[name].parts()
        assert (len(parts["train"]), len(parts["valid"])) == (train, valid)
        assert datasets()[name].downloadable
    one = public_files()["c4/c4-train.00007-of-01024.json.gz"]
    assert one.urls[0].endswith("/en/c4-train.00007-of-01024.json.gz")
    assert (
        public_files()["pes2o/train-00019-of-00020.json.gz"]
        .urls[0]
        .endswith("/v2/train-00019-of-00020.json.gz")
    )


def test_data_of_other_recipes_stays_where_it_was(tmp_path):
    """A key that is new and says nothing names no other folder."""
    old = {"recipe": "wikitext103_sp8k", "source": None, "target": None, "bpe": None}
    assert prepared_folder({**old, "tokens": None}, None, tmp_path) == prepared_folder(
        old, None, tmp_path
    )
    assert prepared_folder({**old, "tokens": 9}, None, tmp_path) != prepared_folder(
        old, None, tmp_path
    )


@pytest.mark.parametrize("line", ["{", "[]", '{"body": "x"}', '{"text": 1}', "null"])
def test_a_line_that_is_no_document_is_named(tmp_path, line):
    path = tmp_path / "a.json"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(UserError, match=r'a\.json, line 2: .*"text"'):
        list(read_documents(path))


def test_documents_of_every_packing_are_the_same(tmp_path, monkeypatch):
    raw = "".join(
        json.dumps({"text": text}) + "\n" for text in ("a\nb", "", "ü" * 700_000)
    ).encode()
    plain, packed, other = (tmp_path / f"a.jsonl{ending}" for ending in ("", ".gz", ".zst"))
    plain.write_bytes(raw)
    packed.write_bytes(gzip.compress(raw))
    expected = ["a\nb" + DOCUMENT_END, "ü" * 700_000 + DOCUMENT_END]
    assert list(read_documents(plain)) == list(read_documents(packed)) == expected
    other.write_bytes(b"")
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match=r"a\.jsonl\.zst.*pip install zstandard"),
    ):
        patch.setitem(sys.modules, "zstandard", None)
        list(read_documents(other))
    zstandard = pytest.importorskip("zstandard")
    squeezed = zstandard.ZstdCompressor().compress(raw)
    other.write_bytes(squeezed)
    assert list(read_documents(other)) == expected
    noise = json.dumps({"text": "".join(map(str, range(100_000)))}).encode() + b"\n"
    squeezed = zstandard.ZstdCompressor().compress(noise)
    for damaged, words in (
        (squeezed[: len(squeezed) // 2], "line 1: .*fetch it again"),
        (raw, "damaged zstandard"),
    ):
        other.write_bytes(damaged)
        with pytest.raises(UserError, match=words):
            list(read_documents(other))


def test_text_of_ones_own_may_be_documents(prepare, made, tmp_path):
    own = tmp_path / "own"
    for split, count in (("train", 40), ("valid", 5), ("test", 5)):
        made.documents(
            own / f"{split}.jsonl", [{"text": line} for line in made.sentences(count, "en")]
        )
    _, root = prepare("text_sp", own, bpe=60)
    assert read_manifest(root)["stages"]["text"]["train"]["lines"] == 40
