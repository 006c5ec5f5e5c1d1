"""fairseq-hydra-train by a generated config ends with the very model of fairseq-train."""

import subprocess
import sys

import pytest
import torch
import yaml

from moa_fairseq.cli import main
from moa_fairseq.fairseq_compat import load_checkpoint

UPDATES = 6


@pytest.fixture
def config(small, write_config):
    small["model"].update(arch="moa_transformer_tiny", num_experts=4, experts_per_token=2, expert_dim=8)
    for side in ("encoder", "decoder"):
        del small["model"]["flags"][f"{side}-attention-heads"]
    small["model"]["flags"]["dropout"] = 0.1
    small["train"].update(criterion="label_smoothed_cross_entropy_with_routing", max_tokens=200)
    small["train"]["max_update"] = UPDATES
    small["train"]["flags"].update({"lr-scheduler": "inverse_sqrt", "warmup-updates": 3, "z-loss-coef": 0.01})
    small["train"]["flags"]["adam-betas"] = "(0.9, 0.98)"
    small["data"]["recipe"] = "binarised"
    return write_config(small)


@pytest.mark.slow
def test_the_same_model(config, toy_data, tmp_path, capsys):
    save = ("--save-dir", str(tmp_path / "by_hydra"))
    assert main(["recipe", str(config), "--gpus", "0", "--data", str(toy_data), *save, "--hydra"]) == 0
    program, *arguments = capsys.readouterr().out.split()
    assert program == "fairseq-hydra-train"
    command = [sys.executable, "-m", "fairseq_cli.hydra_train", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    save = ("--save-dir", str(tmp_path / "by_train"))
    line = ["recipe", str(config), "--gpus", "0", "--data", str(toy_data), *save, "--stage", "train"]
    assert main(line) == 0
    one, two = (
        load_checkpoint(tmp_path / name / "checkpoints" / "checkpoint_last.pt")
        for name in ("by_hydra", "by_train")
    )
    for state in (one, two):
        assert state["optimizer_history"][-1]["num_updates"] == UPDATES
    assert one["model"].keys() == two["model"].keys()
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, two["model"][name]), name


def test_the_file_is_short_and_its_paths_hold_anywhere(config, toy_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", str(config), "--gpus", "0", "--data", str(toy_data), "--hydra", "conf"]) == 0
    text = (tmp_path / "conf" / "small.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    assert "# The same as: fairseq-train" in text and len(text.splitlines()) < 120
    assert values["checkpoint"]["save_dir"] == str(tmp_path / "runs" / "small" / "checkpoints")
    assert values["optimizer"] == {"_name": "adam", "adam_betas": "(0.9, 0.98)"}
    assert values["criterion"]["sentence_avg"] == "${optimization.sentence_avg}"


def test_data_must_be_there(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", str(config), "--hydra"]) == 2
    assert "--hydra needs binarised data" in capsys.readouterr().err
