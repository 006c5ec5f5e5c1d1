"""No device's share of an update is shorter than the longest sentence: fewer devices, or an error."""

import dataclasses
import json

import numpy
import pytest

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes import batch as batch_module
from moa_fairseq.experiments.recipes.batch import fit_devices, plan_batch
from moa_fairseq.experiments.recipes.hardware import Hardware, assumed_hardware, find_world
from moa_fairseq.experiments.recipes.loading import load_recipe
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.running import run_recipe
from moa_fairseq.experiments.recipes.schema import Train


def gpus(count):
    return assumed_hardware("A100", count)


@pytest.fixture
def quick(small, write_config, tmp_path, preprocess):
    """(recipe, data): updates of 1,024 tokens as the quickstart's, a longest sentence of 141 tokens."""
    data = tmp_path / "quick"
    values = {"source-lang": "en", "target-lang": "de", "joined-dictionary": True}
    for split, longest in (("train", 90), ("valid", 140), ("test", 90)):
        for language in ("en", "de"):
            (tmp_path / f"{split}.{language}").write_text(
                "".join("w " * n + "\n" for n in (longest, 7, 20))
            )
        values[f"{split}pref"] = str(tmp_path / split)
    preprocess({**values, "destdir": str(data)})
    small["data"]["recipe"] = "binarised"
    small["train"].update(effective_batch_tokens=1024, max_tokens=1024)
    return load_recipe(write_config(small)), data


@pytest.mark.parametrize(
    ("devices", "used", "share"),
    [(1, 1, 1024), (4, 4, 256), (7, 7, 146), (8, 7, 146), (16, 7, 146)],
)
def test_more_devices_than_the_longest_sentence_allows_are_left_out(
    quick, devices, used, share
):
    recipe, hardware, warning = fit_devices(quick[0], gpus(devices), quick[1])
    batch = plan_batch(recipe.train, hardware.devices)
    assert (hardware.gpus, batch.max_tokens) == (used, share)
    numbers = ",".join(map(str, range(used)))
    assert hardware.environment == (
        {} if used == devices else {"CUDA_VISIBLE_DEVICES": numbers}
    )
    assert batch.effective <= 1024 and batch.max_tokens >= 141 == recipe.train.min_tokens
    assert bool(warning) == (used != devices)
    if warning:
        assert f"{used} of {devices}" in warning and "141" in warning and "1,024" in warning


@pytest.mark.parametrize("devices", [8, 16])
def test_the_commands_and_the_run_use_fewer_devices(
    quick, devices, tmp_path, capsys, write_config, said
):
    recipe, data = quick
    path = tmp_path / "configs" / "small.yaml"
    line = f"recipe {path} --data {data} --dry-run --device-name A100".split()
    assert main([*line, "--gpus", str(devices)]) == 0
    out = capsys.readouterr().out
    assert f"7 of {devices} devices" in out
    assert "--max-tokens 146 --update-freq 1" in out and "--distributed-world-size 7" in out

    class Caught(Exception):
        pass

    class Executor:
        def __init__(self, environment, *_):
            self.environment = environment

        def run(self, command, *_, **__):
            assert command[command.index("--distributed-world-size") + 1] == "7"
            assert self.environment == {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}
            raise Caught

    options = Options(stage="train", data=data, save_dir=tmp_path / "run")
    with pytest.raises(Caught):
        run_recipe(recipe, gpus(devices), options, Executor)
    assert any(
        line.startswith("WARNING: ") and f"7 of {devices} devices" in line for line in said
    )


def test_machines_that_train_together_are_told_how_many_may(quick):
    together = dataclasses.replace(gpus(8), world=find_world(8, 2, 0, "head", {}))
    with pytest.raises(UserError, match=r"16 devices .* 141\. .* at most 7"):
        fit_devices(quick[0], together, quick[1])


def test_iwslt_on_32_devices_without_data_goes_by_the_known_size(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = ["recipe", "iwslt14_deen_base", "--gpus", "32", "--device-name", "A100"]
    assert main([*line, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "16 of 32 devices" in out and "--max-tokens 256 " in out
    assert main([*line, "--plan", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["hardware"]
    assert (entry["count"], entry["batch"]["devices"], entry["batch"]["max_tokens"]) == (
        32,
        16,
        256,
    )


@pytest.mark.parametrize(
    ("name", "devices", "used", "share"),
    [
        ("quickstart_mlm", 32, 16, 32),
        ("wikitext103_lm_base", 32, 32, 2304),
        ("quickstart_mlm", 8, 8, 64),
    ],
)
def test_no_sample_of_a_language_model_is_cut(shipped, name, devices, used, share):
    recipe, hardware, _ = fit_devices(shipped(name), gpus(devices), None)
    assert hardware.devices == used
    assert plan_batch(recipe.train, used).max_tokens == share >= recipe.train.min_tokens


def test_a_class_token_stands_before_the_longest_sentence(shipped, tmp_path, monkeypatch):
    sizes = numpy.array([7, 90, 20])
    monkeypatch.setattr(batch_module, "sentence_sizes", lambda *_: (sizes, sizes))
    for override, longest in (([], 91), (["train.flags.init-token=null"], 90)):
        assert (
            fit_devices(shipped("listops_transformer_8h", *override), gpus(1), tmp_path)[
                0
            ].train.min_tokens
            == longest
        )


def test_fewer_steps_of_accumulation_where_their_shares_would_be_too_short():
    train = Train(
        criterion="c",
        max_epoch=1,
        max_tokens=4000,
        effective_batch_tokens=4096,
        min_tokens=3000,
    )
    batch = plan_batch(train, 1)
    assert (batch.update_freq, batch.max_tokens) == (1, 4000)


def test_what_the_recipe_says_counts_and_what_no_device_could_take_does_not(quick):
    recipe, data = quick
    said, short, whole = (
        dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, **values))
        for values in ({"min_tokens": 64}, {"max_tokens": 100}, {"min_tokens": 1024})
    )
    fitted, hardware, _ = fit_devices(said, gpus(16), data)
    assert fitted.train.min_tokens == 64 and hardware.gpus == 16
    assert fit_devices(whole, gpus(2), data)[1].gpus == 1
    # Those of 141 are skipped anywhere
    assert fit_devices(short, Hardware(), data)[0].train.min_tokens == 91
    assert fit_devices(recipe, Hardware(), data)[1:] == (
        Hardware(),
        "",
    )  # a CPU stays one device
