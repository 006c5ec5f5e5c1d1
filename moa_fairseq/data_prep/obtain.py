"""Where the files of a data set come from: a folder at hand, earlier downloads, or the internet."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from moa_fairseq.data_prep.archives import DamagedArchive, extract
from moa_fairseq.data_prep.catalogue import Part, PublicFile, public_files
from moa_fairseq.data_prep.download import download
from moa_fairseq.data_prep.markup import markup_of
from moa_fairseq.data_prep.parallel_text import Piece
from moa_fairseq.data_prep.stage_folder import FileMemory, build_folder, fingerprint_of
from moa_fairseq.data_prep.verify import flaw_of
from moa_fairseq.errors import UserError
from moa_fairseq.running.folder_lock import locked

MEMORY = "checked.json"


@dataclasses.dataclass
class Store:
    """Files at hand and downloaded ones.

    at_hand: the user's folder of archives or of extracted files, or None. downloads: where what is
    fetched and extracted is kept. origins: what was used, for the manifest.
    """

    at_hand: Optional[Path]
    downloads: Path
    offline: bool = False
    say: Callable[[str], None] = print
    origins: Dict[str, Dict[str, Any]] = dataclasses.field(default_factory=dict)

    def pieces(
        self,
        parts: Sequence[Part],
        optional: Sequence[Part] = (),
        before: Callable[[Sequence[PublicFile]], None] = lambda missing: None,
    ) -> List[Optional[Piece]]:
        """The text files of parts and then of optional ones, in order; archives are fetched when needed.

        For an optional part alone no archive is fetched: it may be None. before: called once with all the
        files that are to be fetched, when there are any. Raises UserError for a file that cannot be had, or
        is not the right one.
        """
        # Two data sets may be prepared at a time, and share archives.
        with locked(self.downloads, math.inf, self.say):
            return self._pieces(parts, optional, before)

    def _pieces(
        self, parts: Sequence[Part], optional: Sequence[Part], before: Callable[[Sequence[PublicFile]], None]
    ) -> List[Optional[Piece]]:
        texts = {part: self._text_at_hand(part) for part in (*parts, *optional)}
        wanted = dict.fromkeys(part.archive or part.file for part in parts if texts[part] is None)
        absent = [
            name for name in wanted if not self._at_hand(name) and not (self.downloads / name).is_file()
        ]
        if absent and not self.offline:
            before([public_files()[name] for name in absent])
        closed: Dict[str, List[Part]] = {}
        for part in parts:
            if texts[part] is None and part.archive:
                closed.setdefault(part.archive, []).append(part)
        for part in optional:
            if texts[part] is None and part.archive in closed:
                closed[part.archive].append(part)
        for name, inside in closed.items():
            folder = self._open_archive(public_files()[name], [part.members for part in inside])
            for part in inside:
                texts[part] = next(folder / name for name in part.members if (folder / name).is_file())
        pieces: List[Optional[Piece]] = []
        for part in (*parts, *optional):
            path = texts[part]
            if path is None and part not in optional:
                path = self._file(public_files()[part.file])
            pieces.append(Piece(path, markup_of(path.name, part.markup)) if path else None)
        return pieces

    def _text_at_hand(self, part: Part) -> Optional[Path]:
        """The extracted text in the user's folder, by its name in the archive or the last part of it."""
        for name in part.members or (part.file,):
            found = self._at_hand(name.removesuffix(".gz")) or self._at_hand(name.removesuffix(".gz") + ".gz")
            if found:
                source = public_files().get(part.file)
                if source and found.suffix == ".gz":
                    self._check(found, source)
                else:
                    self.origins[name] = {"file": found.name}
                return found
        return None

    def _at_hand(self, name: str) -> Optional[Path]:
        if self.at_hand is None:
            return None
        places = (self.at_hand / name, self.at_hand / Path(name).name)
        return next((path for path in places if path.is_file()), None)

    def _file(self, source: PublicFile) -> Path:
        """A public file: at hand, downloaded before, or fetched now; checked."""
        given = self._at_hand(source.name)
        kept = self.downloads / source.name
        if given:
            self._check(given, source)
            return given
        if kept.is_file() and not self._flaw(kept, source):
            self._note(kept, source)
            return kept
        if self.offline:
            where = f"{self.at_hand} and {self.downloads}" if self.at_hand else str(self.downloads)
            raise UserError(
                f"{Path(source.name).name} is not in {where}, and --offline forbids a download. "
                + (
                    source.gone
                    or f"Run without --offline, or fetch it from {' or '.join(source.urls)} and name its "
                    "folder with --from."
                )
            )
        path = download(source, self.downloads, self.say)
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
            "sha256": self._memory().sha256(path),
        }

    def _memory(self) -> FileMemory:
        return FileMemory(self.downloads / MEMORY)

    def _open_archive(self, source: PublicFile, wanted: Sequence[Sequence[str]]) -> Path:
        """The folder with the wanted members of an archive. A damaged download is thrown away."""
        archive = self._file(source)
        groups = sorted(set(wanted))
        mark = fingerprint_of("extract", self.origins[source.name]["sha256"], groups)
        folder = self.downloads / "extracted" / f"{Path(source.name).name}-{mark[:8]}"
        self.say(f"extracting {archive}")
        try:
            build_folder(folder, mark, lambda new: extract(archive, groups, new), self.say)
        except DamagedArchive as error:
            if archive == self.downloads / source.name:
                archive.unlink()
                raise UserError(
                    f"{error} It was removed: run the same command again to fetch it anew."
                ) from error
            raise UserError(f"{error} Replace it, or take it away so that it is downloaded.") from error
        return folder
