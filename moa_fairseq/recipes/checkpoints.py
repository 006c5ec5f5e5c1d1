"""Which of a run folder's checkpoints are whole, and which one training goes on from."""

from __future__ import annotations

import logging
import zipfile
import zlib
from pathlib import Path
from typing import Optional

from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.average import numbered_checkpoints
from moa_fairseq.fairseq_patches.checkpoint_files import check_sums

LAST = "checkpoint_last.pt"
log = logging.getLogger(__name__)


def trained_checkpoint(folder: Path) -> Path:
    """What a run folder stands for: its averaged checkpoint, else its best; average.pt where neither is."""
    average, best = folder / "average.pt", folder / "checkpoints" / "checkpoint_best.pt"
    return best if best.is_file() and not average.is_file() else average


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
    numbered = [path for kind in (False, True) for _, path in numbered_checkpoints(folder, by_updates=kind)]
    numbered.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    candidates = [folder / LAST, *numbered, folder / "checkpoint_best.pt"]
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
