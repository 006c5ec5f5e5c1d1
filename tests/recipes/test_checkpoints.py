"""Which checkpoint a training goes on from."""

import os

import pytest
import torch

from moa_fairseq.errors import UserError
from moa_fairseq.recipes.checkpoints import checkpoint_to_resume


def test_no_whole_checkpoint_at_all(tmp_path):
    (tmp_path / "checkpoint_last.pt").write_bytes(b"PK half")
    with pytest.raises(UserError, match="--restart"):
        checkpoint_to_resume(tmp_path)


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
