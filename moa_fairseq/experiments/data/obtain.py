"""Where the files of a data set come from: a folder at hand, earlier downloads, or the internet."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.archives import DamagedArchive, extract
from moa_fairseq.experiments.data.binarised import DICTIONARY, is_binarised
from moa_fairseq.experiments.data.catalogue import Dataset, Part, PublicFile, datasets, public_files
from moa_fairseq.experiments.data.download import obtain
from moa_fairseq.experiments.data.parallel_text import Piece, find_file
from moa_fairseq.experiments.json_files import saved_json, write_json
from moa_fairseq.experiments.make import Step, fingerprint_of, make, stamp
from moa_fairseq.files import checksum
from moa_fairseq.process import locked

MEMORY = "checked.json"  # checksums of files, so that gigabytes are not read twice
OVERRIDE = "MOA_FAIRSEQ_IGNORE_DISK"
MOST_NAMES = 20  # in one error
GIVEN = "the user's folder"  # --from, or --data of a recipe; the manifest names no path outside of its own
# Of running text in 8,000 pieces: a token as text, binarised and on its way there; and in packed files.
TOKEN_BYTES = 12
PACKED_BYTES = 2
log = logging.getLogger(__name__)


@dataclasses.dataclass
class Store:
    """Files at hand and downloaded ones.

    Args:
        at_hand: the user's folder of archives or of extracted files, or None.
        downloads: where what is fetched and extracted is kept.
        offline: whether nothing may be fetched.
        origins: name of a file → what was used, for the manifest: file, origin or urls, and of public files
            bytes and sha256.
    """

    at_hand: Path | None
    downloads: Path
    offline: bool = False
    origins: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def parts(
        self, dataset: Dataset, languages: Sequence[str], required: Sequence[str]
    ) -> dict[str, list[Part]]:
        """split → its parts, by the names of files alone; `pieces` fetches what the user's folder lacks.

        Of text that lies in no archive, splits are left out that are not required and not in that folder.

        Args:
            dataset: whose parts they are.
            languages: source and target, or ().
            required: splits that training and scoring need.

        Raises:
            UserError: listing all files that are missing and cannot be fetched; and where the user's folder
                seems to hold text of their own.
        """
        parts = dataset.parts(languages)
        wanted = {}
        missing = []
        plain = {split: [part for part in some if not part.archive] for split, some in parts.items()}
        train, valid = (
            [path for part in plain.get(s, ()) if (path := self._find(part))] for s in ("train", "valid")
        )
        unpacked = [path.name for path in train if path.suffix != ".gz"]
        lacks = plain.get("valid")
        if unpacked and lacks and lacks[0].source and not valid:  # else one half would be downloaded
            problem = f"{self.at_hand} has {', '.join(unpacked)}, but lacks {Path(lacks[0].members[0]).name}"
            remedy = "say data.recipe=parallel (moa-fairseq prepare parallel)"
            raise UserError(f"{problem}. If it is text of your own, and not {dataset.name}, {remedy}.")
        for split, some in parts.items():
            absent = [part for part in some if not part.archive and not self._find(part)]
            if not absent or split in required:
                wanted[split] = some
                missing += [f"{part.members[0]}[.gz]" for part in absent if not part.source]
        if missing:
            bring = dataset.bring.format(**dict(zip(("source", "target"), languages)))
            raise UserError(f"The data folder {self.at_hand} lacks {', '.join(missing)}. {bring}")
        return wanted

    def pieces(
        self,
        parts: Sequence[Part],
        optional: Sequence[Part] = (),
        announced: Dataset | None = None,
        root: Path = Path(),
    ) -> dict[Part, Piece]:
        """The text files of parts; archives are fetched when needed.

        Args:
            parts: those that must be there.
            optional: further ones, for which alone no archive is fetched: they may be missing.
            announced: the data set whose terms are said before a download.
            root: where its stages will be.

        Returns:
            Part → its file.

        Raises:
            UserError: for a file that cannot be had, or is not the right one.
        """
        # Two data sets may be prepared at a time, and share archives.
        with locked(self.downloads, math.inf):
            texts = {part: self._find(part) for part in (*parts, *optional)}
            for part, path in texts.items():
                if path and path.suffix == ".gz" and part.source and not part.archive:
                    texts[part] = None  # a public file, which is checked
                elif path:
                    self.origins[path.name] = {"file": path.name, "origin": GIVEN}
            names = dict.fromkeys(part.source for part in parts if texts[part] is None)
            places = {name: find_file(self.at_hand, name) or self.downloads / name for name in names}
            absent = [public_files()[name] for name, path in places.items() if not path.is_file()]
            if absent and announced and not self.offline:
                before_download(announced, root, self.downloads, absent)
            for name in names:
                file = self._file(name)
                inside = [part for part in texts if not texts[part] and part.source == name]
                texts.update(self._unpack(name, file, inside) if inside[0].archive else {inside[0]: file})
        return {part: Piece(path, _markup(path, part)) for part, path in texts.items() if path}

    def at_hand_or_fetched(self, part: Part) -> Path | None:
        """The file of a part that lies in no archive; None where it would have to be fetched."""
        fetched = self.downloads / part.source
        return self._find(part) or (fetched if part.source and fetched.is_file() else None)

    def _find(self, part: Part) -> Path | None:
        """The text in the user's folder, by its name in the archive or the last part of it."""
        return next(filter(None, (find_file(self.at_hand, name) for name in part.members)), None)

    def _file(self, name: str) -> Path:
        """A public file, checked; one that was read before is not read again."""
        source = public_files()[name]
        digest = functools.partial(known_checksum, self.downloads / MEMORY)
        at_hand = [self.at_hand] if self.at_hand else []
        path = obtain(source, at_hand, self.downloads, self.offline, digest)
        given = any(path in (folder / name, folder / path.name) for folder in at_hand)
        self.origins[name] = {
            "file": path.name,
            **({"origin": GIVEN} if given else {"urls": list(source.urls)}),
            "bytes": path.stat().st_size,
            "sha256": digest(path, "sha256"),
        }
        return path

    def _unpack(self, name: str, archive: Path, parts: Sequence[Part]) -> dict[Part, Path]:
        """The texts of parts of an archive. A damaged download is thrown away."""
        groups = sorted({part.members for part in parts})
        inputs = {"sha256": self.origins[name]["sha256"], "members": groups}
        root = self.downloads / "extracted"
        folder = root / f"{archive.name}-{fingerprint_of(inputs)[:8]}"

        def unpack(new: Path) -> dict[str, int]:
            found = extract(archive, {*itertools.chain(*groups)}, new)
            missing = ", ".join(" or ".join(group) for group in groups if not found.keys() & set(group))
            if missing:
                raise UserError(f"{archive} does not contain {missing}: it is not the archive that is known.")
            return found

        log.info(f"extracting {archive}")
        try:
            found = make([Step(folder.name, folder, unpack, inputs)], root)[folder.name]
        except DamagedArchive as error:
            if archive == self.downloads / name:
                archive.unlink()
                remedy = "It was removed: run the same command again to fetch it anew."
            else:
                remedy = "Replace it, or take it away so that it is downloaded."
            raise UserError(f"{error} {remedy}") from error
        return {part: folder / next(member for member in part.members if member in found) for part in parts}


def _markup(path: Path, part: Part) -> str:
    """How the lines of a text are taken out of a file, which its name may tell."""
    suffixes = {*path.suffixes[-2:]}
    if {".sgm", ".xml"} & suffixes:
        return "sgm"
    if {".json", ".jsonl"} & suffixes:
        return "documents"
    return part.markup


def known_checksum(memory: Path, path: Path, algorithm: str = "sha256") -> str:
    """Checksum of a file; one that is remembered, and was not touched since, is not read again.

    Args:
        memory: the JSON file that remembers checksums.
        path: of the file.
        algorithm: as hashlib calls it.

    Returns:
        Hexadecimal digits.
    """
    known = saved_json(memory)
    key = f"{path.resolve()} {algorithm}"
    now = [
        *stamp(path),
        path.stat().st_ctime_ns,
    ]  # the last changes with the file even if its time was set back
    entry = known.get(key)
    if not isinstance(entry, list) or entry[:-1] != now:
        entry = [*now, checksum(path, algorithm)]
        write_json(memory, {**known, key: entry})
    return str(entry[-1])


def before_download(dataset: Dataset, root: Path, downloads: Path, missing: Sequence[PublicFile]) -> None:
    """Say the terms of a data set and the size of what is to be fetched, and check the free disk.

    Args:
        dataset: with its licence, and the disk that a whole preparation takes.
        root: where the stages will be.
        downloads: where the files will be.
        missing: the files.

    Raises:
        UserError: when a disk is too small for what is fetched or made on it, unless the environment variable
            OVERRIDE is set.
    """
    if dataset.licence:
        log.info(f"{dataset.name}: terms of use: {dataset.licence}")
    size = sum(file.bytes for file in missing)
    whole = dataset.disk * 1e9
    log.info(
        f"to download: {len(missing)} file{'s' * (len(missing) > 1)}, about {human(size)}, into {downloads}; "
        f"prepared, the data set takes about {human(whole)} of disk, downloads included"
    )
    kept = [downloads / file.name for file in dataset.files(dataset.languages)]
    there = sum(path.stat().st_size for path in [*kept, *root.rglob("*")] if path.is_file())
    _check_disk(dataset.name, ((downloads, size), (root, max(whole - size - there, 0))))


def before_growth(dataset: Dataset, store: Store, tokens: int, root: Path) -> None:
    """Say the terms of a data set of which so many tokens are used, and their size; check the free disk.

    Args:
        dataset: with its licence.
        store: where its files come from.
        tokens: of all splits together.
        root: where the stages will be.

    Raises:
        UserError: as `before_download`.
    """
    if dataset.licence:
        log.info(f"{dataset.name}: terms of use: {dataset.licence}")
    text = tokens * TOKEN_BYTES
    packed = tokens * PACKED_BYTES
    first = dataset.files()[0]
    log.info(
        f"{tokens:,} tokens take about {human(text)} of disk in {root}. They come from "
        f"{Path(first.name).name} and the files behind it; what is not at hand is fetched file by file, "
        f"about {human(packed)} in all, from {first.urls[0]} on"
    )
    there = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    given = sum(path.stat().st_size for path in store.downloads.rglob("*") if path.is_file())
    fetched = 0 if store.offline or store.at_hand else max(packed - given, 0)
    _check_disk(dataset.name, ((store.downloads, fetched), (root, max(text - there, 0))))


def _check_disk(name: str, places: Sequence[tuple[Path, float]]) -> None:
    """Raise UserError where a disk has less free than what will be written to these folders of it."""
    needs: dict[int, float] = {}
    for place, need in ((place.absolute(), need) for place, need in places):
        existing = next(folder for folder in (place, *place.parents) if folder.exists())
        device = existing.stat().st_dev
        needs[device] = needs.get(device, 0) + need
        free = shutil.disk_usage(existing).free
        if free < needs[device] and not os.environ.get(OVERRIDE):
            raise UserError(
                f"{name} needs about {human(needs[device])} more on the disk of {existing}, which "
                f"has {human(free)} free. Free some space, or choose another folder. To try all the same, "
                f"set {OVERRIDE}=1: finished stages are kept when the disk fills up."
            )


def human(size: float) -> str:
    """Bytes in words: 1.8 GB, 23 MB, 0.6 MB."""
    if size >= 1e9:
        unit = "GB"
        divisor = 1e9
    else:
        unit = "MB"
        divisor = 1e6
    if size >= 10 * divisor:
        return f"{size / divisor:.0f} {unit}"
    return f"{size / divisor:.1f} {unit}"


def require_source(settings: Mapping[str, Any], source: Path | None) -> Path | None:
    """The --data folder; None for a data set that is downloaded.

    A folder in which no file of the data set lies is refused: whoever names one wants it to be used.

    Args:
        settings: of the data section.
        source: what --data says, or None.

    Raises:
        UserError: that says what to bring, or what is wrong with the folder.
    """
    dataset = datasets().get(settings["recipe"])
    if dataset is None or not dataset.downloadable:
        if source is None:
            if dataset:
                bring = dataset.bring.format(**settings)
            else:
                bring = "Give --data the folder made by it."
            raise UserError(f"--data is missing: data.recipe {settings['recipe']} needs your files. {bring}")
        return source
    if source is None or is_binarised(source) or (source / DICTIONARY).is_file():
        return source
    if not source.is_dir():
        raise UserError(f"--data {source} is not a folder.")
    if dataset.generated:
        remedy = (
            f"name the folder `binarised` that moa-fairseq prepare {dataset.name} made, or leave --data away"
        )
        raise UserError(f"--data {source} is not binarised {dataset.name}: {remedy}.")
    languages = [settings[side] for side in ("source", "target") if settings.get(side)]
    parts = [*itertools.chain.from_iterable(dataset.parts(languages).values())]
    names = [name for part in parts for name in (part.archive, *part.members) if name]
    names += [f"train.{language}" for language in languages if dataset.archives]
    if not any(find_file(source, name) for name in names):
        base = [*dict.fromkeys(Path(name).name for name in names)]
        looked = ", ".join(base[:MOST_NAMES]) + (", …" if len(base) > MOST_NAMES else "")
        remedy = "Name a folder that has some of them, or leave --data away, so that all are downloaded"
        raise UserError(
            f"--data {source} holds no file of {dataset.name}. Looked for {looked}[.gz]. {remedy}."
        )
    return source
