"""The run folder: its lock, its memory, and which checkpoint training goes on from."""

import math
import os
import subprocess
import threading
import time

import pytest
import torch

from moa_fairseq.errors import UserError
from moa_fairseq.recipes.run_folder import RunState, checkpoint_to_resume, move_aside
from moa_fairseq.running.folder_lock import locked


def test_no_whole_checkpoint_at_all(tmp_path):
    (tmp_path / "checkpoint_last.pt").write_bytes(b"PK half")
    with pytest.raises(UserError, match="--restart"):
        checkpoint_to_resume(tmp_path)


def test_one_run_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(UserError, match="at work"), locked(tmp_path, patience=0.2):
        pass
    with locked(tmp_path):
        pass


def test_waiting_for_another_run_is_said_once(tmp_path, said):
    def wait():
        with locked(tmp_path, patience=math.inf):
            pass

    with locked(tmp_path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.02)
    waiting.join(20)
    assert len(said) == 1 and f"at work in {tmp_path} (process {os.getpid()})" in said[0]
    assert "waiting" in said[0] and not waiting.is_alive()


def test_a_child_keeps_the_lock_that_it_inherited(tmp_path):
    with locked(tmp_path) as descriptors:
        child = subprocess.Popen(["sleep", "60"], pass_fds=descriptors)
    with pytest.raises(UserError, match="at work"), locked(tmp_path, patience=0.2):
        pass
    child.kill()
    child.wait()
    with locked(tmp_path, patience=0.2):
        pass


@pytest.mark.parametrize("content", ["{", "[]", '{"train": 3}'])
def test_a_damaged_state_file_is_named(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"state\.json"):
        RunState(tmp_path)


def test_move_aside_never_overwrites(tmp_path):
    for number in (1, 2):
        (tmp_path / "run").mkdir()
        assert move_aside(tmp_path / "run") == tmp_path / f"run.old-{number}"
    assert move_aside(tmp_path / "run") is None


def write_checkpoint(path, age=0):
    torch.save({"weights": torch.zeros(4000)}, path)
    os.utime(path, ns=(10**18 - age, 10**18 - age))


def damage(path):
    """One byte in the middle changes, as a failing disk does it; the file's end is whole."""
    content, time = bytearray(path.read_bytes()), path.stat().st_mtime_ns
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    os.utime(path, ns=(time, time))


def test_the_newest_readable_checkpoint_is_taken(tmp_path, said):
    for age, name in enumerate(["_last", "_2_40", "2", "_1_20", "1"]):
        write_checkpoint(tmp_path / f"checkpoint{name}.pt", age)
    write_checkpoint(tmp_path / "checkpoint_best.pt")
    assert checkpoint_to_resume(tmp_path).name == "checkpoint_last.pt"
    for name in ("_last", "_2_40", "2"):
        damage(tmp_path / f"checkpoint{name}.pt")
    assert checkpoint_to_resume(tmp_path).name == "checkpoint_1_20.pt"
    assert [line.split("/")[-1].split(" is damaged")[0] for line in said] == [
        "checkpoint_last.pt",
        "checkpoint_2_40.pt",
        "checkpoint2.pt",
    ]
    for name in ("_1_20", "1"):
        damage(tmp_path / f"checkpoint{name}.pt")
    assert checkpoint_to_resume(tmp_path).name == "checkpoint_best.pt"
    (tmp_path / "checkpoint_best.pt").unlink()
    with pytest.raises(UserError, match="No checkpoint"):
        checkpoint_to_resume(tmp_path)
