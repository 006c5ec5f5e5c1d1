"""Where the files of a data set come from: a folder at hand, earlier downloads, or the internet."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from moa_fairseq.data_prep.archives import DamagedArchive, extract
from moa_fairseq.data_prep.catalogue import Dataset, Part, PublicFile, public_files
from moa_fairseq.data_prep.download import download, flaw_of
from moa_fairseq.data_prep.parallel_text import Piece, find_file
from moa_fairseq.data_prep.stage_folder import FileMemory, build_folder, fingerprint_of
from moa_fairseq.errors import UserError
from moa_fairseq.running.folder_lock import locked

MEMORY = "checked.json"
OVERRIDE = "MOA_FAIRSEQ_IGNORE_DISK"
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
    ) -> List[Optional[Piece]]:
        """The text files of parts and then of optional ones, in order; archives are fetched when needed.

        For an optional part alone no archive is fetched: it may be None. announced: the data set whose terms
        are said before a download, whose stages will be in `root`. Raises UserError for a file that cannot
        be had, or is not the right one.
        """
        # Two data sets may be prepared at a time, and share archives.
        with locked(self.downloads, math.inf):
            texts = {part: self._text_at_hand(part) for part in (*parts, *optional)}
            wanted = dict.fromkeys(part.archive or part.file for part in parts if texts[part] is None)
            absent = [
                public_files()[name]
                for name in wanted
                if not self._file_at_hand(name) and not (self.downloads / name).is_file()
            ]
            if absent and announced and not self.offline:
                before_download(announced, root, self.downloads, absent)
            closed: Dict[str, List[Part]] = {}
            for part in (*parts, *optional):
                if texts[part] is None and part.archive and (part in parts or part.archive in closed):
                    closed.setdefault(part.archive, []).append(part)
            for name, inside in closed.items():
                folder = self._open_archive(public_files()[name], [part.members for part in inside])
                for part in inside:
                    texts[part] = next(folder / name for name in part.members if (folder / name).is_file())
            for part in parts:
                texts[part] = texts[part] or self._file(public_files()[part.file])
        return [_piece(texts[part], part) for part in (*parts, *optional)]

    def _text_at_hand(self, part: Part) -> Optional[Path]:
        """The extracted text in the user's folder, by its name in the archive or the last part of it."""
        for name in part.members or (part.file,):
            found = find_file(self.at_hand, name)
            if found:
                source = public_files().get(part.file)
                if source and found.suffix == ".gz":
                    self._check(found, source)
                else:
                    self.origins[name] = {"file": found.name}
                return found
        return None

    def _file_at_hand(self, name: str) -> Optional[Path]:
        places = (self.at_hand / name, self.at_hand / Path(name).name) if self.at_hand else ()
        return next((path for path in places if path.is_file()), None)

    def _file(self, source: PublicFile) -> Path:
        """A public file: at hand, downloaded before, or fetched now; checked."""
        path = self._file_at_hand(source.name)
        if path:
            self._check(path, source)
            return path
        path = self.downloads / source.name
        if not path.is_file() or self._flaw(path, source):
            if self.offline:
                where = f"{self.at_hand} and {self.downloads}" if self.at_hand else str(self.downloads)
                remedy = source.gone or (
                    f"Run without --offline, or fetch it from {' or '.join(source.urls)} and name its folder "
                    "with --from."
                )
                raise UserError(f"{path.name} is not in {where}, and --offline forbids a download. {remedy}")
            path = download(source, self.downloads)
        self._note(path, source)
        return path

    def _check(self, path: Path, source: PublicFile) -> None:
        flaw = self._flaw(path, source)
        if flaw:
            raise UserError(
                f"{path} is not the file that the recipe knows: it {flaw}. Take it away, so that it is "
                f"downloaded from {source.urls[0]}, or give the extracted text files instead."
            )
        self._note(path, source)

    def _flaw(self, path: Path, source: PublicFile) -> str:
        asked = fingerprint_of(source.size, source.sha256, source.md5)
        return self._memory().fact(path, f"flaw {asked}", lambda path: flaw_of(path, source))

    def _note(self, path: Path, source: PublicFile) -> None:
        self.origins[source.name] = {
            "file": path.name,
            "urls": list(source.urls),
            "bytes": path.stat().st_size,
            "sha256": self._memory().checksum(path),
        }

    def _memory(self) -> FileMemory:
        return FileMemory(self.downloads / MEMORY)

    def _open_archive(self, source: PublicFile, wanted: Sequence[Sequence[str]]) -> Path:
        """The folder with the wanted members of an archive. A damaged download is thrown away."""
        archive = self._file(source)
        groups = sorted(set(wanted))
        mark = fingerprint_of("extract", self.origins[source.name]["sha256"], groups)
        folder = self.downloads / "extracted" / f"{Path(source.name).name}-{mark[:8]}"
        log.info(f"extracting {archive}")
        try:
            build_folder(folder, mark, lambda new: extract(archive, groups, new))
        except DamagedArchive as error:
            if archive == self.downloads / source.name:
                archive.unlink()
                raise UserError(
                    f"{error} It was removed: run the same command again to fetch it anew."
                ) from error
            raise UserError(f"{error} Replace it, or take it away so that it is downloaded.") from error
        return folder


def _piece(path: Optional[Path], part: Part) -> Optional[Piece]:
    return Piece(path, "sgm" if path.suffix in (".sgm", ".xml") else part.markup) if path else None


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
