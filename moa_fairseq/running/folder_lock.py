"""One run at a time in a folder."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Callable, Iterator, List, Optional

from moa_fairseq.errors import UserError
from moa_fairseq.files import disk_errors

PATIENCE_SECONDS = 5.0
log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(
    folder: Path, patience: float = PATIENCE_SECONDS, say: Optional[Callable[[str], None]] = None
) -> Iterator[List[int]]:
    """Hold the folder's lock; yields the file descriptors that children must inherit to hold it too.

    patience: seconds to wait for another holder; say: is told once that there is one (else it is logged).
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
            (say or log.info)(f"{holder}; waiting for it to finish")
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
