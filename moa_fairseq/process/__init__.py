"""Commands as lists of words; running them in a locked folder, with output in a log and Ctrl-C passed on."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import portalocker

import moa_fairseq
from moa_fairseq.errors import Diverged, UserError
from moa_fairseq.files import disk_errors, refuse_irregular, refuse_link
from moa_fairseq.files.utf8 import utf8_environment
from moa_fairseq.process.signals import die_with_parent, handled_by, signals_held

MODULES = {
    "fairseq-preprocess": "fairseq_cli.preprocess",
    "fairseq-train": "fairseq_cli.train",
    "fairseq-generate": "fairseq_cli.generate",
    "fairseq-eval-lm": "fairseq_cli.eval_lm",
    "fairseq-validate": "fairseq_cli.validate",
    "moa-fairseq": "moa_fairseq.cli",
}
REDIRECT = ">"
ERRORS_TOO = "2>&1"
_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
TAIL_LINES = 12  # of a log, in the message of a command that failed
STOP_SECONDS = 10  # in which a program ends after a signal
# In this time fairseq-train ends an update and saves; slurm.sh signals it 300 seconds before the end.
SAVE_SECONDS = 240
PATIENCE_SECONDS = 5.0  # of waiting for the lock of a folder
_held: dict[Path, IO[str]] = {}
logger = logging.getLogger(__name__)

# Patterns in fairseq's last lines → the cause and the remedy.
HINTS = {
    "SIGTERM: saving a checkpoint": (
        "It was told to end and has saved: run the same command again to go on."
    ),
    "out of memory|OutOfMemory": "The GPU's memory is full: lower train.max_tokens (--set).",
    "No space left on device|Disk quota exceeded": (
        "The disk is full: free some space and run it again."
    ),
    "Minimum loss scale reached": (
        "fp16 training diverged: use train.precision bf16 or fp32, or a lower lr."
    ),
    "no kernel image is available|not compatible with the current PyTorch": (
        "This torch was not built for this GPU: install a torch built for it (V100: CUDA 12.6 or older)."
    ),
    (
        "lost rank|Connection (closed by peer|reset by peer|refused)|ProcessGroupNCCL|"
        "NCCL (error|communicator)|Watchdog caught collective|ProcessExitedException|"
        "ProcessRaisedException|DistBackendError"
    ): (
        "Another process of this training stopped first: see its log (train.log, train.process*.log). "
        "Start the same command again on every machine; training goes on from the last whole checkpoint."
    ),
    "exceeds max_tokens": "A sentence is longer than one device's batch: raise train.max_tokens.",
    "DataLoader worker .* is killed|MemoryError|Cannot allocate memory": (
        "The machine's memory is full: close other programs or use --set train.flags.num-workers=0."
    ),
}
# NaN or infinity in a training: errors of fairseq, of the patches that save weights, and of the gates
DIVERGED = re.compile(
    r"error: .*(Nan/Inf|Nan or Inf|Minimum loss scale|The (training has|gates have) diverged|"
    r"was not written, because the model holds (NaN|infinity))",
    re.IGNORECASE,
)


def flags(values: Mapping[str, Any]) -> list[str]:
    """{'lr': 0.1, 'fp16': True, 'x': None} → ['--lr', '0.1', '--fp16']: False and None are left out.

    Args:
        values: name of a flag, without dashes → its value; a list or tuple becomes several words.

    Returns:
        The words of a command line, in the order of `values`.

    Raises:
        UserError: if the program, or a shell, would not take a value for a value.
    """
    line: list[str] = []
    for name, value in values.items():
        problem = unsafe_value(value)
        if problem:
            raise UserError(f"--{name}: {problem}")
        if value is None or value is False:
            continue
        if value is True:
            line.append(f"--{name}")
        elif isinstance(value, (list, tuple)):
            line += [f"--{name}", *map(str, value)]
        elif str(value).startswith("-"):
            line.append(f"--{name}={value}")  # argparse would take a separate -1 for a flag
        else:
            line += [f"--{name}", str(value)]
    return line


def unsafe_value(value: Any) -> str | None:
    """Why a flag's value must not be put on a command line.

    An item of a list is a word of its own there. A word that begins with a dash would be read as a flag, and
    the flag --user-dir, for example, runs Python code. Negative numbers are not taken for flags.

    Args:
        value: the value of a flag, which may be a list.

    Returns:
        The reason as a sentence, or None if the value is safe.
    """
    is_list = isinstance(value, (list, tuple))
    for item in value if is_list else [value]:
        if item == REDIRECT:
            return f"{REDIRECT!r} is not a value."
        if is_list and str(item).startswith("-") and not _NUMBER.fullmatch(str(item)):
            return f"{str(item)!r} in a list of values would be taken for a flag: a list holds values only."
    return None


def to_argv(command: Sequence[str]) -> list[str]:
    """The words that are executed for a printed command: its program as a module of this Python.

    Args:
        command: the words of the command. The first is a name of MODULES; ">" and all words after it are left
            out.
    """
    program, *words = command
    if REDIRECT in words:
        words = words[: words.index(REDIRECT)]
    return [sys.executable, "-u", "-m", MODULES[program], *words]


def to_shell(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """A command as text that can be pasted into a shell.

    Args:
        command: the words of the command; ">" and "2>&1" stay operators.
        environment: variables that are written before the command.
    """
    settings = [f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    words = (word if word in (REDIRECT, ERRORS_TOO) else shlex.quote(word) for word in command)
    return " ".join([*settings, *words])


def positional(path: Path) -> str:
    """A path as a positional argument, which never begins like a flag."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def environment_of_a_child() -> dict[str, str]:
    """The environment of a child Python and of its own children.

    Output is not buffered; texts and names are UTF-8. Nothing is imported from the working directory: `-m`
    would allow that, and `fairseq-train` does not. The child finds this same package even if it is not
    installed.
    """
    environment = utf8_environment() | {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    silent = f"ignore:{moa_fairseq.JIT_WARNING}:FutureWarning"
    # Of two filters the later one wins.
    environment["PYTHONWARNINGS"] = ",".join(
        filter(None, [os.environ.get("PYTHONWARNINGS"), silent])
    )
    root = Path(moa_fairseq.__file__).resolve().parents[1]
    if not {"site-packages", "dist-packages"} & set(root.parts):
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(root), os.environ.get("PYTHONPATH")])
        )
    return environment


def held_locks() -> list[int]:
    """File descriptors of the locks of this program; a child that inherits them holds the locks, too."""
    return [stream.fileno() for stream in _held.values()]


def refuse_without_locks(file: Path, error: portalocker.LockException) -> None:
    """Tell a file that cannot be locked at all from one that another process has locked.

    Args:
        file: the file that was to be locked.
        error: the error of the attempt.

    Raises:
        UserError: if the file system has no locks. Without them two runs could write into one folder.
    """
    cause: Any = error
    # portalocker wraps the system's error, perhaps more than once.
    while isinstance(cause, portalocker.LockException) and cause.args:
        cause = cause.args[0]
    if isinstance(cause, OSError) and cause.errno not in (errno.EAGAIN, errno.EACCES):
        raise UserError(
            f"{file} cannot be locked ({cause.strerror}): the file system of {file.parent} has no locks, and "
            "without them two programs could write into one folder. What is done is kept. Name a folder on a "
            "file system with locks, such as a local disk, or have them switched on (NFS: lockd, or NFS 4)."
        ) from error


@contextlib.contextmanager
def locked(folder: Path, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold the lock of a folder inside the block; in a nested block for the same folder this does nothing.

    Args:
        folder: the folder, which is created if it does not exist; the lock is its file `.lock`.
        patience: seconds to wait for another holder: children of a run that was just killed need a moment to
            end.

    Raises:
        UserError: if another run, or a child that outlived its run, works in the folder, or the folder cannot
            be written.
    """
    file = folder / ".lock"
    key = folder.resolve()
    if key in _held:
        yield
        return
    refuse_link(file)
    refuse_irregular(file, "Lock")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    lock = portalocker.Lock(file, "r+", timeout=patience, check_interval=0.1)
    try:
        stream = lock.acquire(fail_when_locked=True)
    except portalocker.LockException as held:  # by another process, or for lack of locks
        refuse_without_locks(file, held)
        holder = (
            f"Another run is at work in {folder} (process {file.read_text('utf-8').strip() or '?'})"
        )
        logger.info("%s; waiting for it to finish", holder)
        try:
            stream = lock.acquire(fail_when_locked=False)
        except portalocker.LockException as error:  # for the same two reasons
            refuse_without_locks(file, error)
            raise UserError(
                f"{holder}. Wait for it, stop it, or use another --save-dir."
            ) from error
    with stream:  # the file is closed but not unlocked, so that a child at work keeps the lock
        _held[key] = stream
        try:
            with disk_errors(folder):
                _write_holder(stream.fileno(), os.getpid())
            yield
        finally:
            del _held[key]


def _write_holder(lock: int, process: int) -> None:
    """Write a process's number into the file of a lock."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(process).encode(), 0)


class Executor:
    """Runs commands; tests replace it.

    A child inherits the locks that this program holds: a folder stays locked as long as any process works in
    it.

    Args:
        environment: variables that every child has in addition to `environment_of_a_child`.
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.environment = environment or {}

    def run(
        self,
        command: list[str],
        log: Path,
        output: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        errors_too: bool = False,
    ) -> None:
        """Run a printed command to its end.

        Args:
            command: the words of the command, of which the first is a name of MODULES.
            log: the file to which the command is appended, then its standard error, and its standard output
                unless `output` names another file.
            output: the file that receives the standard output instead; its old content is lost.
            on_line: called with each line of standard output, without the line end.
            errors_too: whether standard error goes where standard output goes, also to on_line.

        Raises:
            Diverged: if the command is a training that diverged, or a recipe with such a training.
            UserError: if the command fails otherwise, with the last lines that it wrote to the log, or the
                disk is full.
        """
        environment = environment_of_a_child() | self.environment
        locks = held_locks()
        with contextlib.ExitStack() as files:
            log_stream = _open_for(files, log, "ab", buffering=0)
            out_stream = _open_for(files, output, "wb") if output else log_stream
            with disk_errors(log):
                log_stream.write(f"$ {to_shell(command, self.environment)}\n".encode())
                begin = os.fstat(log_stream.fileno()).st_size
            with signals_held() as received:
                process = subprocess.Popen(
                    to_argv(command),
                    stdout=subprocess.PIPE,
                    env=environment,
                    stderr=subprocess.STDOUT if errors_too else log_stream,
                    pass_fds=locks,
                    preexec_fn=die_with_parent(),
                )
            for lock in locks:  # if this program is killed, the child still holds the lock
                _write_holder(lock, process.pid)

            def keep(raw: bytes) -> None:
                out_stream.write(raw)
                if on_line:
                    on_line(raw.decode("utf-8", errors="replace").rstrip("\n"))

            with _ended_with_us(process, keep, saves=command[0] == "fairseq-train") as lines:
                for number in received:
                    signal.raise_signal(number)
                for raw in lines:
                    keep(raw)
                status = process.wait()
        if status:
            with open(log, "rb") as stream:
                stream.seek(begin)  # earlier attempts wrote the text before
                log_text = stream.read().decode("utf-8", errors="replace")
            raise _failure(command[0], status, log, log_text)


def _failure(program: str, status: int, log: Path, log_text: str) -> UserError:
    """The error for a command that failed: `log_text` is what it wrote to its log."""
    tail = log_text.splitlines()[-TAIL_LINES:]
    hints = [advice for pattern, advice in HINTS.items() if re.search(pattern, "\n".join(tail))]
    if status == -signal.SIGKILL:
        hints.append("The system killed it, most often because the machine's memory was full.")
    ending = f"was killed by signal {-status}" if status < 0 else f"failed with status {status}"
    hint = f" {hints[0]}" if hints else ""
    excerpt = "\n".join(f"    {line[:300]}" for line in tail)
    # A recipe tells by its status that its training diverged.
    is_recipe = program == "moa-fairseq"
    diverged = status == Diverged.status if is_recipe else DIVERGED.search(log_text)
    kind = Diverged if diverged else UserError
    return kind(
        f"{program} {ending}.{hint} What is done so far is kept. The whole log is {log}; its last lines:\n"
        f"{excerpt}"
    )


def _open_for(files: contextlib.ExitStack, path: Path, mode: str, buffering: int = -1) -> IO[bytes]:
    """Open a file; if the disk fills up at a later write or at the end, a UserError names the file."""
    refuse_link(path)
    files.enter_context(disk_errors(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    return files.enter_context(open(path, mode, buffering=buffering))


@contextlib.contextmanager
def _ended_with_us(
    process: subprocess.Popen[bytes], keep: Callable[[bytes], None], saves: bool
) -> Iterator[IO[bytes]]:
    """A context with the child's standard output, whose end also ends the child.

    The child first gets signals after which it can finish its files, and SIGKILL last.

    Args:
        process: the child.
        keep: called with each line that the child prints while it ends.
        saves: whether the child saves its work when it gets SIGTERM.
    """
    assert process.stdout is not None, "the child was started without a pipe"
    try:
        yield process.stdout
    finally:
        if process.poll() is None:
            # A second Ctrl-C (or `timeout`, which signals twice) must not leave the child running.
            with handled_by(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
                # A job started in the background of a script has Ctrl-C switched off, hence the next signals.
                numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
                signals = [(number, STOP_SECONDS) for number in numbers]
                if saves:
                    signals.insert(0, (signal.SIGTERM, SAVE_SECONDS))
                for number, seconds in signals:
                    process.send_signal(number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(seconds)
                        break
                # A child of the child may hold the pipe open, so that reading to its end would hang.
                os.set_blocking(process.stdout.fileno(), False)
                for raw in (process.stdout.read() or b"").splitlines(keepends=True):
                    keep(raw)
        process.stdout.close()
