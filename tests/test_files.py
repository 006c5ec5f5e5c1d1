"""Half a file never takes a name that could be mistaken for a result."""

import contextlib
import errno
import math
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fairseq import checkpoint_utils

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.records import json_files
from moa_fairseq.experiments.records.json_files import NUMBER, check_kinds, is_number
from moa_fairseq.files import atomic_folder, atomic_write, private_folder, user_cache
from moa_fairseq.plugin.patches.checkpoint_writing import save_checkpoint
from moa_fairseq.process import Executor, locked

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "mapping, holds", [({}, False), ({"score": None}, False), ({"score": 0}, True)]
)
def test_a_required_key_that_is_null_is_missing(mapping, holds):
    with contextlib.nullcontext() if holds else pytest.raises(UserError, match="lacks score"):
        check_kinds(mapping, {"score": NUMBER}, "x.json", "", required=("score",))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "new" / "file.txt"
    for text in ("first\n", "second é\n"):
        with atomic_write(path) as stream:
            stream.write(text)
        assert path.read_bytes() == text.encode("utf-8")
    assert names(path.parent) == ["file.txt"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_bytes_are_on_the_disk_before_the_file_gets_its_name_and_the_name_after(
    tmp_path, monkeypatch
):
    """Else a machine that loses its power may have a new name for an empty file."""
    events = []
    sync = os.fsync
    rename = os.replace

    def fsync(handle):
        place = os.readlink(f"/proc/self/fd/{handle}")
        events.append("folder" if place == str(tmp_path) else os.path.getsize(place))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(
        os, "replace", lambda new, old: (events.append("named"), rename(new, old))
    )
    with atomic_write(tmp_path / "file.txt") as stream:
        stream.write("seven é")
    assert events == [8, "named", "folder"]


FULL, QUOTA, BIG = (
    OSError(getattr(errno, name), name) for name in ("ENOSPC", "EDQUOT", "EFBIG")
)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ValueError("x"), FULL, QUOTA, BIG])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    expected = UserError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected) as raised, atomic_write(path, "wb") as stream:
        stream.write(b"half")
        raise failure
    if expected is UserError:
        assert ("ulimit -f" if failure is BIG else "disk is full") in str(raised.value)
    assert path.read_bytes() == b"old" and names(tmp_path) == ["file.bin"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x", tmp_path, Path("/dev/null")):
        with pytest.raises(UserError, match="Cannot write"), atomic_write(path):
            pass
    assert not Path("/dev/null").is_file()
    with open(tmp_path / "file") as stream:  # as /dev/stdout is, where it leads to a file
        link = Path(f"/proc/self/fd/{stream.fileno()}")
        with pytest.raises(UserError, match="not an ordinary file"), atomic_write(link):
            pass


def test_a_checkpoint_of_the_users_choice_leaves_its_neighbours(tmp_path):
    """OUT.tmp, which a killed training leaves behind, may be what somebody wants to rescue."""
    (tmp_path / "out.pt.tmp").write_text("mine")
    save_checkpoint({"a": 1}, tmp_path / "out.pt")
    assert (tmp_path / "out.pt.tmp").read_text() == "mine" and (tmp_path / "out.pt").is_file()


KILLED = """
import os, signal, sys
from moa_fairseq.files import atomic_write
with atomic_write(sys.argv[1], temporary=sys.argv[2] if len(sys.argv) > 2 else None) as stream:
    stream.write("half")
    stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_killed_writers_left_is_removed_and_what_living_ones_write_is_not(tmp_path):
    path = tmp_path / "out[1].txt"
    others = [".out[1].txt.notes.tmp", ".out[1].txt.old.abcdefgh.tmp", ".out1.txt.abcdefgh.tmp"]
    for name in others:
        (tmp_path / name).write_text("mine")
    others.append(".out[1].txt.pipepipe.tmp")  # which nobody writes to
    os.mkfifo(tmp_path / others[-1])
    for _ in range(2):
        assert (
            subprocess.run([sys.executable, "-c", KILLED, path]).returncode == -signal.SIGKILL
        )
        assert (
            len(names(tmp_path)) == len(others) + 1
        )  # the second one has removed the first one's
    with atomic_write(path) as slow:
        slow.write("slow")
        with atomic_write(path) as fast:
            fast.write("fast")
        assert path.read_text() == "fast" and len(names(tmp_path)) == len(others) + 2
    assert path.read_text() == "slow" and names(tmp_path) == sorted([*others, path.name])


def test_a_file_system_that_locks_every_new_file_is_named(tmp_path, monkeypatch):
    """It must not be asked for ever, with a file for each question."""

    def flock(handle, operation):
        raise BlockingIOError(errno.EAGAIN, "busy")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(UserError, match="lock"), atomic_write(tmp_path / "out.txt"):
        pass
    assert names(tmp_path) == []


def test_a_new_file_that_another_writer_took_for_a_leftover_is_made_again(
    tmp_path, monkeypatch
):
    """Before it was locked: until then nothing tells it from what a killed writer left."""
    made = []
    make = tempfile.mkstemp

    def taken(*words):
        handle, name = make(*words)
        made.append(name)
        if len(made) == 1:
            os.unlink(name)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", taken)
    with atomic_write(tmp_path / "out.txt") as stream:
        stream.write("whole")
    assert len(made) == 2 and (tmp_path / "out.txt").read_text() == "whole"


def test_a_folder_is_filled_under_another_name_and_what_kills_left_of_it_is_removed(tmp_path):
    program = (
        "import os; from pathlib import Path; from moa_fairseq.files import atomic_folder\n"
    )
    program += "with atomic_folder(Path('model')) as new: (new / 'half').touch(); {}"
    fill = [sys.executable, "-c", program.format("print(flush=True); input()")]
    living = subprocess.Popen(fill, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    living.stdout.readline()
    for _ in range(2):
        subprocess.run([*fill[:2], program.format("os._exit(1)")], cwd=tmp_path, check=False)
    (tmp_path / ".model.abcdefgh.tmp").mkdir()  # somebody else's
    (tmp_path / ".model.abcdefgh.tmp" / "new").touch()
    (tmp_path / ".model.12345678.tmp").symlink_to(tmp_path / ".model.abcdefgh.tmp")
    assert (
        len(names(tmp_path)) == 4
    )  # the second killed process removed what the first one left
    with pytest.raises(ValueError), atomic_folder(tmp_path / "model") as new:
        (new / "half").touch()
        raise ValueError
    assert len(names(tmp_path)) == 3 and not (tmp_path / "model").exists()
    living.communicate(b"\n")
    assert names(tmp_path) == [".model.12345678.tmp", ".model.abcdefgh.tmp", "model"]
    assert names(tmp_path / "model") == ["half"]
    with pytest.raises(UserError, match="model: "), atomic_folder(tmp_path / "model"):
        pass  # another process was faster
    assert names(tmp_path / "model") == ["half"]


def test_a_training_removes_what_a_killed_save_left(tmp_path):
    """Of a checkpoint that it does not write again, such as one of another update."""
    left = tmp_path / "checkpoint_1_20.pt"
    done = subprocess.run([sys.executable, "-c", KILLED, left, f"{left}.tmp"])
    assert done.returncode == -signal.SIGKILL and names(tmp_path) == ["checkpoint_1_20.pt.tmp"]
    checkpoint_utils.torch_persistent_save({"a": 1}, str(tmp_path / "checkpoint_1_40.pt"))
    assert names(tmp_path) == ["checkpoint_1_40.pt"]


@pytest.mark.parametrize("name", [".lock", "train.log", "generate-test.partial"])
def test_a_run_writes_through_no_link(tmp_path, name):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=f"{name} is a link"):
        if name == ".lock":
            with locked(tmp_path / "run"):
                pass
        elif name == "train.log":
            Executor().run(["moa-fairseq", "--help"], tmp_path / "run" / name)
        else:
            Executor().run(
                ["moa-fairseq", "--help"], tmp_path / "run" / "x.log", tmp_path / "run" / name
            )
    assert (tmp_path / "precious").read_text() == "precious"


def test_what_counts_as_a_number_in_a_file_of_json():
    for value, counts in (
        (1, True),
        (0.5, True),
        (True, False),
        (math.inf, False),
        (10**400, False),
        ("1", False),
    ):
        assert is_number(value) == counts


@pytest.mark.parametrize(("most", "is_read"), [(6, True), (5, False)])
def test_a_file_may_be_as_long_as_the_longest_that_is_read(
    tmp_path, monkeypatch, most, is_read
):
    (tmp_path / "x.json").write_text("[1, 2]")
    monkeypatch.setitem(json_files.MOST_BYTES, "JSON", most)
    with contextlib.nullcontext() if is_read else pytest.raises(UserError, match="5 bytes"):
        assert json_files.read_json(tmp_path / "x.json", "") == [1, 2]


def test_the_cache_lies_in_the_folder_that_is_set_or_below_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "moa_fairseq"
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    for unset in (
        lambda: monkeypatch.setenv("XDG_CACHE_HOME", ""),
        lambda: monkeypatch.delenv("XDG_CACHE_HOME"),
    ):
        unset()
        assert user_cache() == tmp_path / "home" / ".cache" / "moa_fairseq"


def test_what_will_be_run_lies_where_nobody_else_writes(tmp_path, monkeypatch):
    place = private_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    place.chmod(0o775)  # of a group of one's own, as many systems make
    assert private_folder(place) == place
    place.chmod(0o777)
    with pytest.raises(UserError, match=re.escape(str(place))):
        private_folder(place)
    place.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: place.stat().st_uid + 1)
    with pytest.raises(UserError, match=re.escape(str(place))):
        private_folder(place)


ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
IMPORT = "from moa_fairseq.files.utf8 import use_utf8"
BEGIN = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {IMPORT}; use_utf8(); "


@pytest.mark.parametrize(
    ("flags", "settings"),
    [((), {"PYTHONIOENCODING": "latin-1"}), (("-I",), ASCII), (("-X", "utf8=0"), ASCII)],
)
def test_whatever_the_locale_says_text_is_utf8(flags, settings):
    """-I: the environment is not read. The flags and arguments of the program stay."""
    program = BEGIN + "print(sys.stdin.readline().strip(), sys.argv[1], sys.flags.isolated)"
    command = [sys.executable, *flags, "-c", program, "x"]
    environment = {**os.environ, **settings}
    done = subprocess.run(
        command, env=environment, input="größe\n".encode(), capture_output=True, check=True
    )
    assert done.stdout.decode() == f"größe x {int('-I' in flags)}\n"


def test_names_of_files_are_utf8_whatever_the_locale_says(tmp_path):
    command = [sys.executable, "-c", BEGIN + "open(chr(252) + sys.argv[1], 'w').close()", "ö"]
    subprocess.run(command, env={**os.environ, **ASCII}, cwd=tmp_path, check=True)
    assert names(tmp_path) == ["üö"]


def test_a_written_text_is_utf8_in_a_program_that_does_not_call_use_utf8(tmp_path):
    program = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from moa_fairseq.files import atomic_write
with atomic_write("text") as stream: stream.write(chr(252))
"""
    command = [sys.executable, "-c", program]
    subprocess.run(command, env={**os.environ, **ASCII}, cwd=tmp_path, check=True)
    assert (tmp_path / "text").read_bytes() == b"\xc3\xbc"


@pytest.mark.parametrize(
    ("number", "told"), [(errno.EIO, True), (errno.ENOSPC, True), (errno.EINVAL, False)]
)
def test_a_name_that_may_be_lost_is_told_where_the_disk_fails(
    tmp_path, monkeypatch, number, told
):
    """A file system that cannot sync folders is none that failed."""
    sync = os.fsync

    def fsync(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(number, os.strerror(number))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    expected = pytest.raises((OSError, UserError)) if told else contextlib.nullcontext()
    with expected, atomic_write(tmp_path / "file.txt") as stream:
        stream.write("x")
