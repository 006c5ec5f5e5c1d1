"""Lines of text: read with damage named, segmented as subword-nmt does, cleaned as Moses does."""

import gzip
import io
import itertools
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import regex
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import parallel_text, pieces
from moa_fairseq.experiments.data.catalogue import Cleaning, HoldOut, datasets
from moa_fairseq.experiments.data.encodings import encoding_remedy
from moa_fairseq.experiments.data.gpt2_files import encode_texts
from moa_fairseq.experiments.data.monolingual import write_bytes, write_lines, write_pieces
from moa_fairseq.experiments.data.parallel_text import BAD, TextFile, read_lines, read_pairs
from moa_fairseq.experiments.data.text_stages import (
    Split,
    Treatment,
    clean,
    learn_codes,
    load_codes,
    preprocess_pairs,
    write_splits,
)
from moa_fairseq.experiments.data.translation_steps import sample_pairs
from moa_fairseq.text import codecs

TREATMENT = Treatment(cleaning=Cleaning())
RULES = Cleaning(1, 5, 1.5)
SCRIPTS = os.environ.get("MOSES_SCRIPTS")
GOOD = "".join(f"line {number}\n" for number in range(400))


@pytest.fixture
def write(tmp_path):
    """write(source, target, name) → the pair of files, of text or bytes."""

    def make(source, target, name="train"):
        pair = tuple(TextFile(tmp_path / f"{name}.{language}") for language in ("en", "de"))
        for piece, content in zip(pair, (source, target)):
            piece.path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return pair

    return make


def test_every_byte_is_written_but_line_feeds_which_end_lines(tmp_path, write):
    source, _ = write(b"a\r\n\nb \xff\r" + b"c", "")
    write_bytes({"train": [source]}, {"train": 8, "test": 1}, tmp_path / "out")
    assert (tmp_path / "out" / "train").read_text() == "97 13 \n\n98 32 255 13 \n"
    assert (tmp_path / "out" / "test").read_text() == "99 \n"


@pytest.fixture
def run(tmp_path, write):
    """run(source, target, ...) → facts and lines of the split that write_splits makes."""

    def make(source, target, name="train", treatment=TREATMENT, hold_out=None):
        pair = write(source, target, name)
        out = tmp_path / "out"
        split = Split(name, [pair], treatment, hold_out, lenient=name == "train")
        facts = write_splits([split], ("en", "de"), out, 1)
        return facts, [
            (out / f"{name}.{x}").read_text("utf-8").split("\n")[:-1] for x in ("en", "de")
        ]

    return make


# --- reading ------------------------------------------------------------------------------------------------


def test_lines(write):
    text = "\ufeffone\r\ntwo\u2028still two\n\n white \u00a0\nlast \t"
    plain, _ = write(text, "", "x")
    packed = plain.path.with_suffix(".gz")
    packed.write_bytes(gzip.compress(text.encode(), mtime=0))
    for path in (plain.path, packed):
        assert list(read_lines(path)) == [
            "one",
            "two\u2028still two",
            "",
            " white \u00a0",
            "last \t",
        ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.en", b"fine\nna\xefve\n", ["line 2", "0xef", "UTF-8"]),
        ("x.en", b"a\nb\nc\0d\n", ["line 3", "NUL"]),
        ("x.en", b"x" * 1_000_001, ["line 1", "1,000,000 bytes"]),
        ("x.gz", gzip.compress(b"some text\n" * 1000, mtime=0)[:-12], ["damaged gzip"]),
        ("x.gz", b"<html>" + gzip.compress(b"some text\n" * 1000, mtime=0), ["damaged gzip"]),
    ],
)
def test_bad_bytes(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        list(read_lines(tmp_path / name))
    for word in [str(tmp_path / name), *words]:
        assert word in str(error.value)


GERMAN = "Es ist ein „zitiertes“ Wort – ja.\nDer Preis ist heute 20 €.\n" * 20


@pytest.mark.parametrize(
    ("name", "text", "encoding"),
    [
        ("x.de", GERMAN, "cp1252"),
        ("x.pl", "Zażółć gęślą jaźń. Proszę bardzo.\n" * 20, "cp1250"),
        ("x.ru", "Привет мир. Это русский текст для проверки.\n" * 20, "cp1251"),
        ("x.ja", "今日は天気がいいです。私は学生です。\n" * 20, "shift_jis"),
        *(("x.de", GERMAN, name) for name in ("utf-16", "utf-16-le", "utf-16-be")),
        ("x.de.gz", GERMAN, "cp1252"),
    ],
)
def test_the_remedy_for_another_encoding_gives_the_text_back(tmp_path, name, text, encoding):
    path = tmp_path / name
    new = tmp_path / f"new{Path(name).suffix}"
    packed = path.suffix == ".gz"
    path.write_bytes(gzip.compress(text.encode(encoding)) if packed else text.encode(encoding))
    with pytest.raises(UserError, match=r"iconv -f \S+ -t utf-8") as error:
        list(read_lines(path))
    command = re.search(r": ((zcat|iconv) .* > NEW\S*)$", str(error.value))[1]
    subprocess.run(
        command.replace("NEW.gz" if packed else "NEW", str(new)), shell=True, check=True
    )
    assert list(read_lines(new)) == text.splitlines()


@pytest.mark.parametrize("side", [0, 1])
def test_utf16_beside_utf8_is_no_question_of_lengths(write, side):
    pair = write(GERMAN * 3, GERMAN * 3, "train")
    pair[side].path.write_bytes((GERMAN * 3).encode("utf-16"))
    with pytest.raises(UserError, match="iconv -f UTF-16 "):
        list(read_pairs([pair], mark_bad=True))


def test_nuls_are_taken_out_of_a_packed_file(tmp_path):
    path = tmp_path / "a b.de.gz"
    path.write_bytes(gzip.compress(b"a\nbbbbbbbbbbbbbbbbbb c\0d\n"))
    command = re.search(r"zcat .*NEW\.gz", encoding_remedy(path))[0]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert list(read_lines(tmp_path / "NEW.gz")) == ["a", "bbbbbbbbbbbbbbbbbb cd"]


def test_windows_text_that_was_taken_for_latin_1_is_refused(tmp_path):
    path = tmp_path / "x.de"
    new = tmp_path / "new.de"
    path.write_text(GERMAN.encode("cp1252").decode("latin-1"), "utf-8")
    with pytest.raises(UserError, match="control characters") as error:
        list(read_lines(path, mark_bad=True))
    steps = re.search(r"this file: (iconv .* > NEW)", str(error.value))[1]
    subprocess.run(steps.replace("NEW", str(new)), shell=True, check=True)
    assert list(read_lines(new)) == GERMAN.splitlines()
    path.write_text("gut\x85\n" * 9 + "gut\x80\n" * 2, "utf-8")  # accidents
    assert len(list(read_lines(path))) == 11


def test_lines_of_another_encoding_among_good_ones_are_not_for_iconv(tmp_path):
    for after in (b"", b"gut\n"):
        (tmp_path / "x.de").write_bytes(
            "schön\n".encode() + "schön\n".encode("latin-1") + after
        )
        with pytest.raises(UserError, match="Other lines are UTF-8"):
            list(read_lines(tmp_path / "x.de"))
    (tmp_path / "x.de").write_bytes(b"a\nbbbbbbbbbbbbbbbbbb c\0d\n")
    with pytest.raises(UserError, match="tr -d"):
        list(read_lines(tmp_path / "x.de"))


def test_bad_lines_can_be_marked_instead(tmp_path):
    (tmp_path / "x").write_bytes(b"fine\nna\xefve\nc\0d\n" + b"x" * 10_000_000 + b"\nlast\r\n")
    expected = [
        "fine",
        BAD + "not UTF-8",
        BAD + "NUL byte",
        BAD + "line of a million bytes",
        "last",
    ]
    assert list(read_lines(tmp_path / "x", mark_bad=True)) == expected


def test_pairs(write):
    files = [write("a\nb\n", "c\nd\n", "x"), write("e\n", "f", "y")]
    assert list(read_pairs(files)) == [("a", "c"), ("b", "d"), ("e", "f")]


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("a\nb\nc\n", "a\n", r"x\.en has 3 lines and \S+ has 1\b"),
        ("a\n", "a\nb\nc\n", r"x\.de has 3 lines and \S+ has 1\b"),
        ("", "", r"x\.en and \S+x\.de: no line"),
    ],
)
def test_what_is_not_parallel(write, source, target, words):
    with pytest.raises(UserError, match=words):
        list(read_pairs([write(source, target, "x")]))


# --- a stage over pairs of lines ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", [b"x" * 1_000_001, b"a\0b", b"na\xefve"], ids=["long", "NUL", "Latin-1"]
)
def test_training_lines_that_are_too_many_are_named(run, bad):
    with pytest.raises(UserError, match=r"of 5 pairs.* line 4: "):
        run(b"gut\n" * 3 + bad + b"\ngut\n", "gut\n" * 5)


def test_unusable_training_lines_are_dropped_with_their_partner(run, said):
    source = GOOD.encode() + b"na\xefve\nnul\0\nlast\r\n"
    target = GOOD + "eins\nzwei\n\n"
    facts, sides = run(source, target)
    assert facts["train"]["dropped"] == {"NUL byte": 1, "empty side": 1, "not UTF-8": 1}
    assert facts["train"]["read"] == 403 and facts["train"]["lines"] == 400 == len(sides[0])
    assert sides[0] == sides[1] and "1 dropped: NUL byte" in said[0]
    facts, _ = run(GOOD.encode() + b"x" * 10_000_000 + b"\n", GOOD + "kurz\n")
    assert facts["train"]["dropped"] == {"line of a million bytes": 1}
    facts, _ = run(b"x\n" * 396 + b"na\xefve\n" * 4, "gut\n" * 400)
    assert facts["train"]["dropped"] == {"not UTF-8": 4}, "one in a hundred"


@pytest.mark.parametrize(
    ("name", "source", "target", "words"),
    [
        (
            "train",
            b"na\xefve\n" * 10 + b"x\n" * 500,
            "gut\n" * 510,
            r"train\.en.*510.*10 with not UTF-8.*iconv",
        ),
        ("test", b"fine\nna\xefve\n", "a\nb\n", r"test\.en, line 2.*UTF-8"),
        ("train", "\n\n", "a\nb\n", r"train\.en.* 2 pairs"),
    ],
)
def test_what_is_no_text_is_refused(run, name, source, target, words):
    with pytest.raises(UserError, match=words):
        run(source, target, name)


def test_a_side_without_text_is_named(write, tmp_path):
    """Only training pairs are cleaned."""
    split = Split("valid", [write("a\nb\n", "\n \n", "valid")], Treatment())
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "valid.de"))):
        write_splits([split], ("en", "de"), tmp_path / "out", 1)


@pytest.mark.parametrize("word", ["<pad>", "</s>", "<s>", "<unk>"])
@pytest.mark.parametrize("name", ["train", "test"])
def test_a_word_that_is_a_symbol_of_fairseqs_is_refused(write, tmp_path, name, word):
    def made(target, steps=((), ()), own=True):
        treatment = TREATMENT._replace(steps=steps)
        split = Split(
            name, [write("a\nb\nc\n", target, name)], treatment, None, name == "train", own
        )
        write_splits([split], ("en", "de"), tmp_path / "out", 1)
        return (tmp_path / "out" / f"{name}.de").read_text()

    text = f"x\ny {word} z\nx\n"
    with pytest.raises(UserError, match=rf"{name}\.de, line 2: .*{word} ") as refusal:
        made(text)
    remedy = str(refusal.value).partition("such as ")[2].split(",")[0]
    assert made(text.replace(word, remedy)) == text.replace(word, remedy)
    # The other remedy
    assert word not in made(text, steps=((), (("tokenize", {"lang": "de"}),))).split()
    assert made(f"x\ny{word} z\nx\n") == f"x\ny{word} z\nx\n"  # in a longer word
    assert made(text, own=False) == text


@pytest.mark.parametrize("kind", ["lines", "pieces", "gpt2"])
@pytest.mark.parametrize("text", ["", "\n \n\n"], ids=["empty", "blank"])
def test_a_split_of_a_language_model_without_text_is_named(tmp_path, toy_gpt2, kind, text):
    files = {split: tmp_path / f"{split}.txt" for split in ("train", "valid")}
    texts = {split: [TextFile(path)] for split, path in files.items()}
    files["train"].write_text(GOOD)
    files["valid"].write_text(text)
    pieces.learn(
        GOOD.splitlines(), files["train"], 24, tmp_path / pieces.MODEL, **pieces.LANGUAGE_MODEL
    )

    def write():
        if kind == "lines":
            return write_lines(texts, tmp_path / "out")
        if kind == "pieces":
            return write_pieces(texts, tmp_path / pieces.MODEL, tmp_path / "out", 1)
        return encode_texts(files, tmp_path / "out", toy_gpt2)

    with pytest.raises(UserError, match=re.escape(str(files["valid"]))):
        write()
    files["valid"].write_text("line 7\n")  # the remedy
    assert write()["valid"]["lines"] == 1


def test_words_of_a_language_model_that_are_symbols_of_fairseqs(tmp_path):
    texts = {split: [TextFile(tmp_path / split)] for split in ("train", "test")}
    (tmp_path / "train").write_text("a b\nc <unk> d\n")  # as WikiText has it
    for word in ("<pad>", "</s>", "<s>"):
        (tmp_path / "test").write_text(f"a\nb {word}\n")
        with pytest.raises(UserError, match=rf"test, line 2: .*{word} "):
            write_lines(texts, tmp_path / "text")
    (tmp_path / "test").write_text("a\n")
    assert write_lines(texts, tmp_path / "text")["train"] == {
        "lines": 2,
        "tokens": 5,
        "longest": 9,
    }


def test_dos_files_with_a_mark_at_the_beginning_and_empty_lines_of_a_test(run):
    assert run("\ufeffone\r\ntwo\r\n", "\ufeffeins\r\nzwei")[1] == [
        ["one", "two"],
        ["eins", "zwei"],
    ]
    assert run("a\n\n", "\nb\n", "test", Treatment())[1] == [["a", ""], ["", "b"]]


def test_every_third_line_is_held_out(run, tmp_path, said):
    numbers = "".join(f"{number}\n" for number in range(1, 10))
    # one pair is dropped before it is counted
    _, sides = run(numbers.replace("2", " "), numbers, hold_out=HoldOut("valid", 3))
    assert sides[0] == ["1", "3", "5", "6", "8", "9"]
    assert (tmp_path / "out" / "valid.de").read_text() == "4\n7\n"
    assert [line.split(",")[0] for line in said] == ["train: 6 pairs", "valid: 2 pairs"]


def test_blanks_stay_as_moses_prints_them(run, tmp_path):
    """Line 16,217 of Multi30k's train.en: two blanks before the full stop, one at the end, after BPE too."""
    steps = datasets()["multi30k"].steps_for("train", "en", {})
    raw = "A man and a woman on a motorcycle .`\n"
    facts, sides = run(raw, "x\n", treatment=Treatment((steps, ())))
    assert sides[0] == ["a man and a woman on a motorcycle  . &apos; "]
    assert facts["train"]["tokens_en"] == 10
    (tmp_path / "codes").write_text("#version: 0.2\na n\n", encoding="utf-8")
    chain = Treatment(codes=str(tmp_path / "codes"), cleaning=Cleaning())
    ((segmented, _),) = preprocess_pairs([(sides[0][0], "x")], chain)
    assert (
        segmented.endswith("y@@ c@@ l@@ e . &@@ a@@ p@@ o@@ s@@ ; ") and "  " not in segmented
    )
    # fairseq parts tokens at all white space, BPE at blanks only
    assert preprocess_pairs([("10\u00a0000\tkm\u2003x", "a  b ")], Treatment()) == [
        ("10 000 km x", "a  b ")
    ]


def test_samples_are_nested_and_pairs_stay_together(write, tmp_path):
    old = write(*("".join(f"{sign}{number}\n" for number in range(100)) for sign in ("", "-")))
    new = tuple(TextFile(tmp_path / f"new.{language}") for language in ("en", "de"))

    def sample(fraction, seed=1):
        facts = sample_pairs(old, new, fraction, seed)
        english, german = ([int(x) for x in piece.path.read_text().split()] for piece in new)
        assert [-number for number in german] == english == sorted(english)
        assert facts == {"lines": len(english), "of": 100}
        return set(english)

    samples = [sample(fraction) for fraction in (0.0001, 0.05, 0.1, 0.25, 0.5, 0.743, 1.0)]
    assert [len(kept) for kept in samples] == [1, 5, 10, 25, 50, 75, 100]  # rounded up
    assert all(small < large for small, large in itertools.pairwise(samples))
    assert sample(0.25) == samples[3] != sample(0.25, seed=2)


# --- subwords -----------------------------------------------------------------------------------------------


@pytest.fixture
def texts(write, made):
    lines = (
        made.text([*made.sentences(200, lang), "", "  two  spaces "]) for lang in ("en", "de")
    )
    return [piece.path for piece in write(*lines)]


def test_the_same_codes_and_subwords_as_subword_nmt(texts, tmp_path, made):
    learn_codes(texts, 50, tmp_path / "codes")
    expected = io.StringIO()
    learn_bpe(
        [line for path in texts for line in path.read_text("utf-8").split("\n")], expected, 50
    )
    assert (tmp_path / "codes").read_text("utf-8") == expected.getvalue()
    theirs = BPE(io.StringIO(expected.getvalue()))
    ours = load_codes(str(tmp_path / "codes"))
    for line in made.sentences(50, "de", seed=3):
        assert ours.segment(line) == theirs.segment(line)
    learn_codes(texts, 2, tmp_path / "codes")  # new codes under an old name are noticed
    assert load_codes(str(tmp_path / "codes")) is not ours


def test_codes_of_the_same_size_under_an_old_name_are_read_anew(tmp_path):
    codes = tmp_path / "codes"
    for number, merge in enumerate(("a b", "c d")):
        codes.write_text(f"#version: 0.2\n{merge}</w>\n", encoding="utf-8")
        os.utime(codes, ns=(number, number))
        assert load_codes(str(codes)).segment("ab cd") == ("ab c@@ d", "a@@ b cd")[number]


def test_the_memory_of_words_has_an_end(texts, tmp_path, monkeypatch):
    learn_codes(texts, 50, tmp_path / "codes")
    monkeypatch.setattr(codecs, "REMEMBERED", 10)
    lines = [f"Straße{number} Haus" for number in range(40)]
    merges = codecs.MergeCodec(load_codes(str(tmp_path / "codes")))
    segmented = [merges.encode(line) for line in lines]
    assert len(merges.merges.cache) <= 12
    assert segmented == [merges.encode(line) for line in lines]


def test_few_merges_or_none(tmp_path):
    (tmp_path / "train.en").write_text("abc abc\n", encoding="utf-8")
    learn_codes([tmp_path / "train.en"], 500, tmp_path / "codes")
    assert (tmp_path / "codes").read_text("utf-8").count("\n") == 3
    (tmp_path / "train.en").write_text("a b\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"train\.en .*two letters.*--bpe"):
        learn_codes([tmp_path / "train.en"], 5, tmp_path / "codes")


# --- the cleaner, and agreement with Moses' own script where Perl and the scripts are at hand --------------


@pytest.mark.parametrize(
    ("source", "target", "rules", "result"),
    [
        ("a b c", "d e", RULES, ("a b c", "d e")),  # 1.5 is not above 1.5
        (" a  b\u00a0c ", "d\u3000e f", RULES, ("a b c", "d e f")),
        ("a | b", "c d", RULES, ("a b", "c d")),
        ("a b c d", "e f", RULES, "length ratio above 1.5"),
        ("e f", "a b c d", RULES, "length ratio above 1.5"),
        ("a b c d e", "e f g", RULES, "length ratio above 1.5"),  # 5/3, whose whole part is 1
        ("e f", " ".join("a" * 19), Cleaning(1, 80, 9), "length ratio above 9"),
        ("a b c d e f", "a b c d e", RULES, "longer than 5 tokens"),
        ("", "a", RULES, "empty side"),
        ("a", " \u2003", RULES, "empty side"),
        ("|", "a", RULES, "empty side"),
        ("x" * 1000, "y", RULES, ("x" * 1000, "y")),
        ("x" * 1001, "y", RULES, "token of more than 1000 characters"),
        ("y", "x" * 1001, RULES, "token of more than 1000 characters"),
        ("a b", "c", Cleaning(2, 9, 9), "shorter than 2 tokens"),
        (" a |  b ", "c", Cleaning(), (" a |  b ", "c")),  # without limits text is untouched
        (" ", "c", Cleaning(), "empty side"),
    ],
)
def test_rules(source, target, rules, result):
    assert clean(source, target, rules) == result


def test_words_are_parted_by_what_unicode_calls_white_space():
    """Perl's \\s; Python's own takes the separators U+001C to U+001F for it, too."""
    signs = [chr(number) for number in range(0x3100)]
    parting = {sign for sign in signs if clean(f"a{sign}b", "c d", RULES) == ("a b", "c d")}
    assert parting == {sign for sign in signs if regex.fullmatch(r"\p{White_Space}", sign)}


@pytest.mark.skipif(
    not SCRIPTS or not shutil.which("perl"), reason="needs perl and MOSES_SCRIPTS"
)
@pytest.mark.parametrize(
    "rules", [Cleaning(1, 80, 9), Cleaning(1, 250, 1.5), Cleaning(3, 12, 1.2)]
)
def test_equals_perl(tmp_path, rules):
    generator = random.Random(5)
    pieces = [
        "a",
        "ß",
        "|",
        " ",
        " ",
        " ",
        "\u00a0",
        "\u2003",
        "\x85",
        "\t",
        "x" * 1001,
        "long words",
    ]
    pairs = [
        ["".join(generator.choices(pieces, k=generator.randint(0, 30))) for _ in range(2)]
        for _ in range(2000)
    ]
    pairs[0] = ["no bar", "here"]
    for lang, lines in zip("ab", zip(*pairs)):
        (tmp_path / f"c.{lang}").write_bytes("".join(line + "\n" for line in lines).encode())
    script = Path(SCRIPTS) / "training" / "clean-corpus-n.perl"
    line = ["perl", script, "-ratio", rules.ratio, "c", "a", "b", "out", rules.min, rules.max]
    subprocess.run([*map(str, line)], cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)
    sides = [(tmp_path / f"out.{lang}").read_bytes().decode().split("\n")[:-1] for lang in "ab"]
    ours = [
        result
        for result in (clean(*pair, rules) for pair in pairs)
        if not isinstance(result, str)
    ]
    assert ours == list(zip(*sides)) and 0 < len(ours) < len(pairs)


@pytest.mark.parametrize(
    ("rest", "cut"),
    [
        (b"", b"abcd"),  # the whole last line, without its end
        (b"\nnext\n", b"abcd\n"),
        (b"e\nnext\n", b"abcde"),
        (b"efg\nnext\n", b"abcde"),
        (b"efghij\nnext\n", b"abcde"),
        (b"efghi", b"abcde"),
    ],
)
def test_a_line_is_cut_off_and_no_byte_behind_its_end_is_lost(rest, cut):
    lines = list(parallel_text._raw_lines(io.BytesIO(b"abcd" + rest), most=4))
    assert lines == [cut, *[b"next\n"][: rest.count(b"next")]]
