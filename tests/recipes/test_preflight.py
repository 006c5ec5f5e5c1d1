"""Traps of scale are told before anything runs; flags of execution leave the experiment what it is."""

import dataclasses

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.recipes import preflight
from moa_fairseq.recipes.hardware import Hardware, assumed_hardware
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.preflight import check_scale
from moa_fairseq.recipes.stages import train_settings
from moa_fairseq.recipes.world import find_world

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
        (["train.effective_batch_tokens=5"], V100S, "not even one"),
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


def test_flags_of_execution_keep_the_experiment(small, write_config):
    small["reproduces"] = {"paper": "moa", "table": "1", "row": "x", "column": "BLEU"}
    path = write_config(small)

    class Prepared:
        fingerprint = "f"

    base = train_settings(load_recipe(path), Prepared)
    same = ["train.flags.ddp-backend=legacy_ddp", "model.flags.checkpoint-activations=true"]
    same += ["train.flags.save-interval-updates=500", "train.flags.keep-interval-updates=2"]
    recipe = load_recipe(path, same)
    assert recipe.reproduces and train_settings(recipe, Prepared) == base
    other = load_recipe(path, ["train.flags.clip-norm=1.0"])
    assert other.reproduces is None and train_settings(other, Prepared) != base
    # checkpoints that are averaged are a part of the experiment
    small["average"] = {"updates": 2}
    small["train"]["flags"].update({"save-interval-updates": 100})
    path = write_config(small)
    assert load_recipe(path, ["train.flags.save-interval-updates=500"]).reproduces is None
