"""Half-written binarised folders are found before anything is trained on them."""

import itertools
import struct

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import check_binarised, is_binarised
from moa_fairseq.experiments.data.prepare import Preparation


def write_subset(folder, name, sentences):
    """The files that fairseq's MMapIndexedDatasetBuilder writes for uint16 tokens."""
    tokens = [token for sentence in sentences for token in sentence]
    (folder / f"{name}.bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    sizes = [len(sentence) for sentence in sentences]
    offsets = [2 * sum(sizes[:n]) for n in range(len(sizes))]
    (folder / f"{name}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQ", 1, 8, len(sizes))
        + struct.pack(f"<{len(sizes)}i", *sizes)
        + struct.pack(f"<{len(sizes)}q", *offsets)
    )


@pytest.fixture
def folder(tmp_path):
    for language in ("en", "de"):
        (tmp_path / f"dict.{language}.txt").write_text("a 3\nb 2\n")
        for subset, count in (("train", 3), ("valid", 2)):
            write_subset(tmp_path, f"{subset}.en-de.{language}", [[4, 5, 2]] * count)
    return tmp_path


def check(folder, joined=True):
    return check_binarised(folder, ("en", "de"), ["train", "valid"], joined)


def test_a_whole_folder(folder):
    assert is_binarised(folder)
    assert check(folder) == {"train": 3, "valid": 2}
    # The other way round
    assert check_binarised(folder, ("de", "en"), ["train"], True) == {"train": 3}
    (folder / "dict.de.txt").write_text("a 3\n")
    assert check(folder, joined=False)["train"] == 3


def cut(name, keep):
    def damage(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[:keep])

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut("train.en-de.de.bin", -2), ["train.en-de.de.bin", "cut off"]),
        (cut("train.en-de.de.bin", 0), ["train.en-de.de.bin", "empty"]),
        (cut("valid.en-de.en.idx", -4), ["valid.en-de.en.idx", "cut off"]),
        (cut("valid.en-de.en.idx", 12), ["valid.en-de.en.idx", "mmap"]),
        (cut("valid.en-de.en.idx", 3), ["valid.en-de.en.idx", "mmap"]),
        (cut("dict.de.txt", 0), ["dict.de.txt", "empty"]),
        (
            lambda folder: (folder / "train.en-de.en.idx").unlink(),
            ["train.en-de.en.idx", "missing"],
        ),
        (
            lambda folder: write_subset(folder, "train.en-de.en", [[4, 2]]),
            ["train", "1 en", "3 de"],
        ),
        (lambda folder: write_subset(folder, "train.en-de.en", []), ["train.en-de.en"]),
        (
            lambda folder: (folder / "dict.de.txt").write_text("a 3\n"),
            ["dict.de.txt", "--joined-dictionary"],
        ),
    ],
)
def test_damage_is_named(folder, damage, words):
    damage(folder)
    with pytest.raises(UserError) as error:
        check(folder)
    for word in words:
        assert word in str(error.value)


def test_absent_folder(tmp_path):
    assert not is_binarised(tmp_path)
    with pytest.raises(UserError, match="no binarised data folder"):
        check(tmp_path / "none")


def test_flags_and_further_subsets_reach_fairseq_preprocess(own_text, tmp_path):
    for language in ("en", "de"):
        (own_text / f"test1.{language}").touch()
    settings = {
        "recipe": "parallel",
        "source": "en",
        "target": "de",
        "bpe": None,
        "joined_dictionary": True,
    }
    settings["flags"] = {"nwordssrc": 100}
    job = Preparation(
        settings, ["train", "valid", "test"], own_text, tmp_path / "out", workers=2
    )
    (command,) = (step.command for step in job.steps() if step.command)
    words = dict(itertools.pairwise(command))
    text = tmp_path / "out" / "tokens"
    # What a dry run shows is what runs
    assert words["--testpref"] == f"{text / 'test'},{text / 'test1'}"
    assert words["--nwordssrc"] == "100" and "--joined-dictionary" in command
    assert words["--destdir"] == str(tmp_path / "out" / "binarised")
