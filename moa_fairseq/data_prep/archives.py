"""Taking single files out of archives: only what was asked for, to where this program says."""

from __future__ import annotations

import contextlib
import errno
import gzip
import lzma
import posixpath
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, Collection, Dict, Iterator, Sequence, Tuple

from tqdm import tqdm

from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write

BLOCK = 1 << 20
MOST_EMPTY_READS = 20  # a whole archive has two or three
Member = Tuple[str, int, IO[bytes]]
# What the standard library raises for damaged bytes: numbers, names and sizes that are none among them.
_DAMAGED = (
    *(EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile),
    *(ValueError, OverflowError, struct.error, IndexError),
)


class DamagedArchive(UserError):
    """An archive that cannot be read to the end."""


def extract(archive: Path, wanted: Collection[Sequence[str]], folder: Path) -> Dict[str, int]:
    """Copy members of a tar (also .tgz) or zip archive to `folder/<name of the member>`.

    wanted: groups of member names; of each group the first that the archive has is reported. Names
    outside of the groups are never written, links are not followed; the archive is read to its end.
    Returns name → bytes. Raises DamagedArchive for a cut off archive, UserError when a group has no
    member in it, or one that is encrypted, sparse or compressed in a way that Python does not know.
    """
    names = {name for group in wanted for name in group}
    for name in names:
        if posixpath.isabs(name) or ".." in name.split("/"):
            raise ValueError(f"{name} would leave the folder")
    found: Dict[str, int] = {}
    with archive_errors(archive):
        for name, size, stream in _members(archive, names):
            with atomic_write(folder / name, "wb") as output:
                _copy(stream, output, size, posixpath.basename(name))
            found[name] = size
    missing = ", ".join(" or ".join(group) for group in wanted if not found.keys() & set(group))
    if missing:
        raise UserError(f"{archive} does not contain {missing}: it is another archive than the recipe knows.")
    first = [next(name for name in group if name in found) for group in wanted]
    return {name: found[name] for name in first}


@contextlib.contextmanager
def archive_errors(archive: Path) -> Iterator[None]:
    """Turn what the standard library raises for an archive into DamagedArchive or another UserError."""
    try:
        yield
    except RuntimeError as error:  # NotImplementedError among them: encrypted, or compressed as Python cannot
        raise UserError(
            f"{archive} cannot be unpacked here ({error}). Unpack it with the program that made it, and give "
            f"--data the folder."
        ) from error
    except (*_DAMAGED, OSError) as error:
        # The disk's own errors are none of the archive's; those of bz2, and of a place before its start, are.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise DamagedArchive(f"{archive} is cut off or damaged ({error or type(error).__name__}).") from error


def _members(archive: Path, names: Collection[str]) -> Iterator[Member]:
    """(name, size, content) of each ordinary file of the archive that is one of `names`."""
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as package:
            for info in package.infolist():
                name = posixpath.normpath(info.filename)
                if name in names and not info.is_dir():
                    with package.open(info) as stream:
                        yield name, info.file_size, stream
        return
    with gzip.open(archive) if archive.name.endswith("gz") else open(archive, "rb") as raw:
        # As a stream: one pass from front to back, so that a large archive is decompressed only once.
        with tarfile.open(fileobj=_Ending(raw), mode="r|") as package:
            for info in package:
                name = posixpath.normpath(info.name)
                if name in names and info.issparse():  # its size is whatever the header says
                    raise RuntimeError(f"{name} is stored as a sparse file")
                if name in names and info.isfile():
                    yield name, info.size, package.extractfile(info)
        while raw.read(BLOCK):  # to the very end, where gzip keeps its checksum
            pass


class _Ending:
    """A stream that raises EOFError when it is read on and on at its end.

    tarfile skips a member of a size that a damaged header gives block by block, whether there are any or not.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.empty = 0

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.empty += not data
        if self.empty > MOST_EMPTY_READS:
            raise EOFError("it ends before its last member does")
        return data


def _copy(stream: IO[bytes], output: IO[bytes], size: int, label: str) -> None:
    left = size
    with tqdm(total=size, unit="B", unit_scale=True, desc=label, disable=None, leave=False) as bar:
        while block := stream.read(BLOCK):
            output.write(block)
            left -= len(block)
            bar.update(len(block))
    if left:
        raise EOFError(f"{label} ends {left:,} bytes early")
