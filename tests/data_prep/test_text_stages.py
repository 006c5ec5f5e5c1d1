"""A stage over pairs of lines: what is dropped is counted, what is wrong is said, and nothing is mixed up."""

import pytest

from moa_fairseq.data_prep.catalogue import HoldOut, datasets
from moa_fairseq.data_prep.cleaning import Cleaning
from moa_fairseq.data_prep.parallel_text import Piece
from moa_fairseq.data_prep.text_stages import Split, Treatment, treat, write_splits
from moa_fairseq.errors import UserError

TREATMENT = Treatment(cleaning=Cleaning())


def write(tmp_path, source, target, name="train"):
    pair = tuple(Piece(tmp_path / f"{name}.{language}") for language in ("en", "de"))
    for piece, content in zip(pair, (source, target)):
        piece.path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return pair


def run(tmp_path, job):
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    facts = write_splits([job], ("en", "de"), out, 1)
    return facts, [(out / f"{job.name}.{x}").read_text("utf-8").split("\n")[:-1] for x in ("en", "de")]


def test_unusable_training_lines_are_dropped_with_their_partner(tmp_path, said):
    good = "".join(f"line {number}\n" for number in range(400))
    source = good.encode() + b"na\xefve\nnul\0\nlast\r\n"
    target = good.encode() + b"eins\nzwei\n\n"
    facts, sides = run(tmp_path, Split("train", [write(tmp_path, source, target)], TREATMENT, lenient=True))
    assert facts["train"]["dropped"] == {"NUL byte": 1, "empty side": 1, "not UTF-8": 1}
    assert facts["train"]["read"] == 403 and facts["train"]["lines"] == 400 == len(sides[0])
    assert sides[0] == sides[1]
    assert "1 dropped: NUL byte" in said[0]


def test_a_line_of_ten_megabytes(tmp_path):
    good = "line\n" * 200
    pair = write(tmp_path, good.encode() + b"x" * 10_000_000 + b"\n", good + "kurz\n")
    facts, _ = run(tmp_path, Split("train", [pair], TREATMENT, lenient=True))
    assert facts["train"]["dropped"] == {"line of a million bytes": 1}


def test_a_file_in_another_encoding_is_refused(tmp_path):
    pair = write(tmp_path, "naïve\n".encode("latin-1") * 10 + b"x\n" * 500, "gut\n" * 510)
    with pytest.raises(UserError, match=r"train\.en.*510 pairs.*10 with not UTF-8.*iconv"):
        run(tmp_path, Split("train", [pair], TREATMENT, lenient=True))


def test_test_text_must_be_whole(tmp_path):
    pair = write(tmp_path, b"fine\nna\xefve\n", "a\nb\n", "test")
    with pytest.raises(UserError, match=r"test\.en, line 2.*UTF-8"):
        run(tmp_path, Split("test", [pair], Treatment()))


def test_dos_files_with_a_mark_at_the_beginning(tmp_path):
    pair = write(tmp_path, "\ufeffone\r\ntwo\r\n", "\ufeffeins\r\nzwei")
    _, sides = run(tmp_path, Split("train", [pair], TREATMENT, lenient=True))
    assert sides == [["one", "two"], ["eins", "zwei"]]


def test_empty_lines_of_other_splits_stay(tmp_path):
    _, sides = run(tmp_path, Split("test", [write(tmp_path, "a\n\n", "\nb\n", "test")], Treatment()))
    assert sides == [["a", ""], ["", "b"]]


def test_every_third_line_is_held_out(tmp_path, said):
    numbers = "".join(f"{number}\n" for number in range(1, 10))
    pair = write(tmp_path, numbers.replace("2", " "), numbers)  # one pair is dropped before it is counted
    _, sides = run(tmp_path, Split("train", [pair], TREATMENT, HoldOut("valid", 3), lenient=True))
    assert sides[0] == ["1", "3", "5", "6", "8", "9"]
    assert (tmp_path / "out" / "valid.de").read_text() == "4\n7\n"
    assert [line.split(",")[0] for line in said] == ["train: 6 pairs", "valid: 2 pairs"]


def test_blanks_stay_as_moses_prints_them(tmp_path):
    """Line 16,217 of Multi30k's train.en: two blanks before the full stop, one at the end, after BPE too."""
    steps = datasets()["multi30k"].steps_for("train", "en")
    raw = "A man and a woman on a motorcycle .`\n"
    job = Split("train", [write(tmp_path, raw, "x\n")], Treatment((steps, ())), lenient=True)
    facts, sides = run(tmp_path, job)
    assert sides[0] == ["a man and a woman on a motorcycle  . &apos; "]
    assert facts["train"]["tokens_en"] == 10
    (tmp_path / "codes").write_text("#version: 0.2\na n\n", encoding="utf-8")
    chain = Treatment(codes=str(tmp_path / "codes"), cleaning=Cleaning())
    ((segmented, _),) = treat([(sides[0][0], "x")], chain)
    assert segmented.endswith("y@@ c@@ l@@ e . &@@ a@@ p@@ o@@ s@@ ; ")
    assert "  " not in segmented


def test_white_space_other_than_blanks_parts_tokens_of_ones_own(tmp_path):
    """fairseq parts tokens at all white space, BPE at blanks only."""
    assert treat([("10\u00a0000\tkm\u2003x", "a  b ")], Treatment()) == [("10 000 km x", "a  b ")]


def test_nothing_left(tmp_path):
    with pytest.raises(UserError, match="no pair with text on both sides is left of 2"):
        run(tmp_path, Split("train", [write(tmp_path, "\n\n", "a\nb\n")], TREATMENT, lenient=True))
