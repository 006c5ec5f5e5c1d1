"""Copies only the requested files out of an archive, reads archives into memory, and packs files."""

import contextlib
import errno
import functools
import gzip
import io
import lzma
import posixpath
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write, refuse_irregular

BLOCK = 1 << 20
MOST_BYTES = 256 << 20  # the most that `contents` holds in memory
# What the standard library raises for damaged bytes, including bad numbers, names and sizes.
_DAMAGED = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    ValueError,
    OverflowError,
    struct.error,
    IndexError,
)
_OPENERS: dict[str, Callable[..., Any]] = {
    ".tar": open,
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".xz": lzma.open,
}
# The path of a file in an archive, and a function that opens it
Member = tuple[str, Callable[[], IO[bytes]]]


class DamagedArchive(UserError):
    """An archive that cannot be read to the end."""


def extract(
    archive: Path,
    names: Collection[str],
    folder: Path,
    name_in: Callable[[str], str] = posixpath.normpath,
) -> dict[str, int]:
    """Copy the named members of a tar (also .tgz) or zip archive (also .whl) to `folder/<name>`.

    Other members are never written, and links are not followed. The archive is read to its end.

    Args:
        archive: the file; the name's ending gives the format.
        names: the names to copy, none of which may lead out of the folder.
        folder: the output folder.
        name_in: a member's path in the archive → its name in `names`; if several members have one name, the
            first is copied.

    Returns:
        Name → bytes, for the names in the archive.

    Raises:
        DamagedArchive: for an archive that is cut off or damaged.
        UserError: for a member that is encrypted, sparse or compressed in a way that Python does not know.
    """
    for name in names:
        if posixpath.isabs(name) or ".." in name.split("/"):
            raise ValueError(f"{name} would leave the folder")
    sizes: dict[str, int] = {}
    with _errors_for_users(archive):
        for path, open_member in _members(archive):
            name = name_in(path)
            if name in names and name not in sizes:
                with open_member() as content, atomic_write(folder / name, "wb") as output:
                    shutil.copyfileobj(content, output, BLOCK)
                    sizes[name] = output.tell()
    return sizes


def contents(archive: Path) -> dict[str, bytes]:
    """All ordinary files of an archive, in memory; nothing is written.

    Args:
        archive: a tar (also .tar.gz and .tar.xz) or zip archive.

    Returns:
        Name → bytes. If two files have one name, the later file is returned.

    Raises:
        UserError: if there is no such file, or if it unpacks to more than 256 MiB; see also `extract`.
    """
    refuse_irregular(archive, "Archive")
    files: dict[str, bytes] = {}
    budget = MOST_BYTES
    with _errors_for_users(archive):
        for path, open_member in _members(archive):
            data = bytearray()
            with open_member() as content:
                while len(data) <= budget and (block := content.read(BLOCK)):
                    data += block
            budget -= len(data)
            if budget < 0:
                raise UserError(
                    f"{archive} has more than {MOST_BYTES:,} bytes unpacked. Unpack it by hand."
                )
            files[posixpath.normpath(path)] = bytes(data)
    return files


def pack(archive: Path, files: Mapping[str, bytes]) -> None:
    """Write a .tar.xz archive. The same files always give the same bytes.

    Args:
        archive: the output file; an existing file is replaced as a whole.
        files: name in the archive → content.

    Raises:
        UserError: if the archive cannot be written.
    """
    with (
        atomic_write(archive, "wb") as output,
        lzma.open(output, "wb", preset=9 | lzma.PRESET_EXTREME) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name in sorted(files):
            member = tarfile.TarInfo(name)  # without time and owner
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))


@contextlib.contextmanager
def _errors_for_users(archive: Path) -> Iterator[None]:
    """Turn errors of reading an archive into errors for users."""
    try:
        yield
    # Raised below, and by zipfile for an encrypted member or an unknown compression
    except RuntimeError as error:
        remedy = "Unpack it with the program that made it, and give --data the folder"
        raise UserError(f"This program cannot unpack {archive} ({error}). {remedy}.") from error
    except (*_DAMAGED, OSError) as error:
        # gzip and bz2 raise OSErrors without a number for damaged bytes; EINVAL is a seek before the start
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # the disk's error
        raise DamagedArchive(
            f"{archive} is cut off or damaged ({error or type(error).__name__})."
        ) from error


class _Blocks:
    """A stream that refuses long reads: tarfile would read a name of any length at once.

    Args:
        stream: the unpacked archive.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.tell = stream.tell
        self.seek = stream.seek

    def read(self, size: int) -> bytes:
        """Raises ReadError for more than BLOCK bytes."""
        if size > BLOCK:
            raise tarfile.ReadError(f"{size:,} bytes of headers describe a single file")
        return self.stream.read(size)


def _members(archive: Path) -> Iterator[Member]:
    """Each ordinary file in the archive, in one pass: a large archive is decompressed only once."""
    opener = _OPENERS.get(archive.suffix)
    if not opener:
        with zipfile.ZipFile(archive) as package:
            yield from _zip_members(package)
        return
    with opener(archive, "rb") as stream:
        yield from _tar_members(stream)
        while stream.read(BLOCK):  # to the very end, where gzip stores its checksum
            pass


def _zip_members(package: zipfile.ZipFile) -> Iterator[Member]:
    for info in package.infolist():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # zipfile would unpack the other types at once, without a limit on the size
            raise RuntimeError(f"{info.filename} has the compression type {info.compress_type}")
        if not info.is_dir():
            yield info.filename, functools.partial(package.open, info)


def _tar_members(stream: IO[bytes]) -> Iterator[Member]:
    blocks: Any = _Blocks(stream)
    with tarfile.open(fileobj=blocks, mode="r:") as tar:
        for member in tar:
            if member.isfile():
                yield member.name, functools.partial(_open_in_tar, tar, member)


def _open_in_tar(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(member)
    if content is None or member.issparse() or member.size < 0:  # the header gives the size
        raise RuntimeError(f"{member.name} is stored as a sparse file, or has an impossible size")
    return content
