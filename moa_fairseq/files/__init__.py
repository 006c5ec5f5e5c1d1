"""Writing files so that a crash, a full disk or Ctrl-C never leaves half of one behind."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from moa_fairseq.errors import UserError

PathLike = str | Path
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT, errno.EISDIR),
)

_LOCK = ".moa-fairseq.lock"  # in a folder that is being filled
# Of new files, each with a name of its own, that another process would have to lock first
_LOCK_TRIES = 100

_IRREGULAR = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextlib.contextmanager
def atomic_write(
    path: PathLike,
    mode: str = "w",
    temporary: PathLike | None = None,
    check: Callable[[str], None] = lambda written: None,
) -> Iterator[IO]:
    """Open a temporary neighbour of `path` for writing and rename it into place on success.

    An exception inside the block removes the temporary file and leaves an existing `path` as it was.

    Args:
        path: the final name; its folder is created.
        mode: "w" (UTF-8, LF line ends) or "wb".
        temporary: the neighbour's name, for a file that only one process writes: what a killed process left
            there is overwritten. By default a new, unique name, and what killed writers of `path` left is
            removed.
        check: is called with the temporary name when all is on the disk, and raises if the file is wrong.

    Raises:
        UserError: when the disk is full, the folder cannot be written, or `path` is not a file.
        ValueError: for another mode.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"atomic_write takes mode 'w' or 'wb', not {mode!r}")
    path = Path(path)
    special = path.is_symlink() and path.absolute().parts[1] in ("dev", "proc")
    if path.exists() and (special or not path.is_file()):
        # a folder, or a device such as /dev/null or /dev/stdout: renaming onto it would replace it
        raise UserError(
            f"Cannot write {path}: it exists and is not an ordinary file. Choose another name."
        )
    options: dict[str, Any] = {"encoding": "utf-8", "newline": "\n"} if mode == "w" else {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if temporary is None:
            remove_leftovers(path.parent, f".{glob.escape(path.name)}.????????.tmp")
        for _ in range(_LOCK_TRIES):
            if temporary is None:
                handle, written = tempfile.mkstemp(".tmp", f".{path.name}.", path.parent)
            else:
                written = str(temporary)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(written)
                handle = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            lock = _lock(handle, Path(written))
            if lock >= 0:
                break
        else:
            raise UserError(
                f"Cannot write {path}: the file system of {path.parent} says that other programs have locked "
                "every new file. Choose another folder, such as one on a local disk."
            )
    except OSError as error:  # any: what is none of the user's stays as it is
        raise as_user_error(error, path) from error
    try:
        with os.fdopen(handle, mode, **options) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        check(written)
        # the temporary file is private; results are as readable as the user's umask says.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(written, 0o666 & ~umask)
        os.replace(written, path)
        sync_folder(path.parent)
    except BaseException as error:  # Ctrl-C as well: raised again behind the tidying
        with contextlib.suppress(OSError):  # the error that counts is the one above
            os.unlink(written)
        if isinstance(error, OSError):
            raise as_user_error(error, path) from error
        raise
    finally:
        os.close(lock)


def _lock(handle: int, path: Path) -> int:
    """Hold an open file as long as this process lives: a second handle of it, to be closed in the end.

    -1, and `handle` is closed, where `remove_leftovers` of another process had it first.
    """
    lock = os.dup(handle)  # outlives the closing of `handle`
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = path.exists()
    except OSError as error:  # a file system may have no locks: then nothing is removed there
        is_locked = error.errno not in (errno.EAGAIN, errno.EACCES)
    if is_locked:
        return lock
    os.close(lock)
    os.close(handle)
    path.unlink(missing_ok=True)
    return -1


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make a folder beside `path` to be filled, and rename it on success.

    An exception inside the block removes it. What killed processes left of `path` is removed.

    Args:
        path: the final name, which must not be there; its parents are made.

    Raises:
        UserError: as `atomic_write`.
    """

    def remove(lock: Path) -> None:
        # The lock last: a kill leaves what it marks
        shutil.rmtree(lock.parent / "new", ignore_errors=True)
        shutil.rmtree(lock.parent)

    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, f".{glob.escape(path.name)}.????????.tmp/{_LOCK}", remove)
        place = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
        with open(place / _LOCK, "wb") as lock:
            with contextlib.suppress(OSError):  # where there are no locks nothing is removed
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                (place / "new").mkdir()
                yield place / "new"
                os.rename(place / "new", path)
                sync_folder(path.parent)
            finally:
                remove(place / _LOCK)


def remove_leftovers(
    folder: Path, pattern: str, remove: Callable[[Path], None] = Path.unlink
) -> None:
    """Remove the temporary files of this name that killed processes left; those of living ones stay.

    Args:
        folder: where they lie.
        pattern: of their names, as `Path.glob` reads it.
        remove: what is done to each; an OSError of it is passed over.
    """
    for path in folder.glob(pattern):
        if path.is_symlink() or not path.is_file():  # a pipe would hang
            continue
        # another process may have removed it, or the file system have no locks
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)


def refuse_overwriting(output: PathLike, inputs: Iterable[PathLike], flag: str) -> None:
    """Refuse an output that is one of the inputs, under any name or link.

    Args:
        output: what will be written; it need not exist.
        inputs: what will be read.
        flag: which one names the output.

    Raises:
        UserError: if both are one file.
    """
    for path in inputs:
        if os.path.exists(output) and os.path.exists(path) and os.path.samefile(output, path):
            raise UserError(
                f"{flag} {output} is the same file as the input {path}, which would be overwritten. Choose "
                "another name."
            )


def refuse_existing(output: PathLike, force: bool, flag: str) -> None:
    """Before the work begins: refuse an output that exists, or is not an ordinary file.

    Args:
        output: what will be written.
        force: an ordinary file may be overwritten.
        flag: which one names the output.

    Raises:
        UserError: for what must not be written.
    """
    refuse_irregular(output, flag)
    if os.path.lexists(output) and not force:
        raise UserError(
            f"{flag} {output} exists: choose another name, or give --force to overwrite it."
        )


def refuse_link(path: PathLike) -> None:
    """Refuse a link to a file, or to none yet, where a run writes.

    A run folder from somebody else could name any file with it. Links to devices pass.

    Raises:
        UserError: for such a link.
    """
    if os.path.islink(path) and (os.path.isfile(path) or not os.path.exists(path)):
        raise UserError(
            f"{path} is a link, and would be written through. Take it out of the run folder."
        )


def refuse_link_out(path: Path, *folders: Path) -> None:
    """Refuse a link that leads out of a folder whose files are copied, perhaps to be given away.

    A folder from somebody else could name any file of the user's with it.

    Args:
        path: of a file in the folder; what is not there passes.
        folders: one of them must hold what the path stands for.

    Raises:
        UserError: for such a link.
    """
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(os.path.realpath(folder)) for folder in folders):
        raise UserError(
            f"{path} is a link that leads out of its folder, to {target}, and would be copied to be given "
            "away. Put the file itself there if it belongs to it, or delete the link."
        )


def refuse_irregular(path: PathLike, what: str = "Checkpoint") -> None:
    """Refuse what is no regular file: a pipe would hang, a device fill the memory.

    A path where nothing is passes.

    Args:
        path: what will be read or written. A link counts as what it leads to.
        what: begins the message, as "Checkpoint" or a flag.

    Raises:
        UserError: for a folder, a pipe, a device, a link to nothing, or a file of the kernel.
    """
    if not os.path.lexists(path):
        return
    try:
        mode = os.stat(path).st_mode
        kind = _IRREGULAR.get(stat.S_IFMT(mode), "no file")
    except FileNotFoundError:
        mode = 0
        kind = "a link to a file that does not exist"
    if stat.S_ISREG(mode) and os.path.realpath(path).startswith(("/proc/", "/sys/")):
        mode = 0
        kind = "a file of the kernel, which can be endless"
    if not stat.S_ISREG(mode):
        raise UserError(
            f"{what} {path} is {kind}. Name an ordinary file, or move this out of the way."
        )


def sync_folder(folder: Path) -> None:
    """Make a renaming durable, on systems that can. Raises OSError where the disk fails."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    # Some file systems cannot, and some folders may be written and not read
    except OSError as error:
        if error.errno in (errno.EIO, *DISK_FULL):
            raise


def as_user_error(error: OSError, path: Path) -> Exception:
    """What to raise instead of an OSError met while writing `path`.

    Args:
        error: the one that was met.
        path: the final name, or its folder, for the message.

    Returns:
        A UserError where the user can help: the disk is full, `path` not writable, or the file too large.
        Else the error itself.
    """
    if error.errno in DISK_FULL:
        return UserError(
            f"The disk is full while writing {path}. Free some space, or choose another folder, and run the "
            "same command again: what is finished is kept, and no half file stands under a final name."
        )
    if error.errno in NOT_WRITABLE:
        return UserError(
            f"Cannot write {path}: {error.strerror}. Choose a folder that you may write to."
        )
    if error.errno == errno.EFBIG:
        return UserError(
            f"Cannot write {path}: {error.strerror}. Raise the shell's limit (ulimit -f), or choose a folder "
            "on a file system that allows larger files."
        )
    return error


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full or read-only disk into a UserError.

    Args:
        folder: what the message names.

    Raises:
        UserError: for an OSError of the block that `as_user_error` knows.
    """
    try:
        yield
    except OSError as error:  # any: what is none of the user's stays as it is
        raise as_user_error(error, folder) from error


def checksum(path: PathLike, algorithm: str = "sha256") -> str:
    """Hexadecimal checksum of a file.

    Args:
        path: read in pieces, so that it may be large.
        algorithm: as hashlib calls it.
    """
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def user_cache() -> Path:
    """The cache of this package and user: `$XDG_CACHE_HOME/moa_fairseq`, else `~/.cache/moa_fairseq`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moa_fairseq"


def private_folder(folder: Path) -> Path:
    """Make a folder for what is run when it is read again, such as compiled code; or check that it is ours.

    Args:
        folder: where nobody else may write; its parents are made, too.

    Returns:
        The folder.

    Raises:
        UserError: it belongs to another user, or anybody may write there, or it cannot be made.
    """
    with disk_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & stat.S_IWOTH:
        raise UserError(
            f"{folder} belongs to another user, or anybody may write there, and what it holds would be run. "
            "Delete it, or name a cache folder of your own with XDG_CACHE_HOME or TORCHINDUCTOR_CACHE_DIR."
        )
    return folder


def shipped(name: str) -> Path:
    """A folder beside the package (configs, results): of the checkout, or what an installation has of it."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "share" / name  # setup.py copies it there
    if installed.is_dir():
        return installed
    return package.parent / name
