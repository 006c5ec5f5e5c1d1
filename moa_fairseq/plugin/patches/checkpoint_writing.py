"""Checkpoint files are written whole or not at all."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from moa_fairseq.errors import UserError
from moa_fairseq.files import DISK_FULL, atomic_write, remove_leftovers
from moa_fairseq.plugin.patches.checkpoint_content import check_weights
from moa_fairseq.plugin.patches.checkpoint_reading import (
    check_sums,
    first_sentence,
    load_plain,
    refused_type,
)
from moa_fairseq.plugin.patches.saved_numbers import plain
from moa_fairseq.plugin.patches.table import patch

logger = logging.getLogger(__name__)

ATTEMPTS = 3
SECONDS_BETWEEN = 2.5  # between two attempts, as fairseq waits for a disk
CRASH = "crash.pt"  # fairseq saves the state of a training that ends in an error, for inspection
AFTER_DIVERGENCE = (
    "Start in another --save-dir, anew or from a checkpoint of before (--finetune-from-model FILE; in a "
    "recipe train.flags.finetune-from-model), with a lower learning rate (--lr; of MAE's gates --gate-lr) or "
    "clipped gradients (--clip-norm; of MAE's gates --gate-clip-norm). If that ends so, too, take an older "
    f"one; {CRASH} is what failed."
)
_TESTS = "plugin/patches/test_checkpoint_writing.py::"


def save_checkpoint(state: Any, filename: str | Path, temporary: str | None = None) -> None:
    """Write a checkpoint under a temporary name; rename it once it is checked and on the disk.

    Args:
        state: the content of the checkpoint; NumPy's numbers in it become plain ones.
        filename: the final name.
        temporary: the temporary name, for a training that saves again and again; a file of that name is
            overwritten. By default a new name, so that no file of the user's is overwritten.

    Raises:
        UserError: if the state could not be loaded again, or the third attempt to write it fails; an earlier
            file named `filename` is then still there.
    """
    state = plain(state)

    def read(written: str) -> None:
        load_plain(written, map_location="cpu", mmap=True)

    try:
        _write_checked(filename, lambda stream: torch.save(state, stream), temporary, read)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{filename} was not written: the state of this training holds {refused_type(error)}, which "
            "could not be loaded again: a checkpoint may contain only tensors, plain containers and "
            "argparse.Namespace. Let the task, criterion or optimizer save only these."
        ) from error


@patch(
    "fairseq.checkpoint_utils:torch_persistent_save",
    f"{_TESTS}test_a_disk_that_is_full_for_a_moment",
)
def save_whole(save: Callable, state: Any, filename: str, async_write: bool = False) -> None:
    """Write a training's checkpoint with `save_checkpoint`, if its weights are finite.

    fairseq renames a new checkpoint without checking it or waiting for the disk; if writing fails, its
    second attempt appends to the first; and diverged weights replace good weights.

    Raises:
        UserError: for weights that are not finite, except in crash.pt, and as `save_checkpoint`.
    """
    if os.path.basename(filename) != CRASH:
        check_weights(
            state.get("model", {}),
            f"{filename} was not written, because the model holds",
            AFTER_DIVERGENCE,
        )
    if _is_remote(filename):
        return save(state, filename, async_write)
    # Trainings that were killed leave files under names of checkpoints that may not be written again.
    remove_leftovers(Path(filename).parent, "checkpoint*.pt.tmp")
    return save_checkpoint(state, filename, f"{filename}.tmp")


@patch("fairseq.file_io:PathManager.copy", f"{_TESTS}test_a_fault_while_a_checkpoint_is_copied")
def copy_whole(copy: Callable, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """Copy a checkpoint to a temporary name, and rename the copy.

    fairseq overwrites checkpoint_last.pt and checkpoint_best.pt in place: a full disk or a kill at that
    moment would leave half a checkpoint to resume from.

    Raises:
        UserError: if the third attempt fails; an earlier file named `dst_path` is then still there.
    """
    if _is_remote(src_path) or _is_remote(dst_path):
        return copy(src_path, dst_path, overwrite)

    def write(stream: IO[bytes]) -> None:
        with open(src_path, "rb") as original:
            shutil.copyfileobj(original, stream)

    def compare_sizes(written: str) -> None:
        if os.path.getsize(written) != os.path.getsize(src_path):
            raise OSError(
                f"{os.path.getsize(written)} of {os.path.getsize(src_path)} bytes were written"
            )

    _write_checked(dst_path, write, f"{dst_path}.tmp", compare_sizes)
    return True


def _is_remote(path: str) -> bool:
    """Whether iopath handles this path (s3://…), where nothing can be renamed."""
    from fairseq.file_io import PathManager

    return PathManager.path_requires_pathmanager(path)


def _write_checked(
    filename: str | Path,
    write: Callable[[IO[bytes]], None],
    temporary: str | None,
    check_content: Callable[[str], None],
) -> None:
    """Try to write a checkpoint, whole or not at all; check_content raises if the written file is wrong."""

    def check(written: str) -> None:
        with open(written, "rb") as stream:
            check_sums(stream)
        check_content(written)

    for attempt in range(1, ATTEMPTS + 1):
        try:
            with atomic_write(filename, "wb", temporary=temporary, check=check) as stream:
                write(stream)
            return
        # torch's writer raises RuntimeErrors for a full disk; the check raises the errors of a damaged file.
        except (OSError, RuntimeError, zipfile.BadZipFile, UserError) as error:
            if _is_permanent(error):
                raise
            reason = str(error) if isinstance(error, UserError) else first_sentence(error)
            if attempt == ATTEMPTS:
                raise UserError(
                    f"{filename} could not be written ({reason.rstrip('.')}): is the disk full, or has the "
                    "shell a limit for files (ulimit -f)? Earlier checkpoints are intact: make room and run "
                    "the same command again."
                ) from error
            logger.warning(f"{filename} could not be written ({reason}); trying again")
            time.sleep(SECONDS_BETWEEN)


def _is_permanent(error: Exception) -> bool:
    """Whether a further attempt must fail, too: the system refused to write, and the disk is not full."""
    cause = error.__cause__  # `atomic_write` raises a UserError from the system's error
    return (
        isinstance(error, UserError) and isinstance(cause, OSError) and cause.errno not in DISK_FULL
    )


@patch(
    "fairseq.checkpoint_utils:save_checkpoint", f"{_TESTS}test_asynchronous_writing_is_taken_back"
)
def save_at_once(save: Callable, cfg: Any, *args: Any, **options: Any) -> Any:
    """Ignore --write-checkpoints-asynchronously, with a warning.

    Asynchronous writing writes under the final name, and never writes checkpoint_last.pt.
    """
    if getattr(cfg, "write_checkpoints_asynchronously", False):  # a caller may have fewer settings
        logger.warning(
            "--write-checkpoints-asynchronously is ignored: it writes directly to the final name, so that "
            "an interrupted training leaves half a checkpoint, and it never writes checkpoint_last.pt"
        )
        cfg.write_checkpoints_asynchronously = False
    return save(cfg, *args, **options)
