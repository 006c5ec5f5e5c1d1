"""A stage of the preparation is a folder that appears whole or not at all, and says what it was made from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from moa_fairseq.data_prep.parallel_text import Piece, count_lines
from moa_fairseq.files import atomic_write, checksum, disk_errors
from moa_fairseq.json_files import saved_json, write_json

MARK = "stage.json"
RESUME = "unfinished"
log = logging.getLogger(__name__)


def build_folder(
    folder: Path, fingerprint: str, build: Callable[[Path], Any], resumable: bool = False
) -> Any:
    """Make `folder` by `build(temporary folder)`, unless it was made before from the same fingerprint.

    build writes its files into the folder that it is given and returns facts about them (JSON
    values), which are kept in `stage.json`. A folder that is half-written or was changed since is
    made anew. resumable: build goes on from what an interrupted one left in the temporary folder.
    Returns the facts. Raises UserError when the disk fills up; the old folder then stays.
    """
    mark = read_mark(folder)
    if mark and mark["fingerprint"] == fingerprint:
        damaged = [name for name, size in mark["files"].items() if file_size(folder / name) != size]
        if not damaged:
            log.info(f"{folder}: up to date")
            return mark["facts"]
        log.info(f"{folder}: {damaged[0]} is missing or was changed; making it again")
    temporary = folder.with_name(folder.name + ".partial")
    note = temporary / RESUME
    with disk_errors(folder):
        if not (resumable and note.is_file() and note.read_text(encoding="utf-8") == fingerprint):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            if resumable:
                with atomic_write(note) as stream:
                    stream.write(fingerprint)
        facts = build(temporary)
        note.unlink(missing_ok=True)
        files = {
            str(path.relative_to(temporary)): path.stat().st_size
            for path in sorted(temporary.rglob("*"))
            if path.is_file() and path.suffix != ".log"
        }
        write_json(temporary / MARK, {"fingerprint": fingerprint, "files": files, "facts": facts})
        _replace_folder(temporary, folder)
    return facts


def _replace_folder(new: Path, old: Path) -> None:
    """Rename `new` to `old`; what was there is moved aside first and removed last."""
    aside = old.with_name(old.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    if old.exists():
        os.replace(old, aside)
    os.replace(new, old)
    shutil.rmtree(aside, ignore_errors=True)


def file_size(path: Path) -> int:
    """Bytes of a file, -1 where there is none."""
    return path.stat().st_size if path.is_file() else -1


def read_mark(folder: Path) -> Dict[str, Any]:
    """What stage.json of a finished folder says; {} for a folder that is absent, foreign or unfinished."""
    mark = saved_json(folder / MARK)
    return mark if {"fingerprint", "files", "facts"} <= set(mark) else {}


def fingerprint_of(*values: Any) -> str:
    """16 hexadecimal digits that change when any of the JSON values does."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


class FileMemory:
    """Facts about files that are dear to find out, kept in a JSON file by path, size and time stamp."""

    def __init__(self, memory: Path) -> None:
        self.memory = memory
        self.known = saved_json(memory)

    def fact(self, path: Path, name: str, find: Callable[[Path], Any]) -> Any:
        """The fact called `name` about a file: remembered, or found by `find(path)` and remembered."""
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        key = str(path.resolve())
        entry = self.known.get(key)
        if not entry or entry.get("stamp") != stamp:
            entry = self.known[key] = {"stamp": stamp}
        if name not in entry:
            entry[name] = find(path)
            write_json(self.memory, self.known)
        return entry[name]

    def checksum(self, path: Path, algorithm: str = "sha256") -> str:
        """As files.checksum; a file of the remembered size and time stamp is not read again."""
        return self.fact(path, algorithm, lambda path: checksum(path, algorithm))

    def lines(self, piece: Piece) -> Optional[int]:
        """How many lines a plain file of text has; None for one with markup."""
        return self.fact(piece.path, "lines", count_lines) if piece.markup == "plain" else None
