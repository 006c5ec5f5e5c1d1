"""Checkpoint files: read as data and only when they are whole, written whole or not at all."""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import re
import shutil
import time
import types
import zipfile
from pathlib import Path
from typing import IO, Any, Callable, Optional, Union

import torch

from moa_fairseq.errors import UserError
from moa_fairseq.fairseq_patches.foreign_settings import forget_outputs
from moa_fairseq.fairseq_patches.malformed_checkpoints import check_checkpoint
from moa_fairseq.files import atomic_write, refuse_irregular

logger = logging.getLogger(__name__)

ALLOWED_TYPES = (argparse.Namespace,)
ATTEMPTS = 3
SECONDS_BETWEEN = 2.5  # fairseq's own patience with a disk
_CHUNK = 1 << 20  # bytes
_BYTEARRAY = b"\nbytearray\n"  # as a pickle names it
_GLOBAL_PATTERN = re.compile(r"GLOBAL ([\w.]+)")


def load_checkpoint(path: Union[str, Path], map_location: str = "cpu") -> Any:
    """Load a fairseq checkpoint; only tensors, plain containers and ALLOWED_TYPES may be in it.

    Raises UserError if the file is missing, not a regular file, truncated or changed since it was written. If
    it holds anything else, the error names the offending type, and none of its code was run.
    """
    if not os.path.lexists(path):
        raise UserError(f"Checkpoint {path} does not exist: check the path, or train first.")
    refuse_irregular(path)
    return SafeTorch(check_checkpoint).load(path, map_location)


def _safe_load(stream: IO[bytes], name: str, **options: Any) -> Any:
    options.pop("weights_only", None)
    try:
        check_sums(stream)
        # torch's own reader takes a `bytearray` for data, and makes it as large as ten bytes of a file say.
        start, end = stream.tell(), b""
        while chunk := stream.read(_CHUNK):
            if _BYTEARRAY in end + chunk:
                raise pickle.UnpicklingError("GLOBAL builtins.bytearray")
            end = chunk[-len(_BYTEARRAY) :]
        stream.seek(start)
        if hasattr(torch.serialization, "safe_globals"):
            with torch.serialization.safe_globals(list(ALLOWED_TYPES)):
                state = torch.load(stream, weights_only=True, **options)
        else:
            state = torch.load(stream, pickle_module=restricted_pickle(), **options)
        return forget_outputs(state)
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            found = _GLOBAL_PATTERN.search(str(error))
            offender = found.group(1) if found else str(error).splitlines()[0]
            raise UserError(
                f"Checkpoint {name} was refused: it holds {offender}, and a fairseq checkpoint needs only "
                "tensors, plain containers and argparse.Namespace. Loading it could run the code of whoever "
                "wrote it; nothing was run. Use a checkpoint from a source that you trust and that was saved "
                "by fairseq."
            ) from error
        raise _damaged(name, "torch.save did not write it") from error
    except Exception as error:  # torch's reader lets any through, such as struct.error and IndexError
        raise _damaged(name, _first_sentence(error)) from error


def check_sums(stream: IO[bytes]) -> None:
    """Read a checkpoint once and compare what it holds with the checksums that torch wrote with it.

    torch itself does not compare them, so a byte that changed on the disk would become a wrong weight. Leaves
    the stream where it was. Files older than torch 1.6 have no checksums and pass. Raises BadZipFile, and
    before anything is unpacked if parts are compressed or together larger than the file: torch writes none
    of these, and they could fill the memory.
    """
    start = stream.tell()
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            parts = archive.infolist()
            packed = any(part.compress_type != zipfile.ZIP_STORED for part in parts)
            if packed or sum(part.file_size for part in parts) > stream.seek(0, os.SEEK_END):
                raise zipfile.BadZipFile("its parts are compressed or overlap, which torch.save never does")
            for part in parts:
                if part.CRC == 0:  # torch.serialization.set_crc32_options(False): none was written
                    continue
                with archive.open(part) as content:
                    while content.read(_CHUNK):
                        pass
    stream.seek(start)


def _first_sentence(error: Exception) -> str:
    """What happened, without the advice that torch adds, such as to switch safety off."""
    message = re.sub(r"^\[enforce fail at [^]]*\][ .]*", "", str(error))  # a place in torch's source
    return re.split(r"[.\n]", message)[0] or type(error).__name__


def _damaged(name: str, reason: str) -> UserError:
    return UserError(
        f"Checkpoint {name} cannot be read ({reason}): the file is truncated, was changed on the disk, or is "
        "not a checkpoint. Copy it again, or resume from an older one (for example with --restore-file "
        "checkpointN.pt)."
    )


def restricted_pickle() -> types.ModuleType:
    """A pickle module that finds only what a checkpoint needs, for torch older than 2.4.

    Those versions have no public allow-list for `weights_only=True`.
    """
    allowed = {(t.__module__, t.__qualname__): t for t in ALLOWED_TYPES}
    tensor_parts = {
        ("collections", "OrderedDict"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_parameter"),
    }

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in allowed:
                return allowed[module, name]
            is_storage = module == "torch" and (name.endswith("Storage") or name.endswith("Tensor"))
            if (module, name) in tensor_parts or is_storage:
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not allowed")

    module = types.ModuleType("moa_fairseq_restricted_pickle")
    vars(module).update(
        Unpickler=Unpickler,
        load=lambda stream, **options: Unpickler(stream, **options).load(),
        UnpicklingError=pickle.UnpicklingError,
        HIGHEST_PROTOCOL=pickle.HIGHEST_PROTOCOL,
    )
    return module


class SafeTorch(types.ModuleType):
    """Stands for torch in fairseq's code that loads files: only `load` differs.

    check(what was loaded, name, size of the file in bytes) raises where it is not what it should be.
    """

    def __init__(self, check: Callable[[Any, str, int], None] = lambda state, name, size: None):
        super().__init__("torch")
        self.check = check

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def load(self, source: Any, map_location: Optional[Any] = None, **options: Any) -> Any:
        """torch.load, of data alone: see `load_checkpoint`."""
        if isinstance(source, (str, os.PathLike)):
            refuse_irregular(Path(source))
            with open(source, "rb") as stream:
                return self.load(stream, map_location, **options)
        name = str(getattr(source, "name", source))
        state = _safe_load(source, name, map_location=map_location, **options)
        self.check(state, name, source.seek(0, os.SEEK_END))
        return state


def load_regular_files(load: Callable, path: str, *args: Any, **options: Any) -> Any:
    """`load_checkpoint_to_cpu` opens whatever stands at the path."""
    refuse_irregular(path)
    return load(path, *args, **options)


def resume_from_regular_files(load: Callable, trainer: Any, filename: str, *args: Any, **options: Any) -> Any:
    """The trainer starts a new training if it finds anything but a file."""
    refuse_irregular(filename)
    return load(trainer, filename, *args, **options)


def save_checkpoint(state: Any, filename: Union[str, Path], temporary: Optional[str] = None) -> None:
    """Write a checkpoint under a temporary name; rename it once it is checked and on the disk.

    temporary: that name, which is overwritten, for a training that saves again and again; by default a new
    one, so that no file of the user's is. Raises UserError when the third attempt fails; an earlier file of
    that name is then still there.
    """
    _write_checked(filename, lambda stream: torch.save(state, stream), temporary)


def save_whole(save: Callable, state: Any, filename: str, async_write: bool = False) -> None:
    """`save_checkpoint` for paths of this machine."""
    if _is_remote(filename):
        return save(state, filename, async_write)
    return save_checkpoint(state, filename, f"{filename}.tmp")


def copy_whole(copy: Callable, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """Makes `checkpoint_best.pt` and `checkpoint_last.pt`."""
    if _is_remote(src_path) or _is_remote(dst_path):
        return copy(src_path, dst_path, overwrite)

    def write(stream: IO[bytes]) -> None:
        with open(src_path, "rb") as original:
            shutil.copyfileobj(original, stream, _CHUNK)

    _write_checked(dst_path, write, f"{dst_path}.tmp", os.path.getsize(src_path))
    return True


def _is_remote(path: str) -> bool:
    """Whether iopath handles this path (s3://…), where nothing can be renamed."""
    from fairseq.file_io import PathManager

    return PathManager.path_requires_pathmanager(path)


def _write_checked(
    filename: Union[str, Path],
    write: Callable[[IO[bytes]], None],
    temporary: Optional[str],
    size: Optional[int] = None,
) -> None:
    """Try to write a checkpoint, whole or not at all; size: how many bytes it must have, where known."""

    def check(written: str) -> None:
        if size is not None and os.path.getsize(written) != size:
            raise OSError(f"{os.path.getsize(written)} of {size} bytes were written")
        with open(written, "rb") as stream:
            check_sums(stream)

    for attempt in range(1, ATTEMPTS + 1):
        try:
            with atomic_write(filename, "wb", temporary=temporary, check=check) as stream:
                write(stream)
            return
        except (OSError, RuntimeError, zipfile.BadZipFile, UserError) as error:
            reason = str(error) if isinstance(error, UserError) else _first_sentence(error)
            if attempt == ATTEMPTS:
                raise UserError(
                    f"{filename} could not be written ({reason.rstrip('.')}): is the disk full? Earlier "
                    f"checkpoints are whole; free some space and start the same training again."
                ) from error
            logger.warning(f"{filename} could not be written ({reason}); trying again")
            time.sleep(SECONDS_BETWEEN)


def save_at_once(save: Callable, cfg: Any, *args: Any, **options: Any) -> Any:
    """Asynchronous writing is not safe, and makes no copies."""
    if cfg.write_checkpoints_asynchronously:
        logger.warning(
            "--write-checkpoints-asynchronously is ignored: it writes under the final name, where an "
            "interrupted training would leave half a checkpoint, and it leaves checkpoint_last.pt out"
        )
        cfg.write_checkpoints_asynchronously = False
    return save(cfg, *args, **options)
