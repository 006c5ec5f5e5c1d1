"""fairseq-preprocess, and the check that a binarised folder is whole before anything is trained on it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy

from moa_fairseq.errors import UserError

# What `sentence_prediction` calls the folders of the sentences and of their classes.
INPUT, LABEL = "input0", "label"
# Layout of fairseq's memory-mapped index: magic, version, type code, number of sentences, then the
# sizes (int32) and byte offsets (int64) of all sentences.
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQ")
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 8, 8: 2, 9: 4, 10: 8}


def preprocess_flags(
    text: Path,
    destination: Path,
    splits: Sequence[str],
    languages: Tuple[str, str],
    joined: bool,
    workers: int,
    extra: Mapping[str, Any],
) -> Dict[str, Any]:
    """The flags of fairseq-preprocess, by name, for `<text>/<split>.<lang>` files."""
    tests = ",".join(str(text / split) for split in splits if split.startswith("test"))
    return {
        "source-lang": languages[0],
        "target-lang": languages[1],
        "trainpref": str(text / "train"),
        "validpref": str(text / "valid"),
        "testpref": tests or None,
        "joined-dictionary": joined,
        "workers": workers,
        **extra,
        "destdir": str(destination),
    }


def monolingual_flags(text: Path, destination: Path, splits: Sequence[str], workers: int) -> Dict[str, Any]:
    """The flags of fairseq-preprocess, by name, for the text of a language model in `<text>/<split>`."""
    prefix = {"train": "trainpref", "valid": "validpref", "test": "testpref"}
    return {
        "only-source": True,
        **{prefix[split]: str(text / split) for split in splits},
        "workers": workers,
        "destdir": str(destination),
    }


def classification_flags(text: Path, destination: Path, name: str, splits: Sequence[str]) -> Dict[str, Any]:
    """The flags of fairseq-preprocess for the sentences (INPUT) or for their classes (LABEL)."""
    tests = [str(text / name / split) for split in splits if split not in ("train", "valid")]
    return {
        "only-source": True,
        "trainpref": str(text / name / "train"),
        "validpref": str(text / name / "valid"),
        "testpref": ",".join(tests) or None,
        "srcdict": str(text / name / "dict.txt"),  # a class keeps its number, whatever was drawn
        "workers": 1,
        "destdir": str(destination / name),
    }


def check_place(folder: Path) -> None:
    """Raise UserError for a data folder whose path fairseq would split, at a comma or a colon."""
    bad = "," if "," in str(folder) else ":" if ":" in str(folder.resolve()) else ""
    if bad:
        raise UserError(
            f"The data folder {folder} cannot be used: fairseq takes a {bad!r} in its path for the end of "
            "one path and the beginning of the next. Give the folder another name, or another place."
        )


def is_binarised(folder: Path) -> bool:
    """True for a folder that fairseq-preprocess wrote to, whole or not."""
    return folder.is_dir() and any(folder.glob("dict.*.txt"))


def is_classification(folder: Path) -> bool:
    """True for a binarised folder of `sentence_prediction`, whole or not."""
    return (folder / INPUT / "dict.txt").is_file()


def check_binarised(
    folder: Path, languages: Tuple[str, str], subsets: Sequence[str], joined: bool
) -> Dict[str, int]:
    """Check dictionaries and the .bin/.idx pairs of each subset. Returns subset → number of sentences.

    joined: both dictionaries must be equal. Raises UserError naming the file that is missing, empty,
    cut off or of another length than its translation.
    """
    if not folder.is_dir():
        raise UserError(
            f"There is no binarised data folder {folder}: run the prepare stage, or give --data a folder "
            "that fairseq-preprocess made."
        )
    dictionaries = [_dictionary(folder, language) for language in languages]
    if joined and dictionaries[0] != dictionaries[1]:
        raise UserError(
            f"{folder}/dict.{languages[0]}.txt and dict.{languages[1]}.txt differ, but shared embeddings "
            "need one: run fairseq-preprocess with --joined-dictionary, or set "
            "data.joined_dictionary=false and model.share_all_embeddings=false."
        )
    pair = _pair_in_file_names(folder, languages)
    return {subset: _check_subset(folder, subset, pair, languages) for subset in subsets}


def check_monolingual(folder: Path, subsets: Sequence[str]) -> Dict[str, int]:
    """As check_binarised, for the data of a language model: dict.txt and `<subset>.bin`, `.idx`."""
    _dictionary(folder, "")
    return {subset: check_stem(folder / subset) for subset in subsets}


def check_classification(folder: Path, subsets: Sequence[str]) -> Dict[str, int]:
    """Check sentences and classes of each subset. Returns subset → number of sentences; raises UserError."""
    found = {}
    for subset in subsets:
        counts = [check_stem(folder / name / subset) for name in (INPUT, LABEL)]
        if counts[0] != counts[1]:
            raise UserError(
                f"{folder}: subset {subset} has {counts[0]:,} sentences and {counts[1]:,} classes. Delete "
                "the folder and prepare it again."
            )
        found[subset] = counts[0]
    return found


def _dictionary(folder: Path, language: str) -> List[bytes]:
    path = folder / (f"dict.{language}.txt" if language else "dict.txt")
    if not path.is_file() or not path.stat().st_size:
        raise UserError(
            f"{path} is missing or empty: {folder} is no whole fairseq-preprocess output for that "
            "language. Delete the folder and prepare it again."
        )
    return path.read_bytes().splitlines()


def _pair_in_file_names(folder: Path, languages: Tuple[str, str]) -> str:
    """'en-de', or 'de-en' where the folder was binarised the other way round; fairseq accepts both."""
    straight, reverse = "-".join(languages), "-".join(reversed(languages))
    return (
        reverse
        if not list(folder.glob(f"*.{straight}.*")) and list(folder.glob(f"*.{reverse}.*"))
        else straight
    )


def _check_subset(folder: Path, subset: str, pair: str, languages: Tuple[str, str]) -> int:
    counts = [check_stem(folder / f"{subset}.{pair}.{language}") for language in languages]
    if counts[0] != counts[1]:
        raise UserError(
            f"{folder}: subset {subset} has {counts[0]:,} {languages[0]} and {counts[1]:,} "
            f"{languages[1]} sentences. Delete the folder and prepare it again."
        )
    return counts[0]


def check_stem(stem: Path) -> int:
    """Check `<stem>.idx` against `<stem>.bin`; return the number of sentences. Raises UserError."""
    index, binary = (stem.with_name(stem.name + ending) for ending in (".idx", ".bin"))
    for path in (index, binary):
        if not path.is_file() or not path.stat().st_size:
            raise UserError(
                f"{path} is missing or empty: the folder is half-written. Delete it and prepare it again."
            )
    with open(index, "rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise UserError(
                f"{index} is not an index of fairseq's mmap format: binarise with today's "
                "fairseq-preprocess and its default --dataset-impl."
            )
        header = stream.read(_HEADER.size)
        version, code, count = _HEADER.unpack(header) if len(header) == _HEADER.size else (0, 0, 0)
        whole = len(_MAGIC) + _HEADER.size + count * 12
        if version != 1 or code not in _ITEM_BYTES or index.stat().st_size != whole:
            raise UserError(
                f"{index} is cut off: {index.stat().st_size:,} bytes instead of {whole:,}. Delete the "
                "folder and prepare it again."
            )
        sizes = numpy.frombuffer(stream.read(4 * count), dtype=numpy.int32)
    expected = int(sizes.sum(dtype=numpy.int64)) * _ITEM_BYTES[code]
    if binary.stat().st_size != expected:
        raise UserError(
            f"{binary} is cut off: {binary.stat().st_size:,} bytes instead of {expected:,}. Delete the "
            "folder and prepare it again."
        )
    if not count:
        raise UserError(f"{index} holds no sentence.")
    return count
