"""fairseq's commands in processes of their own, forked from one that has imported fairseq already.

Importing torch and fairseq takes longer than most commands. The plugin is imported by each command itself.
"""

import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing import forkserver, reduction
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
# torch._dynamo: every optimizer imports it, which took half of a training's time here
_PRELOADED = (
    "fairseq.model_parallel.megatron_trainer",
    "fairseq.sequence_scorer",
    "torch._dynamo",
)
_FORKS.set_forkserver_preload([*_PRELOADED, "hydra", "requests.packages", "sacrebleu"])
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@contextlib.contextmanager
def environment_of_commands():
    """For what is forked inside."""
    before = {key: os.environ.get(key) for key in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


def start_the_server():
    """A process has one such server. A pool of text workers that came first would start it with the plugin
    imported, but without fairseq: then --user-dir registers nothing."""
    with environment_of_commands():
        forkserver.ensure_running()


class Stream:
    """A file descriptor that a forked process gets."""

    def __init__(self, number):
        self.number = number

    def __getstate__(self):
        return reduction.DupFd(self.number)

    def __setstate__(self, duplicate):
        self.number = duplicate.detach()


def command(module, words, stdin, streams, cwd, environment):
    """In the forked process: what `python -m MODULE WORDS…` does; streams: its output, errors, others."""
    # As in a process of its own: no servers of servers
    multiprocessing.set_start_method("fork", force=True)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    warnings.simplefilter("ignore")
    for number, stream in zip((1, 2), streams):
        os.dup2(stream.number, number)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", 1, "utf-8", closefd=False) for number in (1, 2)
    )
    sys.stdin = io.StringIO(stdin or "")
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    logging.getLogger().handlers.clear()  # of an imported module; the command has its own
    sys.argv = [module.replace("fairseq_cli.", "fairseq-").replace("_", "-"), *words]
    try:
        program = importlib.import_module(module)
        sys.exit(program.cli_main() if hasattr(program, "cli_main") else program.main(words))
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def send(process, number):
    """Nothing where it has ended, as of a Popen."""
    with contextlib.suppress(ProcessLookupError):
        if process.is_alive():
            os.kill(process.pid, number)


class Forked:
    """subprocess.Popen for `running.process.Executor`; argv is [python, "-u", "-m", MODULE, WORDS…]."""

    def __init__(self, argv, stdout, env, stderr, pass_fds, preexec_fn):
        self.args, (module, *words) = argv, argv[3:]
        reader, writer = os.pipe()
        errors = writer if stderr == subprocess.STDOUT else stderr.fileno()
        streams = [Stream(number) for number in (writer, errors, *pass_fds)]
        place = (os.getcwd(), {**_ENVIRONMENT, **env})
        self.process = _FORKS.Process(
            target=command, args=(module, words, None, streams, *place)
        )
        self.process.start()
        os.close(writer)
        self.stdout, self.pid = os.fdopen(reader, "rb"), self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.process.exitcode

    def send_signal(self, number):
        send(self.process, number)


class Command:
    """A command that runs: `python -m fairseq_cli.NAME WORDS…`; of the name "moa": moa-fairseq."""

    def __init__(self, name, *words, stdin=None, cwd=None, env=None):
        words = [str(word) for word in words]
        module = "moa_fairseq.cli" if name == "moa" else f"fairseq_cli.{name}"
        self.args = [sys.executable, "-m", module, *words]
        self.folder = tempfile.TemporaryDirectory()
        with contextlib.ExitStack() as files:
            paths = [Path(self.folder.name) / stream for stream in ("stdout", "stderr")]
            streams = [Stream(files.enter_context(open(path, "ab")).fileno()) for path in paths]
            place = (str(cwd or os.getcwd()), {**os.environ, **_ENVIRONMENT, **(env or {})})
            self.process = _FORKS.Process(
                target=command, args=(module, words, stdin, streams, *place)
            )
            self.process.start()

    def _said(self, stream):
        return (Path(self.folder.name) / stream).read_text(errors="replace")

    def said_until(self, words, seconds=240):
        """Wait until the command has written these words, or ended; returns its standard output so far."""
        end = time.monotonic() + seconds
        while (
            words not in self._said("stdout") + self._said("stderr") and self.process.is_alive()
        ):
            assert time.monotonic() < end, self._said("stdout")[-2000:]
            time.sleep(0.01)
        return self._said("stdout")

    def send_signal(self, number):
        send(self.process, number)

    def end(self, timeout=300):
        """Wait for its end; returns the process as `subprocess.run` does."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(
                f"{' '.join(self.args)}\n{self._said('stdout')[-3000:]}\nstill runs"
            )
        done = (self.process.exitcode, self._said("stdout"), self._said("stderr"))
        self.folder.cleanup()
        return subprocess.CompletedProcess(self.args, *done)
