"""Checkpoint files are read as data: whole files only, and without running code that they may hold."""

from __future__ import annotations

import argparse
import errno
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from moa_fairseq.errors import UserError
from moa_fairseq.files import refuse_irregular
from moa_fairseq.plugin.patches.checkpoint_content import check_checkpoint
from moa_fairseq.plugin.patches.foreign_settings import forget_outputs
from moa_fairseq.plugin.patches.saved_numbers import numpy_stand_ins
from moa_fairseq.plugin.patches.table import Proxy, made_of, patch

ALLOWED_TYPES = (argparse.Namespace,)
_CHUNK = 1 << 20  # bytes in memory at once
_BYTEARRAY = b"\nbytearray\n"  # the line of a pickle that names the type
_REFUSED_TYPE = re.compile(r"GLOBAL ([\w.]+)")  # in an error of torch's reader


def load_checkpoint(path: str | Path, map_location: str = "cpu") -> Any:
    """Load a fairseq checkpoint; only tensors, plain containers and ALLOWED_TYPES may be in it.

    Args:
        path: the checkpoint file.
        map_location: the device of the tensors, as torch.load takes it.

    Raises:
        UserError: if the file is missing, not a regular file, truncated, changed since it was written, or
            cannot have been saved by fairseq (`check_checkpoint`). If it holds an object of another type, the
            error names the type; code of the file never runs.
    """
    if not os.path.lexists(path):
        raise UserError(f"Checkpoint {path} does not exist: check the path, or train first.")
    return CheckpointTorch(torch).load(path, map_location)


@patch(
    "fairseq.data.codedataset, fairseq.models.speech_to_text.xm_transformer, "
    "fairseq.models.text_to_speech.vocoder, fairseq.modules.quantization.pq.em:torch",
    "plugin/patches/test_planted_checkpoints.py::test_a_planted_checkpoint_does_nothing",
    made_of,
)
class SafeTorch(Proxy):
    """torch, whose `load` reads data alone.

    These modules load a further file with torch, which a checkpoint's settings name.
    """

    def load(self, source: Any, map_location: Any | None = None, **options: Any) -> Any:
        """torch.load of data alone.

        Args:
            source: a path, or a stream of bytes that can be sought.
            map_location: as torch.load takes it.
            options: other arguments of torch.load; `weights_only` is ignored.

        Raises:
            UserError: if the file is damaged or not regular, or holds an object of a type not allowed.
        """
        return _load(source, None, map_location=map_location, **options)


@patch(
    "fairseq.checkpoint_utils:torch",
    "plugin/test_fairseq_compat.py::test_fairseqs_own_loader_cannot_be_told_to_switch_safety_off",
    made_of,
)
class CheckpointTorch(Proxy):
    """torch, whose `load` reads checkpoints of fairseq alone.

    A checkpoint is a pickle, which can run any code: only tensors, containers and argparse.Namespace are
    loaded, and checksums are compared.
    """

    def load(self, source: Any, map_location: Any | None = None, **options: Any) -> Any:
        """As `SafeTorch.load`, for a checkpoint.

        Raises:
            UserError: in the cases of `SafeTorch.load`, and for content that fairseq cannot have saved.
        """
        return _load(source, check_checkpoint, map_location=map_location, **options)


def _load(
    source: Any, check_content: Callable[[Any, str, int], None] | None, **options: Any
) -> Any:
    """torch.load of data alone; check_content(state, name of the file, its bytes) may raise a UserError."""
    if isinstance(source, (str, os.PathLike)):
        refuse_irregular(Path(source))
        with open(source, "rb") as stream:
            return _load(stream, check_content, **options)
    name = str(getattr(source, "name", source))
    state = _load_stream(source, name, **options)
    if check_content is not None:
        check_content(state, name, source.seek(0, os.SEEK_END))
    return state


def _load_stream(stream: IO[bytes], name: str, **options: Any) -> Any:
    options.pop("weights_only", None)
    try:
        check_sums(stream)
        _refuse_bytearray(stream)
        return forget_outputs(load_plain(stream, **options))
    except pickle.UnpicklingError as error:
        if "GLOBAL" not in str(error):
            raise _damaged(name, "torch.save did not write it") from error
        raise UserError(
            f"Checkpoint {name} was refused: it holds {refused_type(error)}, but a fairseq checkpoint needs "
            "only tensors, plain containers and argparse.Namespace. Loading it could run its author's "
            "code; nothing was run. Use a checkpoint saved by fairseq, from a source that you trust."
        ) from error
    # torch's reader lets errors of any type through, such as struct.error and IndexError.
    except Exception as error:
        if not _is_damage(error):
            raise
        raise _damaged(name, first_sentence(error)) from error


def _refuse_bytearray(stream: IO[bytes]) -> None:
    """Raise an UnpicklingError if a pickle in the stream names `bytearray`; the stream keeps its position.

    torch's reader takes the type for data, and makes a bytearray as large as ten bytes of a file say.
    """
    start = stream.tell()
    overlap = b""  # the name may be split between two chunks
    while chunk := stream.read(_CHUNK):
        if _BYTEARRAY in overlap + chunk:
            # as torch's reader names a refused type
            raise pickle.UnpicklingError("GLOBAL builtins.bytearray")
        overlap = chunk[-len(_BYTEARRAY) :]
    stream.seek(start)


def _is_damage(error: Exception) -> bool:
    """Whether an error of torch's reader comes from the file's bytes, and not from what the system lacks."""
    if isinstance(error, OSError):
        # A reader's own OSErrors have no number. Damaged bytes may ask for a seek to nowhere (EINVAL).
        return error.errno in (None, errno.EINVAL)
    return not isinstance(error, MemoryError)


def _damaged(name: str, reason: str) -> UserError:
    return UserError(
        f"Checkpoint {name} cannot be read ({reason}): the file is truncated, was changed on the disk, or is "
        "not a checkpoint. Copy it again, or resume from an older one (for example with --restore-file "
        "checkpointN.pt)."
    )


def load_plain(source: Any, **options: Any) -> Any:
    """torch.load of tensors, plain containers, ALLOWED_TYPES and NumPy's numbers; nothing else is checked.

    Args:
        source: a path or a stream, as torch.load takes it.
        options: other arguments of torch.load.

    Raises:
        pickle.UnpicklingError: if the file holds an object of another type (`refused_type`).
    """
    with torch.serialization.safe_globals([*ALLOWED_TYPES, *numpy_stand_ins()]):
        return torch.load(source, weights_only=True, **options)


def refused_type(error: pickle.UnpicklingError) -> str:
    """The name of the type that torch's reader refused, from its error."""
    match = _REFUSED_TYPE.search(str(error))
    if match:
        return match.group(1)
    return str(error).splitlines()[0]


def first_sentence(error: Exception) -> str:
    """What happened, without the advice that torch adds, such as to switch safety off."""
    # The message may begin with a place in torch's source.
    message = re.sub(r"^\[enforce fail at [^]]*\][ .]*", "", str(error))
    return re.split(r"[.\n]", message)[0] or type(error).__name__


def check_sums(stream: IO[bytes]) -> None:
    """Read a checkpoint once and compare its content with the checksums that torch wrote with it.

    torch itself does not compare them, so a byte that changed on the disk would become a wrong weight. Files
    older than torch 1.6 have no checksums and pass.

    Args:
        stream: the file's bytes; the stream keeps its position.

    Raises:
        zipfile.BadZipFile: if a checksum differs. If the archive's members are compressed, or together larger
            than the file, this is raised before any is unpacked: torch never writes such members, and they
            could fill the memory.
    """
    start = stream.tell()
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
            size = stream.seek(0, os.SEEK_END)
            if compressed or sum(member.file_size for member in members) > size:
                raise zipfile.BadZipFile(
                    "its members are compressed or overlap, which torch.save never writes"
                )
            for member in members:
                # With torch.serialization.set_crc32_options(False) torch writes no checksum.
                if member.CRC == 0:
                    continue
                with archive.open(member) as content:
                    # At the end of a member zipfile compares its checksum.
                    while content.read(_CHUNK):
                        pass
    stream.seek(start)
