"""The run folder: what it remembers (state.json), its lock, and which of its checkpoints are whole."""

from __future__ import annotations

import json
import logging
import zipfile
import zlib
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.average import numbered_checkpoints
from moa_fairseq.fairseq_patches.checkpoint_files import check_sums
from moa_fairseq.files import atomic_write
from moa_fairseq.json_files import MAPPING, NUMBER, TEXT, check_kinds, read_json

log = logging.getLogger(__name__)

# The values of a stage's entry, as far as anything relies on them.
_ENTRY = {
    **dict.fromkeys(("folder", "fingerprint", "source", "done", "training", "hardware"), TEXT),
    **dict.fromkeys(("parameters", "updated", "checkpoints"), NUMBER),
    **dict.fromkeys(("sentences", "settings"), MAPPING),
}
_REMEDY = (
    "Delete that one file: whole results are then made again from the checkpoints. Or use --restart, which "
    "moves the run folder aside and starts again."
)


def trained_checkpoint(folder: Path) -> Path:
    """What a run folder stands for: its averaged checkpoint, else its best; average.pt where neither is."""
    average, best = folder / "average.pt", folder / "checkpoints" / "checkpoint_best.pt"
    return best if best.is_file() and not average.is_file() else average


class RunState:
    """`state.json`: one entry per stage with the fingerprint of what it was made from."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.json"
        try:
            self.entries: Dict[str, Any] = read_json(self.path, _REMEDY)
        except FileNotFoundError:
            self.entries = {}
        check_kinds(self.entries, {}, f"{self.path} (stages by name)", _REMEDY)
        for stage, entry in self.entries.items():
            required = ("folder", "sentences", "fingerprint") if stage == "prepare" and entry != {} else ()
            where = f"{self.path}: the entry {stage[:40]!r}"
            check_kinds(entry, _ENTRY, where, _REMEDY, required)
            check_kinds(
                entry.get("sentences") or {},
                dict.fromkeys(entry.get("sentences") or (), NUMBER),
                f"{where}: sentences",
                _REMEDY,
            )
            self.entries[stage] = {key: value for key, value in entry.items() if value is not None}

    def get(self, stage: str) -> Dict[str, Any]:
        """The entry of a stage, {} when it never ran."""
        return self.entries.get(stage, {})

    def put(self, stage: str, **values: Any) -> None:
        """Replace a stage's entry and write the file."""
        self.entries[stage] = values
        with atomic_write(self.path) as stream:
            json.dump(self.entries, stream, indent=1, sort_keys=True)

    def is_done(self, stage: str, fingerprint: str, *outputs: Path) -> bool:
        """True when the stage finished from the same fingerprint and its outputs are still there."""
        return self.get(stage).get("done") == fingerprint and all(
            path.is_file() and path.stat().st_size for path in outputs
        )


def is_whole(checkpoint: Path) -> bool:
    """False for a checkpoint that was cut off: its zip directory stands at the very end."""
    return checkpoint.is_file() and zipfile.is_zipfile(checkpoint)


def is_readable(checkpoint: Path) -> bool:
    """False for a checkpoint that is cut off or in which any byte differs from what was written.

    Reads the whole file: torch writes a checksum for every part of it.
    """
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            if not any(name.endswith("/data.pkl") for name in archive.namelist()):
                return False
        with open(checkpoint, "rb") as stream:
            check_sums(stream)
        return True
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError):
        return False


def checkpoint_to_resume(folder: Path) -> Optional[Path]:
    """checkpoint_last.pt, or the newest readable checkpoint where a crash or a disk damaged the last one.

    Warns of every damaged one that was passed over. None when training has to start from the
    beginning. Raises UserError when there are checkpoints but none is readable.
    """
    last = folder / "checkpoint_last.pt"
    numbered = [path for kind in (False, True) for _, path in numbered_checkpoints(folder, by_updates=kind)]
    numbered.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    candidates = [last, *numbered, folder / "checkpoint_best.pt"]
    candidates = [path for path in candidates if path.exists()]
    for path in candidates:
        if is_readable(path):
            return path
        log.warning("%s is damaged (cut off, or changed on the disk): looking for an older one", path)
    if candidates:
        raise UserError(
            f"No checkpoint in {folder} is whole (a crash, a full or a failing disk). Start again with "
            "--restart, which moves the folder aside."
        )
    return None


def move_aside(folder: Path) -> Optional[Path]:
    """Rename a run folder to the first free `<folder>.old-N`; None when there is nothing to move."""
    if not folder.exists():
        return None
    number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.old-{n}").exists())
    return folder.rename(folder.with_name(f"{folder.name}.old-{number}"))


def changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> List[str]:
    """'key: old → new' for every value that differs between two settings, by dotted keys."""
    found: List[str] = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key, "not set"), now.get(key, "not set")
        if isinstance(old, dict) and isinstance(new, dict):
            found += changes(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key}: {old} → {new}")
    return found
