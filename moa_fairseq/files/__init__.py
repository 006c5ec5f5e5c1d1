"""Writing files so that a crash, a full disk or Ctrl-C never leaves half a file behind."""

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

_LOCK = ".moa-fairseq.lock"  # the name of the lock in a folder that is being filled
# Another process can lock a new file first. That happens this many times in a row only without working locks.
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
    check: Callable[[str], None] | None = None,
) -> Iterator[IO]:
    """Open a temporary neighbour of `path` for writing and rename it into place on success.

    An exception inside the block removes the temporary file and leaves an existing `path` as it was.

    Args:
        path: the final name; its folder is created.
        mode: "w" (UTF-8, LF line ends) or "wb".
        temporary: the neighbour's name, for a file that only one process writes: what a killed process left
            there is overwritten. By default the name is unique, and what killed writers of `path` left is
            removed.
        check: called with the temporary name of the file on the disk; it raises if the file is wrong.

    Raises:
        UserError: if the disk is full, the folder cannot be written, or `path` is not an ordinary file.
        ValueError: if the mode is neither.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"atomic_write takes mode 'w' or 'wb', not {mode!r}")
    path = Path(path)
    is_device = path.is_symlink() and path.absolute().parts[1] in ("dev", "proc")
    if path.exists() and (is_device or not path.is_file()):
        # `path` is a folder, or a device such as /dev/null, which the renaming would replace.
        raise UserError(
            f"Cannot write {path}: it exists and is not an ordinary file. Choose another name."
        )
    options: dict[str, Any] = {"encoding": "utf-8", "newline": "\n"} if mode == "w" else {}
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, lock, written = _open_locked(path, temporary)
    try:
        with os.fdopen(handle, mode, **options) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if check is not None:
            check(written)
        _apply_umask(written)
        os.replace(written, path)
        sync_folder(path.parent)
    except BaseException as error:  # also Ctrl-C, which is raised again when the file is removed
        with contextlib.suppress(OSError):  # an error of the removal would hide the first error
            os.unlink(written)
        if isinstance(error, OSError):
            raise as_user_error(error, path) from error
        raise
    finally:
        os.close(lock)


def _open_locked(path: Path, temporary: PathLike | None) -> tuple[int, int, str]:
    """Make the temporary neighbour of `path`: its file descriptor, that of its lock, and its name."""
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
        if lock is not None:
            return handle, lock, written
    raise UserError(
        f"Cannot write {path}: the file system of {path.parent} says that other programs have locked "
        "every new file. Choose another folder, such as one on a local disk."
    )


def _lock(handle: int, path: Path) -> int | None:
    """Lock an open file as long as this process lives.

    Returns a second handle of the file, which the caller closes in the end; or None, with `handle` closed, if
    `remove_leftovers` of another process has locked the file first.
    """
    lock = os.dup(handle)  # the lock is held until this second handle is closed as well
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = path.exists()
    except OSError as error:  # on a file system without locks `remove_leftovers` removes nothing
        is_locked = error.errno not in (errno.EAGAIN, errno.EACCES)
    if is_locked:
        return lock
    os.close(lock)
    os.close(handle)
    path.unlink(missing_ok=True)
    return None


def _apply_umask(path: str) -> None:
    """Make a private file as readable as the user's umask says."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make a folder beside `path` to be filled, and rename it on success.

    An exception inside the block removes the folder. Folders that killed processes left are removed, too.

    Args:
        path: the final name, which must not exist; its parents are made.

    Raises:
        UserError: as `atomic_write`.
    """

    def remove(lock: Path) -> None:
        # The lock is removed last, so that a kill leaves no folder without a lock.
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
    """Remove temporary files that killed processes left; files of living processes are locked, and stay.

    Args:
        folder: the folder of the files.
        pattern: the pattern of their names, as `Path.glob` reads it.
        remove: called with each file; its OSErrors are ignored.
    """
    for path in folder.glob(pattern):
        if path.is_symlink() or not path.is_file():  # opening a pipe would hang
            continue
        # Another process may have removed the file, or the file system may have no locks.
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)


def refuse_overwriting(output: PathLike, inputs: Iterable[PathLike], flag: str) -> None:
    """Raise UserError for an output that is one of the inputs, under any name or link.

    Args:
        output: the file that will be written; it need not exist.
        inputs: the files that will be read.
        flag: the flag that names the output.
    """
    for path in inputs:
        if os.path.exists(output) and os.path.exists(path) and os.path.samefile(output, path):
            raise UserError(
                f"{flag} {output} is the same file as the input {path}, which would be overwritten. Choose "
                "another name."
            )


def refuse_existing(output: PathLike, force: bool, flag: str) -> None:
    """Refuse an output that exists, or is not an ordinary file, before the work begins.

    Args:
        output: the file that will be written.
        force: whether an ordinary file may be overwritten.
        flag: the flag that names the output.

    Raises:
        UserError: if the output must not be written.
    """
    refuse_irregular(output, flag)
    if os.path.lexists(output) and not force:
        raise UserError(
            f"{flag} {output} exists: choose another name, or give --force to overwrite it."
        )


def refuse_link(path: PathLike) -> None:
    """Refuse to write through a link to a file, or to a file that does not exist yet.

    In a foreign run folder such a link could lead to any file of the user's. Links to devices pass.

    Raises:
        UserError: if `path` is such a link.
    """
    if os.path.islink(path) and (os.path.isfile(path) or not os.path.exists(path)):
        raise UserError(
            f"{path} is a link, and would be written through. Take it out of the run folder."
        )


def refuse_link_out(path: Path, *folders: Path) -> None:
    """Refuse a link that leads out of a folder whose files are copied, perhaps to be given away.

    In a folder from somebody else such a link could lead to any file of the user's.

    Args:
        path: a file in the folder; a path where nothing exists passes.
        folders: one of these folders must contain the file to which the path leads.

    Raises:
        UserError: if `path` is such a link.
    """
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(os.path.realpath(folder)) for folder in folders):
        raise UserError(
            f"{path} is a link that leads out of its folder, to {target}, and would be copied to be given "
            "away. Put the file itself there if it belongs to it, or delete the link."
        )


def refuse_irregular(path: PathLike, subject: str = "Checkpoint") -> None:
    """Refuse a path that is not a regular file; a path where nothing exists passes.

    Reading a pipe would hang, and a device would fill the memory.

    Args:
        path: the file that will be read or written. A link counts as the file to which it leads.
        subject: the beginning of the message, such as "Checkpoint" or a flag.

    Raises:
        UserError: if `path` is a folder, a pipe, a device, a link to nothing, or a file of the kernel.
    """
    kind = _irregular_kind(path)
    if kind is not None:
        raise UserError(
            f"{subject} {path} is {kind}. Name an ordinary file, or move this out of the way."
        )


def _irregular_kind(path: PathLike) -> str | None:
    """What stands at a path instead of a regular file; None if nothing does."""
    if not os.path.lexists(path):
        return None
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "a link to a file that does not exist"
    if not stat.S_ISREG(mode):
        return _IRREGULAR.get(stat.S_IFMT(mode), "no file")
    if os.path.realpath(path).startswith(("/proc/", "/sys/")):
        return "a file of the kernel, which can be endless"
    return None


def sync_folder(folder: Path) -> None:
    """Make a renaming durable, on systems that can. Raises OSError if the disk fails."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    # Some file systems cannot do this, and some folders may be written but not read.
    except OSError as error:
        if error.errno in (errno.EIO, *DISK_FULL):
            raise


def as_user_error(error: OSError, path: Path) -> Exception:
    """The exception to raise in place of an OSError from writing `path`.

    Args:
        error: the OSError.
        path: the final name, or its folder, for the message.

    Returns:
        A UserError if the user can help: the disk is full, `path` is not writable, or the file is too large.
        Otherwise the OSError itself.
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
        folder: the path that the message names.

    Raises:
        UserError: for an OSError in the block that `as_user_error` turns into one.
    """
    try:
        yield
    except OSError as error:  # an error that the user cannot put right stays an OSError
        raise as_user_error(error, folder) from error


def checksum(path: PathLike, algorithm: str = "sha256") -> str:
    """Hexadecimal checksum of a file.

    Args:
        path: the file, which is read in pieces and may be large.
        algorithm: a name that hashlib knows.
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
    """Make a folder to which nobody else may write, for files that are run later, such as compiled code.

    Returns the folder. It may exist; its parents are made as well.

    Raises:
        UserError: if the folder belongs to another user, anybody may write there, or it cannot be made.
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
    """A folder beside the package (configs, results), in the checkout or in an installation."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "share" / name  # setup.py copies the folder there
    if installed.is_dir():
        return installed
    return package.parent / name
