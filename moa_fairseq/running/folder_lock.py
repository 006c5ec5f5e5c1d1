"""One run at a time in a folder."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import IO, Dict, Iterator, List

import portalocker

from moa_fairseq.errors import UserError
from moa_fairseq.files import disk_errors, refuse_link

PATIENCE_SECONDS = 5.0
_held: Dict[Path, IO[str]] = {}
log = logging.getLogger(__name__)


def held_locks() -> List[int]:
    """File descriptors of the locks that this program holds: a child that inherits them holds them, too."""
    return [stream.fileno() for stream in _held.values()]


@contextlib.contextmanager
def locked(folder: Path, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold the folder's lock; inside of a block that holds it already, nothing more happens.

    patience: seconds to wait for another holder: children of a run that was just killed take a moment to go.
    Raises UserError when another run, or a child that outlived one, works in the folder.
    """
    file, key = folder / ".lock", folder.resolve()
    if key in _held:
        yield
        return
    refuse_link(file)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    lock = portalocker.Lock(file, "r+", timeout=patience, check_interval=0.1)
    try:
        stream = lock.acquire(fail_when_locked=True)
    except portalocker.AlreadyLocked:
        holder = f"Another run is at work in {folder} (process {file.read_text('utf-8').strip() or '?'})"
        log.info("%s; waiting for it to finish", holder)
        try:
            stream = lock.acquire(fail_when_locked=False)
        except portalocker.LockException as error:
            raise UserError(f"{holder}. Wait for it, stop it, or use another --save-dir.") from error
    with stream:  # closed, and not unlocked: a child that is still at work keeps the lock
        _held[key] = stream
        try:
            with disk_errors(folder):
                os.ftruncate(stream.fileno(), 0)
                os.pwrite(stream.fileno(), str(os.getpid()).encode(), 0)
            yield
        finally:
            del _held[key]
