"""A tiny mixture through every stage for real; a killed training ends like an undisturbed one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moa_fairseq.recipes.checkpoints import prepared_data
from moa_fairseq.recipes.command import Options, run_recipe
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.train_log import read_records

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 12


@pytest.fixture
def config(small, write_config):
    """A mixture of width 16, trained for twelve epochs of a few updates."""
    small["model"].update(arch="moa_transformer_tiny", num_experts=4, experts_per_token=2, expert_dim=8)
    for side in ("encoder", "decoder"):
        del small["model"]["flags"][f"{side}-attention-heads"]
    small["model"]["flags"]["dropout"] = 0.1
    small["train"].update(criterion="label_smoothed_cross_entropy_with_routing", max_epoch=EPOCHS)
    small["train"]["flags"].update({"load-balance-coef": 0.01, "z-loss-coef": 0.001})
    return write_config(small)


@pytest.fixture
def text(tmp_path):
    """A hundred made-up sentences whose translation spells each word backwards."""
    folder, generator = tmp_path / "text", random.Random(7)
    folder.mkdir()
    words = [f"{a}{b}{c}" for a in "klm" for b in "aeo" for c in "rst"]
    for split, count in (("train", 100), ("valid", 10), ("test", 10)):
        lines = [generator.choices(words, k=generator.randint(3, 8)) for _ in range(count)]
        (folder / f"{split}.en").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"{split}.de").write_text(
            "".join(" ".join(word[::-1] for word in line) + "\n" for line in lines)
        )
    return folder


def last_valid(folder):
    return [record for record in read_records(folder / "train.jsonl") if "valid_loss" in record][-1]


def kill_in_training(config, data, folder):
    """Start the command line program and kill it, with all its children, after two epochs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "moa_fairseq.cli",
        "recipe",
        str(config),
        "--data",
        str(data),
        "--stage",
        "train",
        "--save-dir",
        str(folder),
        "--gpus",
        "0",
    ]
    with open(folder.with_suffix(".out"), "wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        deadline = time.monotonic() + 60
        while not (folder / "checkpoints" / "checkpoint2.pt").exists():
            assert process.poll() is None and time.monotonic() < deadline, folder.with_suffix(
                ".out"
            ).read_text()
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_all_stages_and_kill_and_resume(config, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, cpu = load_recipe(config), Hardware()
    undisturbed = tmp_path / "undisturbed"
    result = run_recipe(recipe, cpu, Options(data=text, save_dir=undisturbed))
    values = json.loads(result.read_text())
    assert values["epochs"] == EPOCHS and values["parameters"] > 1000 and values["checkpoints_averaged"] == 2
    assert values["metrics"]["multi_bleu"] >= 0 and values["tokens_per_second"] > 0
    assert "min_load" in next(read_records(undisturbed / "train.jsonl"))

    killed = tmp_path / "killed"
    data = prepared_data(undisturbed)
    # The same fingerprint of the data: both runs train on the one prepared folder.
    kill_in_training(config, data, killed)
    assert last_valid(killed)["epoch"] < EPOCHS
    run_recipe(recipe, cpu, Options(save_dir=killed, stage="train"))
    assert "Loaded checkpoint" in (killed / "train.log").read_text()
    for key in ("epoch", "valid_loss", "valid_num_updates"):
        assert last_valid(killed)[key] == last_valid(undisturbed)[key]
    updates = [
        record["num_updates"] for record in read_records(killed / "train.jsonl") if "num_updates" in record
    ]
    assert len(updates) == len(set(updates))
