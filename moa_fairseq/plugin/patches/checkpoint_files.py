"""Checkpoint files: read as data and only when they are whole, written whole or not at all."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import pickle
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from moa_fairseq.errors import UserError
from moa_fairseq.files import DISK_FULL, atomic_write, refuse_irregular, remove_leftovers
from moa_fairseq.plugin.patches.foreign_settings import forget_outputs
from moa_fairseq.plugin.patches.malformed_checkpoints import check_checkpoint, check_weights
from moa_fairseq.plugin.patches.saved_numbers import numpy_stand_ins, plain
from moa_fairseq.plugin.patches.table import Proxy, made_of, patch

logger = logging.getLogger(__name__)

ALLOWED_TYPES = (argparse.Namespace,)
ATTEMPTS = 3
SECONDS_BETWEEN = 2.5  # fairseq's own patience with a disk
CRASH = "crash.pt"  # what fairseq saves of a training that ends in an error, to be looked into
AFTER_DIVERGENCE = (
    "Start in another --save-dir, anew or from a checkpoint of before (--finetune-from-model FILE; in a "
    "recipe train.flags.finetune-from-model), with a lower learning rate (--lr; of MAE's gates --gate-lr) or "
    "clipped gradients (--clip-norm; of MAE's gates --gate-clip-norm). If that ends so, too, take an older "
    f"one; {CRASH} is what failed."
)
_CHUNK = 1 << 20  # bytes
_OF_DAMAGE = (None, errno.EINVAL)
_BYTEARRAY = b"\nbytearray\n"  # as a pickle names it
_GLOBAL_PATTERN = re.compile(r"GLOBAL ([\w.]+)")
_TESTS = "plugin/patches/test_checkpoint_files.py::"


def load_checkpoint(path: str | Path, map_location: str = "cpu") -> Any:
    """Load a fairseq checkpoint; only tensors, plain containers and ALLOWED_TYPES may be in it.

    Args:
        path: of the file.
        map_location: the device of the tensors, as torch.load takes it.

    Raises:
        UserError: if the file is missing, not a regular file, truncated, changed since it was written, or
            none that fairseq can have saved (`check_checkpoint`). If it holds anything else, the error names
            the offending type, and none of its code was run.
    """
    if not os.path.lexists(path):
        raise UserError(f"Checkpoint {path} does not exist: check the path, or train first.")
    refuse_irregular(path)
    return CheckpointTorch(torch).load(path, map_location)


def _safe_load(stream: IO[bytes], name: str, **options: Any) -> Any:
    options.pop("weights_only", None)
    try:
        check_sums(stream)
        # torch's own reader takes a `bytearray` for data, and makes it as large as ten bytes of a file say.
        start = stream.tell()
        end = b""
        while chunk := stream.read(_CHUNK):
            if _BYTEARRAY in end + chunk:
                raise pickle.UnpicklingError("GLOBAL builtins.bytearray")
            end = chunk[-len(_BYTEARRAY) :]
        stream.seek(start)
        return forget_outputs(_load_plain(stream, **options))
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            raise UserError(
                f"Checkpoint {name} was refused: it holds {_offender(error)}, but a fairseq checkpoint needs "
                "only tensors, plain containers and argparse.Namespace. Loading it could run its author's "
                "code; nothing was run. Use a checkpoint saved by fairseq, from a source that you trust."
            ) from error
        raise _damaged(name, "torch.save did not write it") from error
    # torch's reader lets any through, such as struct.error and IndexError
    except Exception as error:
        # damaged bytes may ask for a seek to nowhere (EINVAL); too many open files, say, is no damage
        if isinstance(error, MemoryError) or (
            isinstance(error, OSError) and error.errno not in _OF_DAMAGE
        ):
            raise
        raise _damaged(name, _first_sentence(error)) from error


def _load_plain(source: Any, **options: Any) -> Any:
    with torch.serialization.safe_globals([*ALLOWED_TYPES, *numpy_stand_ins()]):
        return torch.load(source, weights_only=True, **options)


def _offender(error: pickle.UnpicklingError) -> str:
    """The name of what torch's reader refused."""
    match = _GLOBAL_PATTERN.search(str(error))
    if match:
        return match.group(1)
    return str(error).splitlines()[0]


def check_sums(stream: IO[bytes]) -> None:
    """Read a checkpoint once and compare what it holds with the checksums that torch wrote with it.

    torch itself does not compare them, so a byte that changed on the disk would become a wrong weight. Files
    older than torch 1.6 have no checksums and pass.

    Args:
        stream: of the file's bytes; it is left where it was.

    Raises:
        zipfile.BadZipFile: for other checksums; before anything is unpacked if parts are compressed or
            together larger than the file: torch writes none of these, and they could fill the memory.
    """
    start = stream.tell()
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            parts = archive.infolist()
            packed = any(part.compress_type != zipfile.ZIP_STORED for part in parts)
            if packed or sum(part.file_size for part in parts) > stream.seek(0, os.SEEK_END):
                raise zipfile.BadZipFile(
                    "its members are compressed or overlap, which torch.save never writes"
                )
            for part in parts:
                if part.CRC == 0:  # torch.serialization.set_crc32_options(False): none was written
                    continue
                with archive.open(part) as content:
                    while content.read(_CHUNK):
                        pass
    stream.seek(start)


def _first_sentence(error: Exception) -> str:
    """What happened, without the advice that torch adds, such as to switch safety off."""
    # A place in torch's source
    message = re.sub(r"^\[enforce fail at [^]]*\][ .]*", "", str(error))
    return re.split(r"[.\n]", message)[0] or type(error).__name__


def _damaged(name: str, reason: str) -> UserError:
    return UserError(
        f"Checkpoint {name} cannot be read ({reason}): the file is truncated, was changed on the disk, or is "
        "not a checkpoint. Copy it again, or resume from an older one (for example with --restore-file "
        "checkpointN.pt)."
    )


@patch(
    "fairseq.data.codedataset, fairseq.models.speech_to_text.xm_transformer, "
    "fairseq.models.text_to_speech.vocoder, fairseq.modules.quantization.pq.em:torch",
    "plugin/patches/test_planted_checkpoints.py::test_a_planted_checkpoint_does_nothing",
    made_of,
)
class SafeTorch(Proxy):
    """These load a further file with torch, which a checkpoint's settings name."""

    def check(self, state: Any, name: str, size: int) -> None:
        """Raise where what was loaded from a file of `size` bytes is not what it should be.

        Args:
            state: what was loaded.
            name: of the file, for the message.
            size: of the file, in bytes.
        """

    def load(self, source: Any, map_location: Any | None = None, **options: Any) -> Any:
        """torch.load, of data alone: see `load_checkpoint`.

        Args:
            source: a path, or a stream of bytes that can be sought.
            map_location: as torch.load takes it.
            options: of torch.load; `weights_only` is ignored.

        Raises:
            UserError: for what is not a whole, regular file of data alone, or not what `check` wants.
        """
        if isinstance(source, (str, os.PathLike)):
            refuse_irregular(Path(source))
            with open(source, "rb") as stream:
                return self.load(stream, map_location, **options)
        name = str(getattr(source, "name", source))
        state = _safe_load(source, name, map_location=map_location, **options)
        self.check(state, name, source.seek(0, os.SEEK_END))
        return state


@patch(
    "fairseq.checkpoint_utils:torch",
    "plugin/test_fairseq_compat.py::test_fairseqs_own_loader_cannot_be_told_to_switch_safety_off",
    made_of,
)
class CheckpointTorch(SafeTorch):
    """A checkpoint is a pickle, which can run any code: only tensors, containers and argparse.Namespace are
    loaded, and checksums are compared.
    """

    check = staticmethod(check_checkpoint)


def save_checkpoint(state: Any, filename: str | Path, temporary: str | None = None) -> None:
    """Write a checkpoint under a temporary name; rename it once it is checked and on the disk.

    Args:
        state: what is to be saved; NumPy's numbers in it become plain ones.
        filename: the final name.
        temporary: that name, which is overwritten, for a training that saves again and again; by default a
            new one, so that no file of the user's is.

    Raises:
        UserError: for what could not be loaded again, and when the third attempt fails; an earlier file of
            that name is then still there.
    """
    state = plain(state)

    def read(written: str) -> None:
        _load_plain(written, map_location="cpu", mmap=True)

    try:
        _write_checked(filename, lambda stream: torch.save(state, stream), temporary, read)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{filename} was not written: the state of this training holds {_offender(error)}, which could "
            "not be loaded again: a checkpoint may contain only tensors, plain containers and "
            "argparse.Namespace. Let the task, criterion or optimizer save only these."
        ) from error


@patch(
    "fairseq.checkpoint_utils:torch_persistent_save",
    f"{_TESTS}test_a_disk_that_is_full_for_a_moment",
)
def save_whole(save: Callable, state: Any, filename: str, async_write: bool = False) -> None:
    """fairseq renames a new checkpoint without checking it or waiting for the disk; if writing fails, its
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
    # of killed trainings, which may have been at a checkpoint that is not written again
    remove_leftovers(Path(filename).parent, "checkpoint*.pt.tmp")
    return save_checkpoint(state, filename, f"{filename}.tmp")


@patch("fairseq.file_io:PathManager.copy", f"{_TESTS}test_a_fault_while_a_checkpoint_is_copied")
def copy_whole(copy: Callable, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """fairseq overwrites checkpoint_last.pt and checkpoint_best.pt in place: a full disk or a kill at that
    moment would leave half a checkpoint to resume from.

    Raises:
        UserError: when the third attempt fails; an earlier file of that name is then still there.
    """
    if _is_remote(src_path) or _is_remote(dst_path):
        return copy(src_path, dst_path, overwrite)

    def write(stream: IO[bytes]) -> None:
        with open(src_path, "rb") as original:
            shutil.copyfileobj(original, stream, _CHUNK)

    def compare(written: str) -> None:
        if os.path.getsize(written) != os.path.getsize(src_path):
            raise OSError(
                f"{os.path.getsize(written)} of {os.path.getsize(src_path)} bytes were written"
            )

    _write_checked(dst_path, write, f"{dst_path}.tmp", compare)
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
        # torch's writer has RuntimeErrors for a full disk, the check all kinds for what it reads back
        except (OSError, RuntimeError, zipfile.BadZipFile, UserError) as error:
            if isinstance(error, UserError):
                cause = error.__cause__
                # Time does not help
                if isinstance(cause, OSError) and cause.errno not in DISK_FULL:
                    raise
                reason = str(error)
            else:
                reason = _first_sentence(error)
            if attempt == ATTEMPTS:
                raise UserError(
                    f"{filename} could not be written ({reason.rstrip('.')}): is the disk full, or has the "
                    "shell a limit for files (ulimit -f)? Earlier checkpoints are intact: make room and run "
                    "the same command again."
                ) from error
            logger.warning(f"{filename} could not be written ({reason}); trying again")
            time.sleep(SECONDS_BETWEEN)


@patch(
    "fairseq.checkpoint_utils:save_checkpoint", f"{_TESTS}test_asynchronous_writing_is_taken_back"
)
def save_at_once(save: Callable, cfg: Any, *args: Any, **options: Any) -> Any:
    """Asynchronous writing writes under the final name, and never writes checkpoint_last.pt."""
    if getattr(cfg, "write_checkpoints_asynchronously", False):  # a caller may have fewer settings
        logger.warning(
            "--write-checkpoints-asynchronously is ignored: it writes directly to the final name, so that "
            "an interrupted training leaves half a checkpoint, and it never writes checkpoint_last.pt"
        )
        cfg.write_checkpoints_asynchronously = False
    return save(cfg, *args, **options)
