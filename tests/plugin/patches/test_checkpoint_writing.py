"""Checkpoints are written whole or not at all, and read only when they are what was written."""

import errno
import itertools
import os
import resource
import signal
import zipfile
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches import checkpoint_reading, checkpoint_writing
from moa_fairseq.plugin.patches.checkpoint_reading import load_checkpoint

NEW = {"model": {"w": torch.arange(600_000.0)}}
OLD = {"model": {"w": torch.zeros(3)}}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(checkpoint_writing, "SECONDS_BETWEEN", 0)


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
    """A stream with room for so many bytes."""

    def __init__(self, stream, room):
        self.stream = stream
        self.room = room

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stream.close()

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, data):
        data = bytes(data)
        self.stream.write(data[: self.room])
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(data)
        return len(data)


@pytest.mark.parametrize("write", [save, copy])
@pytest.mark.parametrize("room, times", [(300_000, 2), (0, 3)])
def test_a_disk_that_is_full_for_a_moment(write, room, times, old, monkeypatch):
    """Of three attempts the first two fail, or all of them."""
    fdopen = os.fdopen
    attempts = itertools.count()

    def opened(*args, **options):
        stream = fdopen(*args, **options)
        return FullDisk(stream, room) if next(attempts) < times else stream

    monkeypatch.setattr(os, "fdopen", opened)
    if times == 2:
        write(old)
        assert torch.equal(load_checkpoint(old)["model"]["w"], NEW["model"]["w"])
        with zipfile.ZipFile(old) as archive:
            # Nothing of the first attempts before it
            assert archive.infolist()[0].header_offset == 0
    else:
        with pytest.raises(
            UserError, match=r"checkpoint_last\.pt .*(No space left|is the disk full)"
        ) as refused:
            write(old)
        assert "training" not in str(refused.value), "average, convert and export write, too"
        assert load_checkpoint(old)["model"]["w"].numel() == 3
    assert set(only_whole_files(old.parent)) <= {"checkpoint1.pt", "checkpoint_last.pt"}


def test_a_real_limit_of_the_system(old):
    """The system itself refuses to write more than 100 kB into a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"could not be written.*ulimit -f"):
            save(old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert only_whole_files(old.parent) == ["checkpoint_last.pt"]
    assert load_checkpoint(old)["model"]["w"].numel() == 3


def test_a_place_that_cannot_be_written_is_tried_once(tmp_path, caplog):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as error:
        save(tmp_path / "file" / "checkpoint_last.pt")
    assert "Cannot write" in str(error.value)
    assert "full" not in str(error.value).rpartition(": ")[2]
    assert "trying again" not in caplog.text


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_what_the_system_lacks_is_no_damage_of_the_file(old, monkeypatch, error):
    def load(*args, **options):
        raise error

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(type(error)):
        load_checkpoint(old)


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


@pytest.mark.parametrize("write", [save, copy])
def test_a_kill_between_writing_and_renaming(write, old):
    child = os.fork()
    if not child:
        os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
        try:
            write(old)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert load_checkpoint(old)["model"]["w"].numel() == 3
    left = {"checkpoint_last.pt.tmp", "checkpoint_last.pt", "checkpoint1.pt"}
    assert set(only_whole_files(old.parent)) <= left
    write(old)  # the next one writes over what was left
    assert load_checkpoint(old)["model"]["w"].numel() == NEW["model"]["w"].numel()
    assert not list(old.parent.glob("*.tmp"))


@pytest.mark.parametrize(
    "name", ["notes.tmp", "train.log.tmp", "model.pt.tmp", "checkpoint.tmp"]
)
def test_temporary_files_of_others_stay(old, name):
    leftover = old.with_name("checkpoint_1_50.pt.tmp")
    leftover.write_bytes(b"half")
    old.with_name(name).write_text("theirs")
    save(old)
    assert old.with_name(name).read_text() == "theirs"
    assert not leftover.exists()


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
    (
        tmp_path / "iopath" / "__init__.py"
    ).touch()  # fairseq begins only where it finds this library
    folder = tmp_path / "checkpoints"
    flags = ("--max-epoch", 1, "--write-checkpoints-asynchronously")
    done = fairseq.train(toy_data, folder, *flags, env={"PYTHONPATH": str(tmp_path)})
    assert "--write-checkpoints-asynchronously is ignored" in done.stdout + done.stderr
    assert {"checkpoint1.pt", "checkpoint_best.pt", "checkpoint_last.pt"} == set(
        only_whole_files(folder)
    )


def test_a_caller_may_have_fewer_settings_than_fairseqs_commands():
    """Those that fairseq's own functions read."""
    cfg = SimpleNamespace(
        no_save=True, save_dir="", restore_file="none.pt", optimizer_overrides="{}"
    )
    cfg.finetune_from_model = None
    for name in ("optimizer", "lr_scheduler", "meters", "dataloader"):
        setattr(cfg, f"reset_{name}", False)
    trainer = MagicMock(data_parallel_rank=1, checkpoint_suffix="")
    trainer.load_checkpoint.return_value = None
    assert checkpoint_utils.save_checkpoint(cfg, trainer, None, None) is None
    assert checkpoint_utils.load_checkpoint(cfg, trainer)[0] is None


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_weights_that_diverged_replace_no_good_ones(old, value):
    state = {"model": {"w": torch.ones(2), "diverged": torch.tensor([1.0, float(value)])}}
    with pytest.raises(UserError, match=r"checkpoint_last\.pt was not written.* in diverged"):
        checkpoint_utils.torch_persistent_save(state, str(old))
    assert only_whole_files(old.parent) == ["checkpoint_last.pt"]
    crash = old.with_name("crash.pt")  # fairseq saves it to be looked into
    checkpoint_utils.torch_persistent_save(state, str(crash))
    with pytest.raises(
        UserError, match=r"crash\.pt holds .* in diverged: its training had diverged"
    ):
        load_checkpoint(crash)


def test_weights_of_a_byte_that_diverged_are_not_written(old):
    weight = torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)
    with pytest.raises(
        UserError, match=r"checkpoint_last\.pt was not written.* NaN in diverged"
    ):
        checkpoint_utils.torch_persistent_save({"model": {"diverged": weight}}, str(old))


# --- reading --------------------------------------------------------------------------------------


def test_one_changed_bit_is_noticed(old, tmp_path):
    """In the middle of a weight."""
    torch.save(NEW, old)
    with zipfile.ZipFile(old) as archive:
        part = max(archive.infolist(), key=lambda info: info.file_size)
    data = bytearray(old.read_bytes())
    data[part.header_offset + 200 + part.file_size // 2] ^= 1
    (tmp_path / "broken.pt").write_bytes(data)
    torch.load(tmp_path / "broken.pt", weights_only=True)  # torch itself sees nothing
    for load in (load_checkpoint, checkpoint_utils.load_checkpoint_to_cpu):
        with pytest.raises(
            UserError, match=r"broken\.pt cannot be read \(Bad CRC-32.*changed on the disk"
        ):
            load(str(tmp_path / "broken.pt"))


@pytest.mark.parametrize("before", range(16))
def test_a_bytearray_is_seen_wherever_it_stands(before, tmp_path, monkeypatch):
    """Beyond the first piece that is read, and across the border of two."""
    monkeypatch.setattr(checkpoint_reading, "_CHUNK", 16)
    path = tmp_path / "planted.pt"
    path.write_bytes(b"\x80\x02" + b"0" * (40 + before) + b"cbuiltins\nbytearray\n" + b"0" * 40)
    with pytest.raises(UserError, match=r"refused: it holds builtins\.bytearray"):
        load_checkpoint(path)


def test_files_without_checksums_load(tmp_path):
    path = tmp_path / "legacy.pt"
    torch.save(OLD, path, _use_new_zipfile_serialization=False)
    assert load_checkpoint(path)["model"]["w"].numel() == 3
    if hasattr(torch.serialization, "set_crc32_options"):  # torch >= 2.6
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(OLD, path)
        finally:
            torch.serialization.set_crc32_options(True)
        assert load_checkpoint(path)["model"]["w"].numel() == 3


@pytest.mark.parametrize(
    "kind, what",
    [
        ("pipe", "a named pipe"),
        ("folder", "a folder"),
        ("/dev/zero", "a device"),
        ("nowhere", "a link to a file that does not exist"),
        ("pipe behind a link", "a named pipe"),
    ],
)
def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path, kind, what):
    """And a training does not begin anew beside it."""
    path = tmp_path / "checkpoint_last.pt"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        if "link" in kind:
            os.mkfifo(tmp_path / kind)
        path.symlink_to(tmp_path / kind)
    for load in (
        load_checkpoint,
        checkpoint_utils.load_checkpoint_to_cpu,
        checkpoint_utils.torch.load,
        lambda path: Trainer.load_checkpoint(SimpleNamespace(), path),
    ):
        with pytest.raises(
            UserError, match=f"checkpoint_last.pt is {what}. Name an ordinary file"
        ):
            load(str(path))
