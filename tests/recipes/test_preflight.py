"""Traps of scale are told before anything runs; flags of execution leave the experiment what it is."""

import dataclasses
from pathlib import Path

import pytest

from moa_fairseq.cli import main
from moa_fairseq.data_prep.binarised import Prepared
from moa_fairseq.errors import UserError
from moa_fairseq.recipes import preflight
from moa_fairseq.recipes.hardware import Hardware, assumed_hardware
from moa_fairseq.recipes.launch.world import find_world
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.preflight import check_scale, check_schedule, check_train_command
from moa_fairseq.recipes.runner import Options, planned_commands
from moa_fairseq.recipes.steps import Run
from moa_fairseq.recipes.training import train_settings

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
V100S, A100S = assumed_hardware("V100", 8), assumed_hardware("A100", 8)
TWO_CPUS = Hardware(world=find_world(0, 2, 0, "head", {}))


@pytest.fixture
def recipe(small, write_config):
    path = write_config(small)
    return lambda *overrides: load_recipe(path, overrides)


@pytest.fixture
def fairscale(monkeypatch):
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize("flag", ["zero-sharding=os", "ddp-backend=fully_sharded", "ddp-backend=slowmo"])
def test_sharding_without_fairscale(recipe, flag, monkeypatch):
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"{flag.replace('=', ' ')}.*pip install fairscale"):
        check_scale(recipe(f"train.flags.{flag}"), V100S)


@pytest.mark.parametrize(
    ("overrides", "hardware", "message"),
    [
        (["train.flags.zero-sharding=os"], V100S, "fp16-no-flatten-grads"),
        (["train.flags.ddp-backend=fully_sharded"], A100S, "train.precision=fp16"),
        (["train.flags.ddp-backend=pytorch_ddp"], TWO_CPUS, "on GPUs only"),
        (["train.flags.memory-efficient-fp16=true"], A100S, "this run has bf16"),
        (["train.flags.memory-efficient-bf16=true"], Hardware(), "this run has fp32"),
    ],
)
def test_contradictions(recipe, fairscale, overrides, hardware, message):
    with pytest.raises(UserError, match=message):
        check_scale(recipe(*overrides), hardware)


@pytest.mark.parametrize(
    ("overrides", "hardware"),
    [
        (["train.flags.zero-sharding=os"], A100S),
        (["train.flags.zero-sharding=os", "train.flags.memory-efficient-fp16=true"], V100S),
        (["train.flags.ddp-backend=fully_sharded", "train.precision=fp16"], A100S),
        (["train.flags.ddp-backend=legacy_ddp"], TWO_CPUS),
    ],
)
def test_what_goes_together(recipe, fairscale, overrides, hardware):
    assert check_scale(recipe(*overrides), hardware) is None


def test_an_uneven_batch_is_told_loudly(recipe):
    warning = check_scale(recipe("train.effective_batch_tokens=40"), dataclasses.replace(V100S, gpus=7))
    assert warning.startswith("WARNING: 7 devices cannot share 40 tokens evenly; an update has 35 (-12.5%)")


def test_flags_of_execution_keep_the_experiment(small, write_config, tmp_path):
    small["reproduces"] = {"paper": "moa", "table": "1", "row": "x", "column": "BLEU"}
    path = write_config(small)

    def settings(recipe):
        prepared = Prepared(tmp_path, {}, "f")
        return train_settings(Run(recipe, Hardware(), prepared, tmp_path))

    base = settings(load_recipe(path))
    same = ["train.flags.ddp-backend=legacy_ddp", "model.flags.checkpoint-activations=true"]
    same += ["train.flags.save-interval-updates=500", "train.flags.keep-interval-updates=2"]
    recipe = load_recipe(path, same)
    assert recipe.reproduces and settings(recipe) == base
    other = load_recipe(path, ["train.flags.clip-norm=1.0"])
    assert other.reproduces is None and settings(other) != base
    # checkpoints that are averaged are a part of the experiment
    small["average"] = {"updates": 2}
    small["train"]["flags"].update({"save-interval-updates": 100})
    path = write_config(small)
    assert load_recipe(path, ["train.flags.save-interval-updates=500"]).reproduces is None


def schedule_warning(recipe, *arguments, hardware=V100S):
    training = next(c for c in planned_commands(recipe, hardware, Options()) if c[0] == "fairseq-train")
    return check_schedule(recipe, hardware, check_train_command(training), *arguments)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_schedule_ends_at_its_minimum(path):
    assert schedule_warning(load_recipe(path)) is None


def test_baevski_and_aulis_schedule_with_another_warm_up_never_anneals():
    recipe = load_recipe(ROOT / "configs" / "wikitext103_lm_base.yaml", ["train.flags.warmup-updates=240000"])
    warning = schedule_warning(recipe)
    assert warning.startswith("WARNING: the learning rate of the last update (286,000) is 0.93")
    for words in ("cosine", "0.0001", "train.max_update", "lr-period-updates"):
        assert words in warning


def test_a_shorter_training_is_told_of_the_schedule_that_it_does_not_finish():
    path = ROOT / "configs" / "quickstart_mlm.yaml"
    warning = schedule_warning(load_recipe(path, ["train.max_update=900"]))
    assert "(900)" in warning and "train.flags.total-num-update" in warning
    both = ["train.max_update=900", "train.flags.total-num-update=900"]
    assert schedule_warning(load_recipe(path, both)) is None


def test_updates_are_estimated_from_epochs_and_measured_on_data(toy_data, small, write_config):
    path = ROOT / "configs" / "wikitext103_mlm_transformer.yaml"
    assert "(7,840) is 0.0003, 49% of" in schedule_warning(load_recipe(path, ["train.max_epoch=35"]))
    small["data"]["recipe"] = "binarised"
    small["train"]["flags"].update({"lr-scheduler": "polynomial_decay", "total-num-update": 100})
    recipe = load_recipe(write_config(small))  # 3 epochs of a few updates each
    assert schedule_warning(recipe) is None  # nobody knows how many updates an epoch has
    assert "polynomial_decay" in schedule_warning(recipe, toy_data)


@pytest.mark.parametrize("scheduler", ["inverse_sqrt", "fixed"])
def test_a_schedule_without_a_minimum_is_not_warned_of(small, write_config, scheduler):
    small["train"]["flags"]["lr-scheduler"] = scheduler
    small["train"].update(max_epoch=None, max_update=10)
    assert schedule_warning(load_recipe(write_config(small))) is None


def test_the_end_of_a_tri_stage_schedule(small, write_config):
    small["train"].update(max_epoch=None, max_update=100)
    small["train"]["flags"].update({"lr-scheduler": "tri_stage", "decay-steps": 80, "warmup-steps": 20})
    path = write_config(small)
    assert schedule_warning(load_recipe(path)) is None
    assert "tri_stage" in schedule_warning(load_recipe(path, ["train.max_update=50"]))


def test_the_warning_is_printed_before_anything_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = ROOT / "configs" / "quickstart_mlm.yaml"
    line = ["recipe", str(path), "--dry-run", "--gpus", "0", "--set", "train.max_update=900"]
    assert main(line) == 0
    assert "WARNING: the learning rate of the last update (900)" in capsys.readouterr().out
