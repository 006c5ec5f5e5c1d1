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


@pytest.fixture
def masked_config(write_config):
    return write_config(
        {
            "experiment": "masked",
            "summary": "a small masked language model",
            "data": {"recipe": "wikitext2_gpt2bpe"},
            "model": {
                "arch": "moa_roberta_tiny",
                **{"num_experts": 4, "experts_per_token": 2, "expert_dim": 8},
                "flags": {"encoder-layers": 1, "encoder-embed-dim": 16, "encoder-ffn-embed-dim": 16},
            },
            "train": {
                **{"task": "masked_lm", "criterion": "masked_lm_with_routing", "max_tokens": 240},
                **{"max_update": UPDATES, "keep_last_epochs": 2},
                "flags": {"tokens-per-sample": 24, "optimizer": "adam", "lr": 0.01, "num-workers": 0},
            },
            "score": {"headline": "masked_lm_ppl", "subsets": ["test"]},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(("file", "data"), [("config", "toy_data"), ("masked_config", "toy_wiki_data")])
def test_the_same_model(file, data, request, tmp_path, capsys):
    config, data = request.getfixturevalue(file), request.getfixturevalue(data)
    save = ("--save-dir", str(tmp_path / "by_hydra"))
    assert main(["recipe", str(config), "--gpus", "0", "--data", str(data), *save, "--hydra"]) == 0
    program, *arguments = capsys.readouterr().out.split()
    assert program == "fairseq-hydra-train"
    command = [sys.executable, "-m", "fairseq_cli.hydra_train", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    save = ("--save-dir", str(tmp_path / "by_train"))
    line = ["recipe", str(config), "--gpus", "0", "--data", str(data), *save, "--stage", "train"]
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


@pytest.mark.parametrize("inside", [True, False])
def test_text_of_language_models_is_binarised_data(masked_config, toy_wiki_data, tmp_path, capsys, inside):
    """The binarised folder, or the folder of `moa-fairseq prepare` around it."""
    data = toy_wiki_data if inside else toy_wiki_data.parent
    conf = tmp_path / "conf"
    line = ["recipe", str(masked_config), "--gpus", "0", "--data", str(data), "--hydra", str(conf)]
    assert main(line) == 0, capsys.readouterr().err
    values = yaml.safe_load((conf / "masked.yaml").read_text(encoding="utf-8"))
    assert values["task"]["data"] == str(toy_wiki_data.resolve()) and values["task"]["_name"] == "masked_lm"


def test_data_must_be_there(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", str(config), "--hydra"]) == 2
    assert "--hydra needs binarised data" in capsys.readouterr().err
