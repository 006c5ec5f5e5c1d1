"""Sources of a data set's files: the user's folder, earlier downloads, or the internet."""

import dataclasses
import functools
import itertools
import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.archives import DamagedArchive, extract
from moa_fairseq.experiments.data.binarised import DICTIONARY, is_binarised
from moa_fairseq.experiments.data.catalogue import Dataset, Part, PublicFile, datasets, public_files
from moa_fairseq.experiments.data.download import obtain
from moa_fairseq.experiments.data.parallel_text import TextFile, find_file
from moa_fairseq.experiments.make import Step, file_signature, fingerprint_of, make
from moa_fairseq.experiments.records.json_files import saved_json, write_json
from moa_fairseq.files import checksum
from moa_fairseq.process import locked

MEMORY = "checked.json"  # checksums of files, so that gigabytes are not read twice
OVERRIDE = "MOA_FAIRSEQ_IGNORE_DISK"
MOST_NAMES = 20  # file names that one error lists
GIVEN = "the user's folder"  # --from, or --data of a recipe; the manifest has no path outside its folder
# Bytes per token of running text in 8,000 pieces: as text, binarised and in between; and in packed files.
TOKEN_BYTES = 12
PACKED_BYTES = 2
log = logging.getLogger(__name__)


@dataclasses.dataclass
class Store:
    """The user's files and downloaded files.

    Args:
        at_hand: the user's folder of archives or of extracted files, or None.
        downloads: the folder for fetched and extracted files.
        offline: never download.
        origins: file name → its source, for the manifest: file, origin or urls, and for public files
            bytes and sha256.
    """

    at_hand: Path | None
    downloads: Path
    offline: bool = False
    origins: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def parts(
        self, dataset: Dataset, languages: Sequence[str], required: Sequence[str]
    ) -> dict[str, list[Part]]:
        """split → its parts. Only file names are read; `fetch_texts` gets what the user's folder lacks.

        For text outside archives, splits that are neither required nor in that folder are left out.

        Args:
            dataset: the data set.
            languages: source and target, or ().
            required: splits that training and scoring need.

        Raises:
            UserError: for missing files that cannot be fetched, all of which the error lists; also if the
                user's folder seems to contain the user's own text.
        """
        by_split = dataset.parts(languages)
        self._refuse_own_text(dataset, by_split)
        used = {}
        missing = []
        for split, parts in by_split.items():
            absent = [part for part in parts if not part.archive and not self._find(part)]
            if not absent or split in required:
                used[split] = parts
                missing += [f"{part.members[0]}[.gz]" for part in absent if not part.source]
        if missing:
            bring = dataset.bring.format(**dict(zip(("source", "target"), languages)))
            raise UserError(f"The data folder {self.at_hand} lacks {', '.join(missing)}. {bring}")
        return used

    def _refuse_own_text(self, dataset: Dataset, by_split: Mapping[str, Sequence[Part]]) -> None:
        """Raise UserError for unpacked training text without the validation text that belongs to it.

        Half of the text would be the user's own, and half would be downloaded.
        """
        train = [part for part in by_split.get("train", ()) if not part.archive]
        valid = [part for part in by_split.get("valid", ()) if not part.archive]
        texts = filter(None, map(self._find, train))
        unpacked = [path.name for path in texts if path.suffix != ".gz"]
        if unpacked and valid and valid[0].source and not any(map(self._find, valid)):
            raise UserError(
                f"{self.at_hand} has {', '.join(unpacked)}, but lacks {valid[0].name}. If it is your own "
                f"text, and not {dataset.name}, give data.recipe=parallel (moa-fairseq prepare parallel)."
            )

    def fetch_texts(
        self,
        parts: Sequence[Part],
        optional: Sequence[Part] = (),
        announced: Dataset | None = None,
        root: Path = Path(),
    ) -> dict[Part, TextFile]:
        """The text files of parts; archives are fetched if necessary.

        Args:
            parts: the required parts.
            optional: further parts, which may be missing: no archive is fetched for them alone.
            announced: the data set whose terms of use are printed before a download.
            root: the folder of that data set's stages.

        Returns:
            Part → its file.

        Raises:
            UserError: for a file that is not available, or is not the right file.
        """
        # Two data sets may be prepared at the same time and share archives.
        with locked(self.downloads, math.inf):
            texts = self._given_texts((*parts, *optional))
            names = dict.fromkeys(part.source for part in parts if part not in texts)
            absent = []
            for name in names:
                if not find_file(self.at_hand, name) and not (self.downloads / name).is_file():
                    absent.append(public_files()[name])
            if absent and announced and not self.offline:
                before_download(announced, root, self.downloads, absent)
            missing = [part for part in (*parts, *optional) if part not in texts]
            for name in names:
                file = self._verified(name)
                members = [part for part in missing if part.source == name]
                if members[0].archive:
                    texts |= self._unpack(name, file, members)
                else:
                    texts[members[0]] = file
        return {part: TextFile(path, _markup(path, part)) for part, path in texts.items()}

    def _given_texts(self, parts: Iterable[Part]) -> dict[Part, Path]:
        """Part → the user's own file. A packed public file is left out, because it is verified first."""
        texts = {}
        for part in parts:
            path = self._find(part)
            is_public = part.source and not part.archive
            if path and not (is_public and path.suffix == ".gz"):
                texts[part] = path
                self.origins[path.name] = {"file": path.name, "origin": GIVEN}
        return texts

    def local_file(self, part: Part) -> Path | None:
        """The file of a part that is not in an archive; None if it would have to be fetched."""
        fetched = self.downloads / part.source
        return self._find(part) or (fetched if fetched.is_file() else None)

    def _find(self, part: Part) -> Path | None:
        """The text in the user's folder, by its name in the archive or the last part of the name."""
        for name in part.members:
            if path := find_file(self.at_hand, name):
                return path
        return None

    def _verified(self, name: str) -> Path:
        """A public file, verified; a file that was read before is not read again."""
        source = public_files()[name]
        digest = functools.partial(known_checksum, self.downloads / MEMORY)
        at_hand = [self.at_hand] if self.at_hand else []
        path = obtain(source, at_hand, self.downloads, self.offline, digest)
        is_given = self.at_hand and path in (self.at_hand / name, self.at_hand / path.name)
        origin: dict[str, Any] = {"origin": GIVEN} if is_given else {"urls": list(source.urls)}
        origin |= {"bytes": path.stat().st_size, "sha256": digest(path, "sha256")}
        self.origins[name] = {"file": path.name} | origin
        return path

    def _unpack(self, name: str, archive: Path, parts: Sequence[Part]) -> dict[Part, Path]:
        """The texts of an archive's parts. A damaged download is deleted."""
        groups = sorted({part.members for part in parts})
        inputs = {"sha256": self.origins[name]["sha256"], "members": groups}
        root = self.downloads / "extracted"
        folder = root / f"{archive.name}-{fingerprint_of(inputs)[:8]}"

        def unpack(new: Path) -> dict[str, int]:
            members = extract(archive, set(itertools.chain(*groups)), new)
            missing = [group for group in groups if members.keys().isdisjoint(group)]
            if missing:
                raise UserError(
                    f"{archive} does not contain {', '.join(map(' or '.join, missing))}: it is not the "
                    "published archive."
                )
            return members

        log.info(f"extracting {archive}")
        try:
            record = make([Step(folder.name, folder, unpack, inputs)], root)[folder.name]
        except DamagedArchive as error:
            if archive == self.downloads / name:
                archive.unlink()
                remedy = "It was deleted: run the same command again to download it again."
            else:
                remedy = "Replace it, or move it away so that it is downloaded."
            raise UserError(f"{error} {remedy}") from error
        texts = {}
        for part in parts:
            texts[part] = folder / next(member for member in part.members if member in record)
        return texts


def _markup(path: Path, part: Part) -> str:
    """The markup of a file by its name's ending, else that of its part."""
    suffixes = {*path.suffixes[-2:]}
    if {".sgm", ".xml"} & suffixes:
        return "sgm"
    if {".json", ".jsonl"} & suffixes:
        return "documents"
    return part.markup


def known_checksum(memory: Path, path: Path, algorithm: str = "sha256") -> str:
    """A file's checksum. The file is read only if it was touched since its checksum was remembered.

    Args:
        memory: the JSON file that remembers checksums.
        path: the file.
        algorithm: hashlib's name of the checksum.

    Returns:
        The checksum in hexadecimal digits.
    """
    cache = saved_json(memory)
    key = f"{path.resolve()} {algorithm}"
    # st_ctime_ns changes with the file even if its modification time was set back
    now = [*file_signature(path), path.stat().st_ctime_ns]
    entry = cache.get(key)
    if not isinstance(entry, list) or entry[:-1] != now:
        entry = [*now, checksum(path, algorithm)]
        write_json(memory, cache | {key: entry})
    return str(entry[-1])


def before_download(
    dataset: Dataset, root: Path, downloads: Path, missing: Sequence[PublicFile]
) -> None:
    """Print a data set's terms and the size of the download, and check the free disk space.

    Args:
        dataset: the data set; its licence and its disk space for a complete preparation are read.
        root: the folder of the stages.
        downloads: the folder to which the files are downloaded.
        missing: the files to download.

    Raises:
        UserError: if a disk has too little space for the files, unless the environment variable OVERRIDE is
            set.
    """
    _log_terms(dataset)
    size = sum(file.bytes for file in missing)
    needed = dataset.disk * 1e9
    log.info(
        f"to download: {len(missing)} file{'s' * (len(missing) > 1)}, about {format_bytes(size)}, "
        f"into {downloads}; the prepared data set takes about {format_bytes(needed)} of disk space, "
        "including downloads"
    )
    present = _size_of(root.rglob("*"))
    present += _size_of(downloads / file.name for file in dataset.files())
    _check_disk(dataset.name, ((downloads, size), (root, max(needed - size - present, 0))))


def before_growth(dataset: Dataset, store: Store, tokens: int, root: Path) -> None:
    """Print the terms and the size of a data set that is used in part; check the free disk space.

    Args:
        dataset: the data set, whose licence is printed.
        store: the store of its files.
        tokens: the number of tokens to prepare, of all splits together.
        root: the folder of the stages.

    Raises:
        UserError: see `before_download`.
    """
    _log_terms(dataset)
    text = tokens * TOKEN_BYTES
    packed = tokens * PACKED_BYTES
    first = dataset.files()[0]
    log.info(
        f"{tokens:,} tokens take about {format_bytes(text)} of disk space in {root}. They come from "
        f"{Path(first.name).name} and the files after it; missing files are downloaded one by one, about "
        f"{format_bytes(packed)} in all, from {first.urls[0]} on"
    )
    present = _size_of(root.rglob("*"))
    downloaded = _size_of(store.downloads.rglob("*"))
    fetched = 0 if store.offline or store.at_hand else max(packed - downloaded, 0)
    _check_disk(dataset.name, ((store.downloads, fetched), (root, max(text - present, 0))))


def _log_terms(dataset: Dataset) -> None:
    if dataset.licence:
        log.info(f"{dataset.name}: terms of use: {dataset.licence}")


def _size_of(paths: Iterable[Path]) -> int:
    """The number of bytes of those paths that are files."""
    return sum(path.stat().st_size for path in paths if path.is_file())


def _check_disk(name: str, folders: Sequence[tuple[Path, float]]) -> None:
    """Raise UserError if a disk has less free space than its folders need.

    Args:
        name: the data set, for the error.
        folders: (folder, bytes that it needs) pairs.
    """
    needs: dict[int, float] = {}
    for folder, need in folders:
        path = folder.absolute()
        existing = next(filter(Path.exists, (path, *path.parents)))
        device = existing.stat().st_dev
        needs[device] = needs.get(device, 0) + need
        free = shutil.disk_usage(existing).free
        if free < needs[device] and not os.environ.get(OVERRIDE):
            raise UserError(
                f"{name} needs about {format_bytes(needs[device])} more on the disk of {existing}, which "
                f"has {format_bytes(free)} free. Free some space, or choose another folder. To try without "
                f"this check, set {OVERRIDE}=1: finished stages are kept if the disk fills up."
            )


def format_bytes(size: float) -> str:
    """A number of bytes in words, such as 1.8 GB, 23 MB or 0.6 MB."""
    unit, scale = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6)
    digits = 0 if size >= 10 * scale else 1
    return f"{size / scale:.{digits}f} {unit}"


def require_source(settings: Mapping[str, Any], source: Path | None) -> Path | None:
    """The --data folder; None for a data set that is downloaded.

    A folder without any file of the data set is an error, because the user wants the folder to be used.

    Args:
        settings: the recipe's data section.
        source: the value of --data, or None.

    Raises:
        UserError: if the folder is missing or unusable; the message names the files to give.
    """
    dataset = datasets().get(settings["recipe"])
    if dataset and dataset.downloadable:
        if source and not is_binarised(source) and not (source / DICTIONARY).is_file():
            _require_some_file(dataset, settings, source)
    elif source is None:
        bring = "Give --data the folder prepared for it."
        if dataset:
            bring = dataset.bring.format(**settings)
        raise UserError(
            f"--data is required: data.recipe {settings['recipe']} reads your files. {bring}"
        )
    return source


def _require_some_file(dataset: Dataset, settings: Mapping[str, Any], source: Path) -> None:
    """Raise UserError for a folder without any file of a data set that could be downloaded."""
    if not source.is_dir():
        raise UserError(f"--data {source} is not a folder. Give an existing folder.")
    if dataset.generated:
        raise UserError(
            f"--data {source} is not binarised {dataset.name}. Give the folder `binarised` of moa-fairseq "
            f"prepare {dataset.name}, or leave --data out."
        )
    names = _file_names(dataset, settings)
    if any(find_file(source, name) for name in names):
        return
    files = list(dict.fromkeys(Path(name).name for name in names))
    if len(files) > MOST_NAMES:
        files[MOST_NAMES:] = ["…"]
    listed = ", ".join(files)
    raise UserError(
        f"--data {source} has no file of {dataset.name} (looked for {listed}[.gz]). Give a folder that has "
        "some of them, or leave --data out to download them all."
    )


def _file_names(dataset: Dataset, settings: Mapping[str, Any]) -> list[str]:
    """The names of a data set's archives and texts, and of the user's own text in place of archives."""
    languages = list(filter(None, (settings.get("source"), settings.get("target"))))
    names: list[str] = []
    for part in itertools.chain.from_iterable(dataset.parts(languages).values()):
        names += filter(None, (part.archive, *part.members))
    if dataset.archives:
        names += [f"train.{language}" for language in languages]
    return names
