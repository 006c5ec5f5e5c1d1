"""Reading parallel text: every kind of broken file ends in a message that names file and line."""

import gzip

import pytest

from moa_fairseq.data_prep.parallel_text import BAD, Piece, read_lines, read_pairs
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


def test_bad_lines_can_be_marked_instead(tmp_path):
    path = tmp_path / "x.en"
    path.write_bytes(b"fine\nna\xefve\nc\0d\n" + b"x" * 10_000_000 + b"\nlast\r\n")
    expected = ["fine", BAD + "not UTF-8", BAD + "NUL byte", BAD + "line of a million bytes", "last"]
    assert list(read_lines(path, mark_bad=True)) == expected


@pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda data: b"<html>" + data])
def test_damaged_gzip(tmp_path, damage):
    path = tmp_path / "x.en.gz"
    path.write_bytes(damage(gzip.compress(b"some text\n" * 1000)))
    with pytest.raises(UserError, match="damaged gzip"):
        list(read_lines(path))


def pair_of(tmp_path, source, target, name="x"):
    files = (Piece(tmp_path / f"{name}.en"), Piece(tmp_path / f"{name}.de"))
    for piece, text in zip(files, (source, target)):
        piece.path.write_text(text, encoding="utf-8")
    return files


def test_pairs(tmp_path):
    one, other = pair_of(tmp_path, "a\nb\n", "c\nd\n"), pair_of(tmp_path, "e\n", "f", "y")
    assert list(read_pairs([one, other])) == [("a", "c"), ("b", "d"), ("e", "f")]


@pytest.mark.parametrize(
    ("source", "target", "longer"), [("a\nb\nc\n", "a\n", "x.en"), ("a\n", "a\nb\nc\n", "x.de")]
)
def test_different_length(tmp_path, source, target, longer):
    with pytest.raises(UserError, match=rf"{longer} has 3 lines and \S+ has 1:"):
        list(read_pairs([pair_of(tmp_path, source, target)]))


def test_empty_files(tmp_path):
    with pytest.raises(UserError, match="hold no line"):
        list(read_pairs([pair_of(tmp_path, "", "")]))
