"""The real executor on tiny Python programs."""

import errno
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import portalocker
import pytest

import moa_fairseq
from moa_fairseq import process
from moa_fairseq.errors import Diverged, UserError
from moa_fairseq.experiments.records.json_files import append_json_line, check_appendable


@pytest.fixture
def execute(monkeypatch, tmp_path):
    """execute(code, ...) runs a Python program as if it were a command."""
    monkeypatch.setattr(process, "to_argv", lambda command: [sys.executable, "-c", command[1]])

    def run(code, **options):
        process.Executor({"FROM_TEST": "yes"}).run(
            ["program", code], tmp_path / "logs" / "x.log", **options
        )
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


def test_a_runs_own_environment_comes_before_the_callers(execute, monkeypatch):
    monkeypatch.setenv("FROM_TEST", "no")
    assert "\nyes\n" in execute("import os; print(os.environ['FROM_TEST'])")


def test_children_find_this_package_before_another_copy(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    first, *rest = process.environment_of_a_child()["PYTHONPATH"].split(os.pathsep)
    assert first == str(Path(moa_fairseq.__file__).resolve().parents[1]) and rest == [
        "elsewhere"
    ]


def test_without_output_file_the_log_has_both(execute):
    assert "one\n" in execute("import sys; print('one'); print('two', file=sys.stderr)")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import sys; print('CUDA out of memory', file=sys.stderr); sys.exit(1)",
            ["status 1", "train.max_tokens"],
        ),
        (
            "raise OSError(28, 'No space left on device')",
            ["No space left", "free some space", "x.log"],
        ),
        ("import os; os.kill(os.getpid(), 9)", ["signal 9", "memory"]),
        ("raise KeyError('odd')", ["status 1", "KeyError: 'odd'"]),
    ],
)
def test_failures_are_told_with_remedy_and_last_lines(execute, code, words):
    with pytest.raises(UserError) as error:
        execute(code)
    for word in words:
        assert word in str(error.value)


DIVERGED = "fairseq-train: error: The training has diverged: gradients are Nan/Inf."


@pytest.mark.parametrize(
    ("program", "words", "status", "kind"),
    [
        ("fairseq-train", DIVERGED, 1, Diverged),
        (
            "fairseq-train",
            "FloatingPointError: Minimum loss scale reached (0.0001)",
            1,
            Diverged,
        ),
        (
            "fairseq-train",
            "WARNING | NaN/Inf in a batch\nerror: No space left on device",
            1,
            UserError,
        ),
        ("fairseq-train", "killed", 1, UserError),
        ("moa-fairseq", "the recipe says so by its status", 3, Diverged),
        ("moa-fairseq", DIVERGED, 2, UserError),
    ],
)
def test_what_ended_a_program_is_told_by_this_attempt_alone(
    monkeypatch, tmp_path, program, words, status, kind
):
    """A log has all attempts, and an earlier one diverged or had no memory."""
    code = f"import sys; print({words!r}, file=sys.stderr); sys.exit({status})"
    monkeypatch.setattr(process, "to_argv", lambda command: [sys.executable, "-c", code])
    log = tmp_path / "x.log"
    log.write_text(f"{DIVERGED}\ntorch.OutOfMemoryError: CUDA out of memory\n")
    with pytest.raises(UserError) as error:
        process.Executor().run([program], log)
    assert type(error.value) is kind
    assert "CUDA" not in str(error.value) and "train.max_tokens" not in str(error.value)
    assert log.read_text().startswith(DIVERGED)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
@pytest.mark.parametrize("full", ["log", "output"])
def test_a_full_disk_names_the_file_that_was_written(monkeypatch, tmp_path, full):
    monkeypatch.setattr(process, "to_argv", lambda command: [sys.executable, "-c", command[1]])
    files = {"log": tmp_path / "x.log", "output": tmp_path / "out.txt"}
    (tmp_path / f"full-{full}").symlink_to("/dev/full")
    files[full] = tmp_path / f"full-{full}"
    with pytest.raises(UserError, match=rf"disk is full while writing \S+full-{full}\."):
        process.Executor().run(["program", "print('x' * 100)"], **files)


def test_an_interrupt_while_a_child_starts_ends_the_child(execute, interrupted_start):
    """Python prints and forgets what a handler raises in its own functions around a fork."""
    with pytest.raises(KeyboardInterrupt):
        execute("")
    assert interrupted_start[0].poll() is not None


def test_a_child_inherits_that_an_interrupt_is_ignored(execute, monkeypatch):
    """As in the background of a script: Ctrl-C in the terminal must not end the child."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        log = execute("import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)")
    finally:
        signal.signal(signal.SIGINT, before)
    assert "\nTrue\n" in log


def test_the_child_dies_with_a_killed_parent(tmp_path):
    """SIGKILL of the recipe must not leave a training that nobody watches and that holds the lock."""
    pid_file = tmp_path / "pid"
    child = (
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    parent = (
        "import sys\nfrom pathlib import Path\nfrom moa_fairseq import process\n"
        "process.to_argv = lambda command: [sys.executable, '-c', command[1]]\n"
        f"process.Executor().run(['program', {child!r}], Path({str(tmp_path / 'log')!r}))\n"
    )
    running = subprocess.Popen([sys.executable, "-c", parent])
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    running.kill()
    running.wait()
    wait_for(lambda: not alive(int(pid_file.read_text())))


def test_a_second_interrupt_does_not_save_the_child(tmp_path):
    pid_file = tmp_path / "pid"
    # a child that takes a while to go after the first signal
    child = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (time.sleep(2), os._exit(1)))\n"
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    # Where the tests run in the background SIGINT is ignored, and children inherit that.
    parent = (
        "import signal, sys\nfrom pathlib import Path\nfrom moa_fairseq import process\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "process.to_argv = lambda command: [sys.executable, '-c', command[1]]\n"
        f"process.Executor().run(['program', {child!r}], Path({str(tmp_path / 'log')!r}))\n"
    )
    running = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: pid_file.exists() and pid_file.read_text())
        for _ in range(2):
            running.send_signal(signal.SIGINT)
            time.sleep(0.7)
        assert running.wait(timeout=30) != 0
    finally:
        running.kill()
    assert not alive(int(pid_file.read_text()))


def test_a_signal_while_the_child_is_started_is_not_lost(tmp_path):
    """What a handler raises while Python forks is printed and ignored: the child then ran to its end."""
    parent = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from moa_fairseq import process\nfrom moa_fairseq.process import signals\n"
        "process.to_argv = lambda command: [sys.executable, '-c', command[1]]\n"
        "os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGTERM))\n"
        "process.STOP_SECONDS = 0.2  # a child that ignores Ctrl-C, as in the background\n"
        "command = ['program', 'import time; time.sleep(60)']\n"
        "with signals.terminate_as_interrupt():\n"
        f"    process.Executor().run(command, Path({str(tmp_path / 'log')!r}))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", parent], stderr=subprocess.PIPE, text=True, timeout=40
    )
    assert ended.returncode == -signal.SIGINT and "Exception ignored" not in ended.stderr


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_of_torchs_warnings_of_fairseq_one_is_silent(monkeypatch):
    """In this program and in those that it starts; users' own filters stay."""
    said = (
        "`torch.jit.script` is deprecated. Please switch to `torch.compile` or `torch.export`."
    )
    code = f"import warnings; warnings.warn({said!r}, FutureWarning); warnings.warn('other', FutureWarning)"
    for users in ("", "default"):
        monkeypatch.setenv("PYTHONWARNINGS", users)
        environment = process.environment_of_a_child()
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert "other" in done.stderr and "torch.jit" not in done.stderr
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moa_fairseq.register.__wrapped__()
        warnings.warn(said, FutureWarning, stacklevel=1)
        warnings.warn(said, DeprecationWarning, stacklevel=1)
    assert [warning.category for warning in caught] == [DeprecationWarning]


@pytest.mark.parametrize(
    "program, first", [("fairseq-train", "SIGTERM"), ("fairseq-generate", "SIGINT")]
)
def test_a_training_is_told_to_save_before_it_is_interrupted(
    monkeypatch, tmp_path, program, first
):
    """It saves a checkpoint at SIGTERM; other programs have nothing to save. Last lines are taken."""
    monkeypatch.setattr(process, "to_argv", lambda command: [sys.executable, "-c", command[1]])
    code = """
import signal, sys, time
def told(number, frame):
    print(signal.Signals(number).name, flush=True)
    sys.exit(1)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, told)
print("ready", flush=True)
time.sleep(60)
"""
    lines = []

    def interrupt(line):
        lines.append(line)
        if line == "ready":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.Executor().run([program, code], tmp_path / "x.log", on_line=interrupt)
    assert lines == ["ready", first]


def without_locks(number):
    def acquire(*arguments, **options):
        raise portalocker.LockException(
            OSError(number, os.strerror(number)), os.strerror(number)
        )

    return acquire


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
@pytest.mark.parametrize("patience", [0, math.inf])
def test_a_file_system_without_locks_is_no_other_run(monkeypatch, tmp_path, number, patience):
    """As NFS is without lockd; nobody is waited for."""
    monkeypatch.setattr(portalocker.Lock, "acquire", without_locks(number))
    with (
        pytest.raises(UserError, match="has no locks") as error,
        process.locked(tmp_path / "run", patience),
    ):
        pass
    assert os.strerror(number) in str(error.value) and str(tmp_path / "run") in str(error.value)
    assert "nother" not in str(error.value)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_lock_that_is_no_file_is_named(tmp_path, make):
    make(tmp_path / ".lock")
    with (
        pytest.raises(UserError, match=re.escape(str(tmp_path / ".lock"))),
        process.locked(tmp_path),
    ):
        pass


def test_a_line_is_not_appended_without_locks(monkeypatch, tmp_path):
    path = tmp_path / "records.jsonl"
    append_json_line(path, 1)
    monkeypatch.setattr(portalocker.Lock, "acquire", without_locks(errno.ENOLCK))
    for call in (lambda: append_json_line(path, 2), lambda: check_appendable(path)):
        with pytest.raises(UserError, match="has no locks"):
            call()
    assert path.read_text() == "1\n"
