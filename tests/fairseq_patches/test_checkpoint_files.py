"""Checkpoints are written whole or not at all, and read only when they are what was written."""

import errno
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

import moa_fairseq
from moa_fairseq.errors import UserError
from moa_fairseq.fairseq_patches import checkpoint_files
from moa_fairseq.fairseq_patches.checkpoint_files import load_checkpoint

USER_DIR = Path(moa_fairseq.__file__).parent
NEW = {"model": {"w": torch.arange(200_000.0)}}
OLD = {"model": {"w": torch.zeros(3)}}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(checkpoint_files, "SECONDS_BETWEEN", 0)


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    torch.save(OLD, path)
    return path


def save(path):
    checkpoint_utils.torch_persistent_save(NEW, str(path))


def copy(path):
    source = path.with_name("checkpoint1.pt")
    torch.save(NEW, source)
    PathManager.copy(str(source), str(path), overwrite=True)


def only_whole_files(folder):
    """What stands in the folder under final names, all of it readable."""
    for path in folder.glob("*.pt"):
        load_checkpoint(path)
    return sorted(path.name for path in folder.iterdir())


class FullDisk:
    """os.write and the streams of Python get `room` bytes onto the disk, then ENOSPC, `times` times."""

    def __init__(self, monkeypatch, room, times):
        self.left, self.fdopen = times, os.fdopen
        self.room = room
        monkeypatch.setattr(os, "fdopen", self.open)

    def open(self, handle, *args, **options):
        stream = self.fdopen(handle, *args, **options)
        if self.left <= 0:
            return stream
        self.left -= 1
        disk, room = self, self.room

        class Stream:
            def __enter__(self):
                return self

            def __exit__(self, *error):
                stream.close()

            def __getattr__(self, name):
                return getattr(stream, name)

            def write(self, data):
                nonlocal room
                data = bytes(data)
                stream.write(data[:room])
                if len(data) > room:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                room -= len(data)
                return len(data)

        assert disk
        return Stream()


@pytest.mark.parametrize("write", [save, copy])
@pytest.mark.parametrize("room", [0, 100, 300_000])
def test_a_disk_that_is_full_for_a_moment(write, room, old, monkeypatch):
    FullDisk(monkeypatch, room, times=2)
    write(old)
    assert torch.equal(load_checkpoint(old)["model"]["w"], NEW["model"]["w"])
    assert not list(old.parent.glob("*.tmp"))
    with zipfile.ZipFile(old) as archive:
        assert archive.infolist()[0].header_offset == 0  # nothing of the first attempts before it


def test_a_second_attempt_does_not_go_on_behind_the_first(old, monkeypatch):
    """torch.save fails once, in the middle of the file."""
    torch_save = torch.save

    def failing(state, stream, **options):
        monkeypatch.setattr(torch, "save", torch_save)
        stream.write(b"PK" + bytes(1000))
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", failing)
    monkeypatch.setattr(checkpoint_utils.time, "sleep", lambda seconds: None)
    save(old)
    with zipfile.ZipFile(old) as archive:
        assert archive.infolist()[0].header_offset == 0
    assert load_checkpoint(old)["model"]["w"].numel() == 200_000


@pytest.mark.parametrize("write", [save, copy])
def test_a_disk_that_stays_full(write, old, monkeypatch):
    FullDisk(monkeypatch, 300_000, times=3)
    with pytest.raises(UserError, match=r"checkpoint_last\.pt could not be written .*is the disk full"):
        write(old)
    assert load_checkpoint(old)["model"]["w"].numel() == 3
    assert set(only_whole_files(old.parent)) <= {"checkpoint1.pt", "checkpoint_last.pt"}


def test_a_real_limit_of_the_system(old):
    """The system itself refuses to write more than 100 kB into a file."""
    script = (
        "import resource, sys, torch\n"
        "from fairseq import checkpoint_utils\n"
        "from moa_fairseq.fairseq_patches import checkpoint_files\n"
        "checkpoint_files.SECONDS_BETWEEN = 0\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "checkpoint_utils.torch_persistent_save({'w': torch.zeros(10**6)}, sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(old)], capture_output=True, text=True)
    assert done.returncode and "could not be written" in done.stderr, done.stderr
    assert only_whole_files(old.parent) == ["checkpoint_last.pt"] and load_checkpoint(old)["model"]


@pytest.mark.parametrize("write", [save, copy])
def test_what_did_not_reach_the_disk_is_never_renamed(write, old, monkeypatch):
    """A disk that loses bytes and reports success: the file is read before it gets its name."""
    fsync = os.fsync

    def lose(handle):
        fsync(handle)
        if os.fstat(handle).st_size > 500_000:
            os.pwrite(handle, b"\\0" * 64, 400_000)

    monkeypatch.setattr(os, "fsync", lose)
    with pytest.raises(UserError, match=r"could not be written .*Bad CRC-32"):
        write(old)
    assert load_checkpoint(old)["model"]["w"].numel() == 3
    assert set(only_whole_files(old.parent)) <= {"checkpoint1.pt", "checkpoint_last.pt"}


@pytest.mark.parametrize("write", ["save", "copy"])
def test_a_kill_between_writing_and_renaming(write, old, monkeypatch):
    script = (
        "import os, signal, sys\n"
        "sys.path.insert(0, sys.argv[3])\n"
        "import test_checkpoint_files as here\n"
        "from pathlib import Path\n"
        "os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)\n"
        "getattr(here, sys.argv[2])(Path(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", script, str(old), write, str(Path(__file__).parent)]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    assert load_checkpoint(old)["model"]["w"].numel() == 3
    left = {"checkpoint_last.pt.tmp", "checkpoint_last.pt", "checkpoint1.pt"}
    assert set(only_whole_files(old.parent)) <= left
    {"save": save, "copy": copy}[write](old)  # the next one writes over what was left
    assert load_checkpoint(old)["model"]["w"].numel() == 200_000
    assert not list(old.parent.glob("*.tmp"))


def test_a_fault_while_a_checkpoint_is_copied(old, monkeypatch):
    def fault(*paths):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", fault)
    with pytest.raises(UserError, match=r"checkpoint_last\.pt could not be written"):
        copy(old)
    assert only_whole_files(old.parent) == ["checkpoint1.pt", "checkpoint_last.pt"]
    assert load_checkpoint(old)["model"]["w"].numel() == 3


def test_asynchronous_writing_is_taken_back(fairseq, toy_data, tmp_path):
    (tmp_path / "iopath").mkdir()
    (tmp_path / "iopath" / "__init__.py").touch()  # fairseq begins only where it finds this library
    folder = tmp_path / "checkpoints"
    flags = ("--max-epoch", 1, "--write-checkpoints-asynchronously")
    done = fairseq.train(toy_data, folder, *flags, env={"PYTHONPATH": str(tmp_path)})
    assert "--write-checkpoints-asynchronously is ignored" in done.stdout + done.stderr
    assert {"checkpoint1.pt", "checkpoint_best.pt", "checkpoint_last.pt"} == set(only_whole_files(folder))


# --- reading --------------------------------------------------------------------------------------


def flipped(path, target):
    """A copy with one bit of a weight changed, in the middle of the largest part."""
    with zipfile.ZipFile(path) as archive:
        part = max(archive.infolist(), key=lambda info: info.file_size)
    data = bytearray(path.read_bytes())
    data[part.header_offset + 200 + part.file_size // 2] ^= 1
    target.write_bytes(data)
    return target


def test_one_changed_bit_is_noticed(old, tmp_path):
    torch.save(NEW, old)
    broken = flipped(old, tmp_path / "broken.pt")
    torch.load(broken, weights_only=True)  # torch itself sees nothing
    with pytest.raises(UserError, match=r"broken\.pt cannot be read \(Bad CRC-32.*changed on the disk"):
        load_checkpoint(broken)


def test_one_changed_bit_stops_fairseqs_commands(fairseq, toy_data, toy_checkpoint, tmp_path):
    broken = flipped(toy_checkpoint, tmp_path / "checkpoint_last.pt")
    options = ("--user-dir", USER_DIR, "--cpu", "--path", broken, "--num-workers", 0)
    for done in (
        fairseq("generate", toy_data, *options, check=False),
        fairseq.train(toy_data, tmp_path, check=False),
    ):
        assert done.returncode and "checkpoint_last.pt cannot be read (Bad CRC-32" in done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [broken]


def test_files_without_checksums_load(tmp_path):
    path = tmp_path / "legacy.pt"
    torch.save(OLD, path, _use_new_zipfile_serialization=False)
    assert load_checkpoint(path)["model"]["w"].numel() == 3
    if hasattr(torch.serialization, "set_crc32_options"):
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(OLD, path)
        finally:
            torch.serialization.set_crc32_options(True)
        assert load_checkpoint(path)["model"]["w"].numel() == 3


@pytest.fixture(params=["pipe", "/dev/zero", "folder", "link to nothing", "link to a pipe"])
def irregular(request, tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    if request.param == "pipe":
        os.mkfifo(path)
        return path, "a named pipe"
    if request.param == "folder":
        path.mkdir()
        return path, "a folder"
    if request.param == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
        return path, "a named pipe"
    nothing = request.param == "link to nothing"
    path.symlink_to("nowhere" if nothing else "/dev/zero")
    return path, "a link to a file that does not exist" if nothing else "a device"


def test_what_is_no_file_is_refused_before_it_is_opened(irregular):
    path, what = irregular
    for load in (
        load_checkpoint,
        checkpoint_utils.load_checkpoint_to_cpu,
        lambda path: checkpoint_utils.torch.load(str(path)),
    ):
        with pytest.raises(UserError, match=f"checkpoint_last.pt is {what}. Name an ordinary file"):
            load(str(path))


def test_training_does_not_begin_anew_beside_what_is_no_file(irregular):
    from fairseq.trainer import Trainer

    path, what = irregular
    with pytest.raises(UserError, match=f"checkpoint_last.pt is {what}"):
        Trainer.load_checkpoint(SimpleNamespace(), str(path))


def test_commands_say_what_is_no_file(fairseq, toy_data, tmp_path):
    pipe = tmp_path / "checkpoint_last.pt"
    os.mkfifo(pipe)
    options = ("--user-dir", USER_DIR, "--cpu", "--path", pipe)
    for done in (
        fairseq("generate", toy_data, *options, check=False, timeout=120),
        fairseq.train(toy_data, tmp_path, check=False, timeout=120),
    ):
        assert done.returncode and "checkpoint_last.pt is a named pipe" in done.stderr
