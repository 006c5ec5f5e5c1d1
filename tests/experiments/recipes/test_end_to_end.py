"""A tiny mixture through every stage for real; a killed training ends like an undisturbed one, and goes on
from the newest checkpoint that is whole."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.checkpoints import checkpoint_to_resume, prepared_data
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.loading import load_recipe
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.running import run_recipe
from moa_fairseq.experiments.recipes.train_log import read_records

pytestmark = pytest.mark.usefixtures("forked_commands")

ROOT = Path(__file__).resolve().parents[3]
EPOCHS = 12
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def config(small, write_config):
    """A mixture of width 16, trained for twelve epochs of a few updates."""
    small["model"].update(
        arch="moa_transformer_tiny", num_experts=4, experts_per_token=2, expert_dim=8
    )
    for side in ("encoder", "decoder"):
        del small["model"]["flags"][f"{side}-attention-heads"]
    small["model"]["flags"]["dropout"] = 0.1
    small["train"].update(
        criterion="label_smoothed_cross_entropy_with_routing", max_epoch=EPOCHS
    )
    small["train"]["flags"].update({"load-balance-coef": 0.01, "z-loss-coef": 0.001})
    return write_config(small)


def last_valid(folder):
    return [
        record for record in read_records(folder / "train.jsonl") if "valid_loss" in record
    ][-1]


def kill_in_training(number, records, command, folder):
    """Start the command line program and send it a signal when so many records are in train.jsonl."""
    with open(folder.with_suffix(".out"), "wb") as output:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=output)
        deadline = time.monotonic() + 200
        while len(list(read_records(folder / "train.jsonl"))) < records:
            assert process.poll() is None and time.monotonic() < deadline, output.name
            time.sleep(0.02)
        process.send_signal(number)
        process.wait()


@pytest.mark.thorough
@pytest.mark.slow
def test_all_stages_and_kill_and_resume(config, write_text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(config)
    cpu = Hardware()
    text = write_text(tmp_path / "text", "klm", 100, 10)
    undisturbed = tmp_path / "undisturbed"
    result = run_recipe(recipe, cpu, Options(data=text, save_dir=undisturbed))
    values = json.loads(result.read_text())
    assert (
        values["epochs"] == EPOCHS
        and values["parameters"] > 1000
        and values["checkpoints_averaged"] == 2
    )
    assert values["metrics"]["multi_bleu"] >= 0 and values["tokens_per_second"] > 0
    assert "min_load" in next(read_records(undisturbed / "train.jsonl"))

    killed = tmp_path / "killed"
    chance = random.Random(3)
    # The same fingerprint of the data: both runs train on the one prepared folder.
    command = f"{sys.executable} -m moa_fairseq.cli recipe {config} --stage train".split()
    command += f"--gpus 0 --data {prepared_data(undisturbed)} --save-dir {killed}".split()
    for number, least in ((signal.SIGKILL, 8), (signal.SIGTERM, 20)):
        kill_in_training(number, least + chance.randrange(12), command, killed)
        assert last_valid(killed)["epoch"] < EPOCHS
    run_recipe(recipe, cpu, Options(save_dir=killed, stage="train"))
    assert (killed / "train.log").read_text().count("Loaded checkpoint") == 2
    for key in ("epoch", "valid_loss", "valid_num_updates"):
        assert last_valid(killed)[key] == last_valid(undisturbed)[key]
    records = read_records(killed / "train.jsonl")
    updates = [record["num_updates"] for record in records if "num_updates" in record]
    assert len(updates) == len(set(updates))
    last = (run / "checkpoints" / "checkpoint_last.pt" for run in (killed, undisturbed))
    one, other = (torch.load(path, weights_only=False)["model"] for path in last)
    assert all(torch.equal(one[name], other[name]) for name in other)


def write_checkpoint(path, age=0):
    torch.save({"weights": torch.zeros(4000)}, path)
    os.utime(path, ns=(10**18 - age, 10**18 - age))


def damage(path):
    """One byte in the middle changes, as a failing disk does it; the file's end is whole."""
    content = bytearray(path.read_bytes())
    time = path.stat().st_mtime_ns
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
    passed_over = [line.split("/")[-1].split()[0] for line in said]
    assert passed_over == ["checkpoint_last.pt", "checkpoint_2_40.pt", "checkpoint2.pt"]
    for name in ("_1_20", "1"):
        damage(tmp_path / f"checkpoint{name}.pt")
    assert checkpoint_to_resume(tmp_path).name == "checkpoint_best.pt"
    (tmp_path / "checkpoint_best.pt").unlink()
    with pytest.raises(UserError, match="--restart"):
        checkpoint_to_resume(tmp_path)
    (tmp_path / "checkpoint_last.pt").write_bytes(b"PK half")
    with pytest.raises(UserError, match="--restart"):
        checkpoint_to_resume(tmp_path)
