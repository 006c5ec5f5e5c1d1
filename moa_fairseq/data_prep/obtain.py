"""Where the files of a data set come from: a folder at hand, earlier downloads, or the internet."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from moa_fairseq.data_prep.archives import DamagedArchive, extract
from moa_fairseq.data_prep.catalogue import Dataset, Part, PublicFile, public_files
from moa_fairseq.data_prep.download import obtain
from moa_fairseq.data_prep.parallel_text import Piece, find_file
from moa_fairseq.errors import UserError
from moa_fairseq.files import checksum
from moa_fairseq.json_files import saved_json, write_json
from moa_fairseq.running.make import Step, fingerprint_of, make, stamp
from moa_fairseq.running.process import locked

MEMORY = "checked.json"  # checksums of files, so that gigabytes are not read twice
OVERRIDE = "MOA_FAIRSEQ_IGNORE_DISK"
GIVEN = "the user's folder"  # --from, or --data of a recipe; the manifest names no path outside of its own
log = logging.getLogger(__name__)


@dataclasses.dataclass
class Store:
    """Files at hand and downloaded ones.

    at_hand: the user's folder of archives or of extracted files, or None. downloads: where what is
    fetched and extracted is kept. origins: what was used, for the manifest.
    """

    at_hand: Optional[Path]
    downloads: Path
    offline: bool = False
    origins: Dict[str, Dict[str, Any]] = dataclasses.field(default_factory=dict)

    def pieces(
        self,
        parts: Sequence[Part],
        optional: Sequence[Part] = (),
        announced: Optional[Dataset] = None,
        root: Path = Path(),
    ) -> Dict[Part, Piece]:
        """The text files of parts and of optional ones; archives are fetched when needed.

        For an optional part alone no archive is fetched: it may be missing. announced: the data set
        whose terms are said before a download, whose stages will be in `root`. Raises UserError for a file
        that cannot be had, or is not the right one.
        """
        # Two data sets may be prepared at a time, and share archives.
        with locked(self.downloads, math.inf):
            texts = {part: self._text_at_hand(part) for part in (*parts, *optional)}
            names = dict.fromkeys(part.archive or part.file for part in parts if texts[part] is None)
            absent = [
                public_files()[name]
                for name in names
                if not find_file(self.at_hand, name) and not (self.downloads / name).is_file()
            ]
            if absent and announced and not self.offline:
                before_download(announced, root, self.downloads, absent)
            for name in names:
                path = self._file(name)
                inside = [part for part in texts if not texts[part] and name in (part.archive, part.file)]
                texts.update(
                    dict.fromkeys(inside, path) if inside[0].file else self._unpack(name, path, inside)
                )
        return {
            part: Piece(path, "sgm" if path.suffix in (".sgm", ".xml") else part.markup)
            for part, path in texts.items()
            if path
        }

    def _text_at_hand(self, part: Part) -> Optional[Path]:
        """The extracted text in the user's folder, by its name in the archive or the last part of it."""
        for name in part.members or (part.file,):
            found = find_file(self.at_hand, name)
            if found and found.suffix == ".gz" and name in public_files():
                return self._file(name)
            if found:
                self.origins[name] = {"file": found.name, "origin": GIVEN}
                return found
        return None

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

    def _unpack(self, name: str, archive: Path, parts: Sequence[Part]) -> Dict[Part, Path]:
        """The texts of parts of an archive. A damaged download is thrown away."""
        groups = sorted({part.members for part in parts})
        inputs = {"sha256": self.origins[name]["sha256"], "members": groups}
        root = self.downloads / "extracted"
        folder = root / f"{archive.name}-{fingerprint_of(inputs)[:8]}"

        def unpack(new: Path) -> Dict[str, int]:
            found = extract(archive, {member for group in groups for member in group}, new)
            missing = ", ".join(" or ".join(group) for group in groups if not found.keys() & set(group))
            if missing:
                raise UserError(
                    f"{archive} does not contain {missing}: it is another archive than the recipe knows."
                )
            return found

        log.info(f"extracting {archive}")
        try:
            found = make([Step(folder.name, folder, unpack, inputs)], root)[folder.name]
        except DamagedArchive as error:
            if archive == self.downloads / name:
                archive.unlink()
                raise UserError(
                    f"{error} It was removed: run the same command again to fetch it anew."
                ) from error
            raise UserError(f"{error} Replace it, or take it away so that it is downloaded.") from error
        return {part: folder / next(member for member in part.members if member in found) for part in parts}


def known_checksum(memory: Path, path: Path, algorithm: str = "sha256") -> str:
    """Checksum of a file; one whose name, size and time are in the JSON file `memory` is not read again."""
    known, key, now = saved_json(memory), f"{path.resolve()} {algorithm}", stamp(path)
    entry = known.get(key)
    if not isinstance(entry, list) or entry[:-1] != now:
        entry = [*now, checksum(path, algorithm)]
        write_json(memory, {**known, key: entry})
    return str(entry[-1])


def before_download(dataset: Dataset, root: Path, downloads: Path, missing: Sequence[PublicFile]) -> None:
    """Say the terms of a data set and the size of the files that are `missing`, and check the free disk.

    root: where the stages will be. Raises UserError when the disk is too small for them and for what is
    fetched, unless the environment variable OVERRIDE is set.
    """
    if dataset.licence:
        log.info(f"{dataset.name}: terms of use: {dataset.licence}")
    size = sum(file.bytes for file in missing)
    log.info(
        f"to download: {len(missing)} file{'s' * (len(missing) > 1)}, about {human(size)}, into {downloads}; "
        f"prepared, the data set takes about {human(dataset.disk * 1e9)} of disk, downloads included"
    )
    kept = [downloads / file.name for file in dataset.files(dataset.languages)]
    there = sum(path.stat().st_size for path in [*kept, *root.rglob("*")] if path.is_file())
    needs: Dict[int, float] = {}
    places: Dict[int, Path] = {}
    for place, need in ((downloads, size), (root, dataset.disk * 1e9 - size - there)):
        parents = (place.absolute(), *place.absolute().parents)
        existing = next(folder for folder in parents if folder.exists())
        device = existing.stat().st_dev
        needs[device] = needs.get(device, 0) + max(need, 0)
        places[device] = existing
    for device, need in needs.items():
        free = shutil.disk_usage(places[device]).free
        if free < need and not os.environ.get(OVERRIDE):
            raise UserError(
                f"{dataset.name} needs about {human(need)} more on the disk of {places[device]}, which has "
                f"{human(free)} free. Free some space, or choose another folder. To try all the same, set "
                f"{OVERRIDE}=1: finished stages are kept when the disk fills up."
            )


def human(size: float) -> str:
    """Bytes in words: 1.8 GB, 23 MB, 0.6 MB."""
    unit, divisor = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6)
    return f"{size / divisor:.0f} {unit}" if size >= 10 * divisor else f"{size / divisor:.1f} {unit}"
