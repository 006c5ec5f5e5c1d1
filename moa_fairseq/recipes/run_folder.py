"""The run folder: what it remembers (state.json), its lock, and which of its checkpoints are whole."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

from moa_fairseq.data_prep.stage_folder import disk_errors
from moa_fairseq.errors import UserError
from moa_fairseq.fairseq_patches.checkpoint_files import check_sums
from moa_fairseq.files import atomic_write

PATIENCE_SECONDS = 5.0
_EPOCH_CHECKPOINT = re.compile(r"checkpoint(\d+)\.pt")
_UPDATE_CHECKPOINT = re.compile(r"checkpoint_\d+_(\d+)\.pt")


def trained_checkpoint(folder: Path) -> Path:
    """What a run folder stands for: its averaged checkpoint, else its best; average.pt where neither is."""
    average, best = folder / "average.pt", folder / "checkpoints" / "checkpoint_best.pt"
    return best if best.is_file() and not average.is_file() else average


class RunState:
    """`state.json`: one entry per stage with the fingerprint of what it was made from."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.json"
        try:
            self.entries: Dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.entries = {}
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.path} cannot be read ({error}). Delete that one file; whole results are then "
                "made again from the checkpoints."
            ) from error
        if not isinstance(self.entries, dict) or not all(
            isinstance(entry, dict) for entry in self.entries.values()
        ):
            raise UserError(
                f"{self.path} is damaged: it must hold one mapping per stage. Delete that one file, or use "
                "--restart to move the run folder aside and start again."
            )

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


@contextlib.contextmanager
def locked(
    folder: Path, patience: float = PATIENCE_SECONDS, say: Optional[Callable[[str], None]] = None
) -> Iterator[List[int]]:
    """Hold the folder's lock; yields the file descriptors that children must inherit to hold it too.

    patience: seconds to wait for another holder; say: is told once that there is one.
    Raises UserError when another run, or a child that outlived one, works in the folder.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield []
        return
    with open(folder / ".lock", "r+", encoding="utf-8") as stream:

        def attempt() -> None:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)

        if not _acquired(attempt, 0):
            holder = f"Another run is at work in {folder} (process {stream.read().strip() or '?'})"
            if say:
                say(f"{holder}; waiting for it to finish")
            if not _acquired(attempt, patience):
                raise UserError(f"{holder}. Wait for it, stop it, or use another --save-dir.")
        with disk_errors(folder):
            os.ftruncate(stream.fileno(), 0)
            os.pwrite(stream.fileno(), str(os.getpid()).encode(), 0)
        yield [stream.fileno()]


def _acquired(attempt: Callable[[], None], patience: float) -> bool:
    """Try for `patience` seconds: children of a run that was just killed take a moment to go."""
    deadline = time.monotonic() + patience
    while True:
        try:
            attempt()
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)


def epoch_checkpoints(folder: Path) -> List[Path]:
    """checkpointN.pt files, oldest epoch first."""
    return _numbered(folder, _EPOCH_CHECKPOINT)


def update_checkpoints(folder: Path) -> List[Path]:
    """checkpoint_EPOCH_UPDATES.pt files, fewest updates first."""
    return _numbered(folder, _UPDATE_CHECKPOINT)


def _numbered(folder: Path, pattern: re.Pattern) -> List[Path]:
    found = [
        (int(match.group(1)), path)
        for path in folder.glob("checkpoint*.pt")
        if (match := pattern.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


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


def checkpoint_to_resume(folder: Path, say: Callable[[str], None] = print) -> Optional[Path]:
    """checkpoint_last.pt, or the newest readable checkpoint where a crash or a disk damaged the last one.

    say: is told of every damaged one that was passed over. None when training has to start from the
    beginning. Raises UserError when there are checkpoints but none is readable.
    """
    last = folder / "checkpoint_last.pt"
    numbered = [*epoch_checkpoints(folder), *update_checkpoints(folder)]
    numbered.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    candidates = [last, *numbered, folder / "checkpoint_best.pt"]
    candidates = [path for path in candidates if path.exists()]
    for path in candidates:
        if is_readable(path):
            return path
        say(f"{path} is damaged (cut off, or changed on the disk): looking for an older checkpoint")
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
