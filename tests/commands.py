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
import time
import warnings
from multiprocessing import forkserver
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["fairseq.model_parallel.megatron_trainer", "fairseq.sequence_scorer", "hydra", "sacrebleu"]
)
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


def command(name, words, stdin, folder, cwd, environment):
    """In the forked process: what the program fairseq-NAME does; its streams are files in `folder`."""
    os.environ.update(environment)
    os.chdir(cwd)
    warnings.simplefilter("ignore")
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    sys.stdin = io.StringIO(stdin or "")
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    logging.getLogger().handlers.clear()  # of an imported module; the command has its own
    sys.argv = [f"fairseq-{name.replace('_', '-')}", *words]
    try:
        importlib.import_module(f"fairseq_cli.{name}").cli_main()
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


class Command:
    """A command that runs: `python -m fairseq_cli.NAME WORDS…`."""

    def __init__(self, name, *words, stdin=None, cwd=None, env=None):
        words = [str(word) for word in words]
        self.args = [sys.executable, "-m", f"fairseq_cli.{name}", *words]
        self.folder = tempfile.TemporaryDirectory()
        for stream in ("stdout", "stderr"):
            (Path(self.folder.name) / stream).touch()
        with environment_of_commands():
            place = (self.folder.name, str(cwd or os.getcwd()), {**os.environ, **(env or {})})
            self.process = _FORKS.Process(target=command, args=(name, words, stdin, *place))
            self.process.start()

    def _said(self, stream):
        return (Path(self.folder.name) / stream).read_text(errors="replace")

    def said_until(self, words, seconds=240):
        """Wait until the command has written these words, or ended; returns its standard output so far."""
        end = time.monotonic() + seconds
        while words not in self._said("stdout") + self._said("stderr") and self.process.is_alive():
            assert time.monotonic() < end, self._said("stdout")[-2000:]
            time.sleep(0.01)
        return self._said("stdout")

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def end(self, timeout=300):
        """Wait for its end; returns the process as `subprocess.run` does."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(f"{' '.join(self.args)}\n{self._said('stdout')[-3000:]}\nstill runs")
        done = (self.process.exitcode, self._said("stdout"), self._said("stderr"))
        self.folder.cleanup()
        return subprocess.CompletedProcess(self.args, *done)
