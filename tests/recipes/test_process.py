"""The real executor on tiny Python programs."""

import sys

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.recipes import process


@pytest.fixture
def execute(monkeypatch, tmp_path):
    """execute(code, ...) runs a Python program as if it were a command."""
    monkeypatch.setattr(process, "to_argv", lambda command: [sys.executable, "-c", command[1]])

    def run(code, **options):
        process.Executor({"FROM_TEST": "yes"}).run(["program", code], tmp_path / "logs" / "x.log", **options)
        return (tmp_path / "logs" / "x.log").read_text()

    return run


def test_output_and_errors_are_kept_apart(execute, tmp_path):
    lines = []
    log = execute(
        "import os, sys; print('ä', os.environ['FROM_TEST']); print('warning', file=sys.stderr)",
        output=tmp_path / "out.txt",
        on_line=lines.append,
    )
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == "ä yes\n"
    assert lines == ["ä yes"]
    assert log.startswith("$ ") and log.endswith("warning\n")


def test_without_output_file_the_log_has_both(execute):
    assert "one\n" in execute("import sys; print('one'); print('two', file=sys.stderr)")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import sys; print('CUDA out of memory', file=sys.stderr); sys.exit(1)",
            ["status 1", "train.max_tokens"],
        ),
        ("raise OSError(28, 'No space left on device')", ["No space left", "free some space", "x.log"]),
        ("import os; os.kill(os.getpid(), 9)", ["signal 9", "memory"]),
        ("raise KeyError('odd')", ["status 1", "KeyError: 'odd'"]),
    ],
)
def test_failures_are_told_with_remedy_and_last_lines(execute, code, words):
    with pytest.raises(UserError) as error:
        execute(code)
    for word in words:
        assert word in str(error.value)


def test_an_interrupt_ends_the_child(execute, tmp_path):
    code = f"""
import pathlib, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path({str(tmp_path / "tidied")!r}).write_text("yes")
"""

    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(code, on_line=interrupt)
    assert (tmp_path / "tidied").read_text() == "yes"
