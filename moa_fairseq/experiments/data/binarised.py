"""The check that a binarised folder is complete before a training starts."""

import dataclasses
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy

from moa_fairseq.errors import UserError

DICTIONARY = "dict.txt"  # the dictionary of data in one language
# `sentence_prediction`'s names for the folders of the sentences and of their classes.
INPUT = "input0"
LABEL = "label"
# Layout of fairseq's memory-mapped index: magic, version, type code, number of sentences, then the
# sizes (int32) and byte offsets (int64) of all sentences.
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQ")
_ENTRY_BYTES = 4 + 8  # a size and an offset
# Type code → bytes of a symbol
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 8, 8: 2, 9: 4, 10: 8}
_AGAIN = "Delete the folder and prepare it again."


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A folder that is ready for fairseq.

    Args:
        folder: the binarised folder; for data that fairseq does not read, the folder of the text.
        sentences: subset → number of sentences; {} if unknown.
        fingerprint: changes when the inputs or settings of the data change; see `fingerprint_of`.
    """

    folder: Path
    sentences: dict[str, int]
    fingerprint: str


def check_place(folder: Path) -> None:
    """Raise UserError for a data folder whose path fairseq would split, at a comma or a colon."""
    for separator, path in ((",", folder), (":", folder.resolve())):
        if separator in str(path):
            raise UserError(
                f"fairseq cannot read the data folder {folder}: it takes the {separator!r} in its path for "
                "the end of the path. Rename or move the folder."
            )


def is_binarised(folder: Path) -> bool:
    """True for a folder that fairseq-preprocess wrote to, complete or not, for any kind of model."""
    if not folder.is_dir():
        return False
    is_of_one_language = (folder / DICTIONARY).is_file() and any(folder.glob("*.idx"))
    is_of_two_languages = any(folder.glob("dict.*.txt"))
    return is_of_one_language or is_of_two_languages or is_classification(folder)


def is_classification(folder: Path) -> bool:
    """True for a binarised folder of `sentence_prediction`, complete or not."""
    return (folder / INPUT / DICTIONARY).is_file() and any((folder / INPUT).glob("*.idx"))


def _sides(folder: Path) -> tuple[str, ...]:
    """The subfolders of a binarised folder in one language, "" for the folder itself."""
    return (INPUT, LABEL) if is_classification(folder) else ("",)


def check_binarised(
    folder: Path, languages: Sequence[str], subsets: Sequence[str], joined: bool = False
) -> dict[str, int]:
    """Check dictionaries and the .bin/.idx files of each subset.

    Args:
        folder: the folder made by fairseq-preprocess.
        languages: source and target; () for data of a language model or a classifier.
        subsets: the required subsets.
        joined: True if the two dictionaries must be equal.

    Returns:
        Subset → number of sentences.

    Raises:
        UserError: for a file that is missing, empty, cut off, or of another length than its counterpart; the
            message names the file.
    """
    if not folder.is_dir():
        remedy = "Run the prepare stage, or give --data a folder made by fairseq-preprocess"
        raise UserError(f"There is no binarised data folder {folder}. {remedy}.")
    dictionaries = [folder / f"dict.{language}.txt" for language in languages]
    if not languages:
        dictionaries = [folder / side / DICTIONARY for side in _sides(folder)]
    for path in dictionaries:
        _require(path)
    if joined and len(set(map(Path.read_bytes, dictionaries))) > 1:
        raise UserError(
            f"{' and '.join(map(str, dictionaries))} differ, but shared embeddings need one. Binarise with "
            "--joined-dictionary, or set data.joined_dictionary=false and model.share_all_embeddings=false."
        )
    sentences = {}
    for subset in subsets:
        stems = subset_stems(folder, languages, subset)
        counts = {name: check_stem(stem) for name, stem in stems.items()}
        sentences[subset] = max(counts.values())
        if min(counts.values()) < sentences[subset]:
            sizes = " and ".join(f"{count:,} {name}" for name, count in counts.items())
            raise UserError(f"{folder}: subset {subset} has {sizes} sentences. {_AGAIN}")
    return sentences


def _require(path: Path, size: int | None = None) -> None:
    """Raise UserError for a file that is missing, empty, or of another size in bytes."""
    actual = path.stat().st_size if path.is_file() else 0
    if not actual:
        raise UserError(
            f"{path} is missing or empty, but fairseq needs it for this kind of data. {_AGAIN}"
        )
    if size is not None and size != actual:
        raise UserError(f"{path} is cut off: it has {actual:,} bytes instead of {size:,}. {_AGAIN}")


def subset_stems(folder: Path, languages: Sequence[str], subset: str) -> dict[str, Path]:
    """A subset's files, without their endings .bin and .idx.

    The folder may have been binarised with source and target exchanged.

    Args:
        folder: the folder made by fairseq-preprocess.
        languages: source and target; () for data of a language model or a classifier.
        subset: the name of the subset, such as "train".

    Returns:
        Language (for a classifier INPUT and LABEL, for a language model "") → path without ending.
    """
    if not languages:
        return {side: folder / side / subset for side in _sides(folder)}
    straight = "-".join(languages)
    reverse = "-".join(reversed(languages))
    stem = f"{subset}.{straight}"
    if not list(folder.glob(f"*.{straight}.*")) and list(folder.glob(f"*.{reverse}.*")):
        stem = f"{subset}.{reverse}"
    return {side: folder / f"{stem}.{side}" for side in languages}


def check_stem(stem: Path) -> int:
    """Check `<stem>.idx`, in fairseq's mmap format, against `<stem>.bin`; return the number of sentences.

    Args:
        stem: the path of both files, without ending.

    Raises:
        UserError: for a file that is missing or cut off, has another format, or has no sentence.
    """
    index = stem.with_name(f"{stem.name}.idx")
    binary = stem.with_name(f"{stem.name}.bin")
    _require(index)
    with open(index, "rb") as stream:
        magic, version, code, count = _HEADER.unpack(
            stream.read(_HEADER.size).ljust(_HEADER.size, b"\0")
        )
        if magic != _MAGIC or version != 1 or code not in _ITEM_BYTES:
            remedy = "Binarise with the installed fairseq-preprocess and its default --dataset-impl"
            raise UserError(f"{index} is not an index in fairseq's mmap format. {remedy}.")
        _require(index, _HEADER.size + count * _ENTRY_BYTES)
        if not count:
            raise UserError(f"{index} has no sentences. {_AGAIN}")
        sizes = numpy.frombuffer(stream.read(4 * count), dtype=numpy.int32)
    _require(binary, int(sizes.sum(dtype=numpy.int64)) * _ITEM_BYTES[code])
    return count
