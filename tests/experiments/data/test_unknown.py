"""The share of <unk>: of lines that SentencePiece would leave out, counted, told, and refused."""

import json
import random

import pytest

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import pieces
from moa_fairseq.experiments.data.manifest import read_manifest, summary
from moa_fairseq.experiments.data.unknown import Symbols, check_unknown
from moa_fairseq.experiments.inference.text_codec import codec_of

THAI = "".join(map(chr, range(0xE01, 0xE2F)))


@pytest.fixture
def own(tmp_path, made):
    """own(lines) → a folder with these lines among English ones in each split."""

    def write(*lines):
        folder = tmp_path / "own"
        folder.mkdir(exist_ok=True)
        for split in ("train", "valid", "test"):
            (folder / f"{split}.txt").write_text(
                made.text([*made.sentences(40, "en"), *lines]), "utf-8"
            )
        return folder

    return write


def words(letters, count, length=5):
    chance = random.Random(3)
    return " ".join("".join(chance.choices(letters, k=length)) for _ in range(count))


@pytest.mark.parametrize(
    "line",
    [
        words("ABCDEFGH", 900),
        words(THAI, 1, 9_000),
        "x" * pieces.LONGEST + " Ü",
        words("ABCD", 9) + " \u2585",
        words("АБВГ", 20_000),
    ],
    ids=["capitals", "no spaces", "one byte too many", "reserved letter", "220 kB"],
)
def test_every_line_is_learnt_from(prepare, own, line):
    folder = own(line)
    _, root = prepare("text_sp", folder, bpe=150, character_coverage=1.0)
    text = (root / "text" / "train").read_text("utf-8").split()
    assert text.count("<unk>") == line.count("\u2585")
    manifest = read_manifest(root)
    longest = max(map(len, (folder / "train.txt").read_bytes().split(b"\n")))
    assert manifest["stages"]["text"]["train"]["longest"] == longest
    counted = manifest["symbols"]["train"]
    assert counted["symbols"] == len(text) and counted["unknown"] == text.count("<unk>")
    assert manifest["stages"]["model"]["left_out"] == 0


@pytest.mark.parametrize("seed", range(12))
def test_parts_are_the_line_and_none_is_too_long(seed):
    chance = random.Random(seed)
    alphabet = chance.choice(
        ["ab", "aü ", f"{THAI}  ", "\U0001f600", "a b c ", "ü" * 9 + "\t "]
    )
    line = "".join(chance.choices(alphabet, k=chance.randint(1, 40_000)))
    parts = [*pieces._parts(line)]
    assert (
        "".join(parts) == line and max(len(part.encode()) for part in parts) <= pieces.LONGEST
    )
    if " " in alphabet and "\t" not in alphabet:
        assert all(part.startswith(" ") for part in parts[1:])


@pytest.mark.parametrize(
    ("letter", "size"), [("a", 1), ("ü", 2), ("\u0e01", 3), ("\U0001f600", 4)]
)
def test_a_line_is_split_by_its_bytes(letter, size):
    longest = letter * (pieces.LONGEST // size)
    assert [*pieces._parts(longest)] == [longest]
    assert [*pieces._parts(longest + letter)] == [longest, letter]


def test_parts_teach_what_the_whole_line_does(tmp_path, made):
    lines = made.sentences(300, "en")
    settings = {"split_digits": True, "model_type": "bpe"}
    pieces.learn(lines, "text", 90, tmp_path / "lines", **settings)
    pieces.learn([" ".join(lines)], "text", 90, tmp_path / "one", **settings)
    both = [pieces.processor(str(tmp_path / name)) for name in ("lines", "one")]
    assert [both[0].id_to_piece(n) for n in range(90)] == [
        both[1].id_to_piece(n) for n in range(90)
    ]


def test_white_space_that_only_fairseq_knows_parts_words(prepare, own):
    prepared, root = prepare("text_sp", own("river\x85flows"), bpe=60)
    text = (root / "text" / "train").read_text("utf-8")
    assert "\x85" not in text
    codec = codec_of(prepared.folder, "language_modeling")
    assert codec.encode("river\x85flows") == codec.encode("river flows")


@pytest.mark.thorough
def test_too_much_unknown_is_an_error_whose_remedies_help(own, tmp_path, capsys, in_process):
    # SentencePiece leaves the rarest 2 % of the letters without a piece.
    folder = own(*(f"the river {chr(0x4E00 + n)}" for n in range(40)))
    line = f"prepare text_sp {tmp_path}/out --from {folder} --workers 1 --bpe".split()
    assert main([*line, "100", "--character-coverage", "0.98"]) == 2
    error = capsys.readouterr().err
    assert (
        "--allow-unknown" in error
        and "text/train" in error
        and not (tmp_path / "out/binarised").exists()
    )
    assert main([*line, "100", "--character-coverage", "0.98", "--allow-unknown"]) == 0
    assert "<unk>" in capsys.readouterr().out
    assert main([*line, "120", "--character-coverage", "1"]) == 0
    manifest = json.loads((tmp_path / "out/manifest.json").read_text("utf-8"))
    assert manifest["symbols"]["train"]["share"] == 0


@pytest.mark.parametrize(
    ("unknown", "learnt", "allowed", "warnings", "refused"),
    [
        ({"train": 1}, True, False, 0, False),
        ({"train": 2}, True, False, 1, False),
        ({"train.de": 51}, True, False, 0, True),
        ({"train.de": 51}, True, True, 1, False),
        ({"valid": 900, "test": 2, "train": 1}, True, False, 2, False),
        ({"train": 900, "valid": 900}, False, False, 0, False),
    ],
)
def test_which_shares_are_warned_of(
    tmp_path, said, unknown, learnt, allowed, warnings, refused
):
    counts = {name: Symbols(1000, count, 9) for name, count in unknown.items()}
    if refused:
        with pytest.raises(UserError, match=r"5\.10%.*REMEDY.*--allow-unknown"):
            check_unknown(counts, tmp_path, learnt, allowed, "REMEDY")
        return
    check_unknown(counts, tmp_path, learnt, allowed, "REMEDY")
    assert sum(line.startswith("WARNING") for line in said) == warnings
    assert sum("<unk> of the symbols" in line for line in said) == 1


@pytest.mark.parametrize(
    "name", ["wikitext103_word", "wikitext103_gpt2bpe", "enwik8", "iwslt14_de_en"]
)
def test_every_kind_of_data_counts_its_symbols(prepare, miniature, name):
    prepared, root = prepare(name, miniature(name))
    folder = prepared.folder if name.endswith("gpt2bpe") else root
    manifest = read_manifest(folder)
    for split, found in manifest["symbols"].items():
        assert found["symbols"] > 0 and found["share"] == found["unknown"] / found["symbols"], (
            split
        )
    if name == "iwslt14_de_en":
        lines = (root / "bpe" / "train.de").read_text("utf-8").splitlines()
        lengths = [len(line.split()) for line in lines]
        found = manifest["symbols"]["train.de"]
        assert (found["symbols"], found["longest"]) == (sum(lengths), max(lengths))
    if name == "wikitext103_word":
        words = (root / "text" / "train").read_text("utf-8").split()
        assert manifest["symbols"]["train"]["unknown"] == words.count("<unk>")
        assert any("<unk>" in line for line in summary(manifest, root))


def test_text_that_a_release_leaves_out_is_counted(prepare, made, tmp_path, said):
    rows = [{"text": line} for line in made.sentences(200, "en")] + [{"text": "ÄÖÜ " * 1000}]
    made.documents(tmp_path / "c4-train.00000-of-01024.json.gz", rows)
    made.documents(tmp_path / "c4-train.00001-of-01024.json.gz", rows)
    made.documents(tmp_path / "c4-validation.00000-of-00008.json.gz", rows)
    _, root = prepare("c4", tmp_path, subsets=("train", "valid"))
    assert read_manifest(root)["stages"]["model"]["left_out"] == 2
    assert sum(line.startswith("WARNING") and "4,192" in line for line in said) == 1
