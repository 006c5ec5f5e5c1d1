"""Reading parallel text: every kind of broken file ends in a message that names file and line."""

import gzip

import pytest

from moa_fairseq.data_prep.parallel_text import SplitFiles, find_splits, read_lines, read_pairs
from moa_fairseq.errors import UserError


def test_lines(tmp_path):
    path = tmp_path / "x.en"
    path.write_bytes("\ufeffone\r\ntwo\u2028still two\n\nlast".encode())
    assert list(read_lines(path)) == ["one", "two\u2028still two", "", "last"]


def test_gzip(tmp_path):
    path = tmp_path / "x.en.gz"
    path.write_bytes(gzip.compress("ä\nb\n".encode()))
    assert list(read_lines(path)) == ["ä", "b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"fine\nna\xefve\n", ["line 2", "0xef", "UTF-8"]),
        (b"a\nb\nc\0d\n", ["line 3", "NUL"]),
        (b"x" * 1_000_001, ["line 1", "bytes long"]),
    ],
)
def test_bad_bytes(tmp_path, content, words):
    path = tmp_path / "x.en"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        list(read_lines(path))
    for word in [str(path), *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda data: b"<html>" + data])
def test_damaged_gzip(tmp_path, damage):
    path = tmp_path / "x.en.gz"
    path.write_bytes(damage(gzip.compress(b"some text\n" * 1000)))
    with pytest.raises(UserError, match="damaged gzip"):
        list(read_lines(path))


def pair_of(tmp_path, source, target):
    files = SplitFiles(tmp_path / "x.en", tmp_path / "x.de")
    for path, text in zip(files, (source, target)):
        path.write_text(text, encoding="utf-8")
    return files


def test_pairs(tmp_path):
    assert list(read_pairs(pair_of(tmp_path, "a\nb\n", "c\nd\n"))) == [("a", "c"), ("b", "d")]


@pytest.mark.parametrize(
    ("source", "target", "longer"), [("a\nb\nc\n", "a\n", "x.en"), ("a\n", "a\nb\nc\n", "x.de")]
)
def test_different_length(tmp_path, source, target, longer):
    with pytest.raises(UserError, match=rf"{longer} has 3 lines and \S+ has 1:"):
        list(read_pairs(pair_of(tmp_path, source, target)))


def test_empty_files(tmp_path):
    with pytest.raises(UserError, match="are empty"):
        list(read_pairs(pair_of(tmp_path, "", "")))


NAMES = {"train": "train", "valid": "val", "test": "test16", "test1": "test17"}


def find(folder):
    return find_splits(folder, NAMES, ("en", "de"), ["train", "valid", "test"], "Bring files.")


def test_find_splits(tmp_path):
    for name in ("train.en", "train.de.gz", "val.en", "val.de", "test16.en", "test16.de"):
        (tmp_path / name).touch()
    found = find(tmp_path)
    assert list(found) == ["train", "valid", "test"]
    assert found["train"] == (tmp_path / "train.en", tmp_path / "train.de.gz")


def test_missing_files_are_all_named(tmp_path):
    for name in ("train.en", "val.en", "val.de", "test17.de"):
        (tmp_path / name).touch()
    with pytest.raises(UserError) as error:
        find(tmp_path)
    for word in ("train.de[.gz]", "test16.en[.gz]", "test16.de[.gz]", "test17.en[.gz]", "Bring files."):
        assert word in str(error.value)


def test_missing_and_empty_folders(tmp_path):
    with pytest.raises(UserError, match=r"no data folder.*Bring files"):
        find(tmp_path / "none")
    with pytest.raises(UserError, match="is empty"):
        find(tmp_path)
