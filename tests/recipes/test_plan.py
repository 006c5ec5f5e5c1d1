"""--plan and --dry-run of every recipe; the speed that a plan goes by."""

import json
from pathlib import Path

import pytest

from moa_fairseq.cli import main
from moa_fairseq.recipes.corpus_size import TABLE, known_size, measured_size
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.hydra import hydra_config
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.planner.plan import bcd_factor
from moa_fairseq.recipes.planner.throughput import (
    ASSUMED_UTILISATION,
    DEVICES,
    SECONDS_PER_LAYER,
    Row,
    expected_speed,
    read_rows,
    seconds_per_update,
)
from moa_fairseq.recipes.preflight import check_train_command, full_config
from moa_fairseq.recipes.runner import Options, planned_commands

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A directory without earlier runs, and a machine that stands outside of torchrun and Slurm."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def plan_of(capsys, *arguments):
    assert main(["recipe", *map(str, arguments), "--plan", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_has_a_plan_and_a_dry_run(path, elsewhere, capsys):
    report = plan_of(capsys, path)
    recipe = load_recipe(path)
    assert report["experiment"] == path.stem and report["parameters"] > 1e6
    assert [entry["count"] for entry in report["hardware"]] == [1, 8, 32] * 4
    # MAE's coordinate descent was measured beside its dense model; other routers take a time of their own.
    routed = recipe.model.num_experts is not None or "nobcd" in path.stem
    routed = routed or ("moh" in path.stem and "query-norm" not in recipe.model.flags.values())
    adaptive = recipe.train.criterion.startswith("adaptive")
    for entry in report["hardware"]:
        if adaptive:
            assert entry["memory"]["total"] is None and entry["fits"] is None
        else:
            assert entry["memory"]["total"] > 16 * report["parameters"] // entry["count"]
        assert entry["disk"]["checkpoint"] >= (8 if adaptive else 12) * report["parameters"]
        assert entry["disk"]["total"] >= 2 * entry["disk"]["checkpoint"]
        if recipe.train.effective_batch_tokens:
            assert abs(entry["tokens_per_update"] / recipe.train.effective_batch_tokens - 1) < 0.01
        if report["corpus"]:
            assert (recipe.train.max_update or entry["updates"]) >= entry["updates"] > 0
            assert entry["hours"] is None if routed else entry["hours"] > 0
        if not routed:
            assert entry["measured"] or "not measured" in entry["speed_origin"]
    assert main(["recipe", str(path), "--dry-run", "--gpus", "8", "--device-name", "A100"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if " fairseq-train " in line)
    used = 5 if path.stem in ("quickstart_moa", "quickstart_transformer") else 8  # of 1,024 tokens an update
    assert line.startswith(
        "$ fairseq-train" if used == 8 else "$ CUDA_VISIBLE_DEVICES=0,1,2,3,4 fairseq-train"
    )
    assert "--bf16" in line and f"--distributed-world-size {used} " in line
    training = next(c for c in planned_commands(recipe, Hardware(), Options()) if c[0] == "fairseq-train")
    config = hydra_config(training)
    assert config["optimization"]["lr"] == [recipe.train.flags["lr"]]
    assert config["model"]["_name"] == recipe.model.arch
    assert config["distributed_training"]["distributed_world_size"] == 1


def test_the_text_names_what_is_assumed(elsewhere, capsys):
    path = ROOT / "configs" / "wmt14_ende_moa_big.yaml"
    assert main(["recipe", str(path), "--plan", "--gpus", "8", "--device-name", "V100"]) == 0
    text = capsys.readouterr().out
    assert "199,974,912" in text  # MoA's printed 200M
    assert "8 V100" in text and "fp16" in text and "262,144" in text and "H100" not in text
    assert "not measured" in text or "measured:" in text or "estimate from" in text


def test_every_size_has_an_origin():
    table = json.loads(TABLE.read_text(encoding="utf-8"))["corpora"]
    assert all(entry["origin"] and 0 < entry["fill"] <= 1 and entry["experiments"] for entry in table)
    assert known_size(load_recipe(ROOT / "configs" / "wmt14_enfr_moa_big.yaml")).vocabulary == 44512


def test_measured_updates_are_those_of_the_training(small, write_config, toy_data):
    from fairseq.tasks import setup_task

    line = ["fairseq-train", str(toy_data), "--task", "translation", "--arch", "transformer"]
    line += ["--max-tokens", "60"]
    task = setup_task(full_config(check_train_command([*line, "-s", "en", "-t", "de"])).task)
    task.load_dataset("train")
    small["train"].update(max_tokens=60, effective_batch_tokens=240)
    recipe = load_recipe(write_config(small))
    size = measured_size(recipe, toy_data, 60)
    iterator = task.get_batch_iterator(
        task.dataset("train"),
        max_tokens=60,
        max_positions=(1024, 1024),
        required_batch_size_multiple=8,
        num_shards=2,
    )
    assert size.updates_per_epoch(240, devices=2, update_freq=2) == -(-len(iterator) // 2)
    assert (size.sentences, size.vocabulary) == (120, len(task.target_dictionary))
    assert size.source_tokens == int(task.dataset("train").src_sizes.sum())


def row(experiment="x", device="V100", count=1, speed=1000.0, macs=1e8, precision="fp16"):
    return Row(experiment, device, count, speed, macs, precision, f"{count} x {device}", "throughput/x.json")


def test_without_measurements_the_assumption_is_named():
    speed = expected_speed([], "x", "A100", 8, 1e8, "bf16")
    assert not speed.measured and "not measured" in speed.origin
    assert speed.tokens_per_second == pytest.approx(312e12 * ASSUMED_UTILISATION / 6e8 * 8)
    assert expected_speed([], "x", "CPU", 1, 1e8, "fp32") is None


def test_the_same_experiment_on_the_same_device_counts_first():
    rows = [row("y", speed=9.0), row("x", count=4, speed=4000.0), row("x", "A100", speed=7.0)]
    speed = expected_speed(rows, "x", "V100", 4, 1e8, "fp16")
    assert speed.measured and speed.tokens_per_second == 4000
    scaled = expected_speed(rows, "x", "V100", 8, 1e8, "fp16")
    assert not scaled.measured and scaled.tokens_per_second == 8000 and "scaled from 4 to 8" in scaled.origin


def test_the_time_of_a_mixture_is_measured_or_unknown(elsewhere, capsys):
    rows = [row("dense"), row("moa", "A100", speed=500.0)]
    assert expected_speed(rows, "moa", "V100", 1, 0.75e8, "fp16", is_mixture=True) is None
    assert expected_speed(rows, "moa", "A100", 1, 0.75e8, "bf16", is_mixture=True).tokens_per_second == 500
    names = [f"wikitext103_lm_{name}_262m.yaml" for name in ("transformer_xl", "moa")]
    dense, moa = (plan_of(capsys, ROOT / "configs" / name)["hardware"][0] for name in names)
    assert dense["hours"] > 0 and moa["hours"] is None  # 0.75 of the dense model's MACs, 1.27 of its time
    assert 0.6 < moa["memory"]["total"] / dense["memory"]["total"] < 1


def test_another_experiment_counts_by_its_operations_and_another_device_by_its_share():
    rows = [row("near", macs=1e8, speed=1000.0), row("far", macs=1e10, speed=1.0)]
    assert expected_speed(rows, "x", "V100", 2, 2e8, "fp16").tokens_per_second == pytest.approx(1000)
    share = 1000 * 6e8 / DEVICES["V100"].peak_half
    other = expected_speed(rows, "x", "H100", 1, 1.5e8, "bf16")
    assert other.tokens_per_second == pytest.approx(989e12 * share / 9e8) and "not measured" in other.origin


def test_rows_are_read_from_results(tmp_path):
    (tmp_path / "throughput").mkdir()
    values = {
        "experiment": "x",
        "hardware": "8 x NVIDIA A100-SXM4-80GB",
        "tokens_per_second": 5,
        "precision": "bf16",
    }
    (tmp_path / "throughput" / "a.json").write_text(json.dumps({**values, "macs_per_target_token": 3}))
    (tmp_path / "throughput" / "broken.json").write_text("{")
    (tmp_path / "throughput" / "running.json").write_text(json.dumps({**values, "tokens_per_second": None}))
    assert [(r.device, r.count, r.speed, r.macs, r.precision) for r in read_rows(tmp_path)] == [
        ("A100", 8, 5.0, 3, "bf16")
    ]
    assert {r.device for r in read_rows(ROOT / "results")} >= {"CPU"}


def entry_of(capsys, name, *arguments):
    (entry,) = plan_of(capsys, ROOT / "configs" / f"{name}.yaml", *arguments)["hardware"]
    return entry


def test_no_update_is_faster_than_its_kernels_can_be_launched(elsewhere, capsys):
    entry = entry_of(capsys, "iwslt14_deen_base", "--gpus", "8", "--device-name", "H200")
    seconds = entry["hours"] * 3600 / entry["updates"]
    assert seconds == pytest.approx(12 * SECONDS_PER_LAYER, rel=0.02)  # 6 + 6 layers
    assert "at least" in entry["speed_origin"] and f"{SECONDS_PER_LAYER * 1000:g} ms" in entry["speed_origin"]
    assert entry["tokens_per_second"] < 100_000
    slow = entry_of(capsys, "wmt14_ende_transformer_base", "--gpus", "1", "--device-name", "V100")
    assert "at least" not in slow["speed_origin"]


def test_the_floor_counts_each_step_of_accumulation():
    assert seconds_per_update(layers=12, update_freq=4) == 4 * seconds_per_update(layers=12, update_freq=1)


def test_what_was_measured_has_no_floor(elsewhere, capsys, small, write_config):
    rows = [row("x", "A100", speed=1e9)]
    speed = expected_speed(rows, "x", "A100", 1, 1e8, "bf16")
    assert speed.no_faster_than(1.0, 1000) == speed  # said to be measured: so it is
    assumed = expected_speed([], "x", "A100", 1, 1e6, "bf16").no_faster_than(1.0, 1000)
    assert assumed.tokens_per_second == 1000 and not assumed.measured


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("wmt14_ende_mae7", (4 * 1.04 + 1.85) / 5),
        ("wmt14_ende_uni_mae7", 1.04),
        ("wmt14_ende_base", 1.0),
        ("iwslt14_ende_mae7_transfer", 1.85),
    ],
)
def test_epochs_with_g_steps_cost_more(elsewhere, capsys, name, factor):
    recipe = load_recipe(ROOT / "configs" / f"{name}.yaml", ["pretrained=x"] if "transfer" in name else [])
    assert bcd_factor(recipe) == pytest.approx(factor)
    entry = entry_of(capsys, name, "--gpus", "1", "--device-name", "V100")
    assert ("coordinate descent" in entry["speed_origin"]) == (factor != 1)


def test_mae_takes_a_fifth_longer_than_its_baseline(elsewhere, capsys):
    few, many = ("--gpus", "1", "--device-name", "V100"), ("--gpus", "8", "--device-name", "H200")
    for family, machine in (("wmt14_ende", few), ("iwslt14_deen", many)):
        base, mae = (entry_of(capsys, f"{family}_{name}", *machine)["hours"] for name in ("base", "mae7"))
        assert mae / base == pytest.approx(1.2, abs=0.01)


def test_table_2_has_its_own_vocabulary_and_text(elsewhere, capsys):
    for path in sorted(ROOT.glob("configs/wikitext103_mlm_*.yaml")):
        corpus = plan_of(capsys, path, "--gpus", "1", "--device-name", "V100")["corpus"]
        assert corpus["vocabulary"] == 50265 and 117e6 < corpus["target_tokens"] < 118e6
    path = ROOT / "configs" / "wikitext103_mlm_transformer.yaml"
    report = plan_of(capsys, path, "--gpus", "1", "--device-name", "V100")
    assert report["parameters"] == pytest.approx(51.34e6, rel=0.005)  # as the paper prints
    assert report["hardware"][0]["updates_per_epoch"] == 224


def test_the_assumed_share_is_said_to_be_a_dense_models(elsewhere, capsys):
    path = ROOT / "configs" / "wmt14_ende_transformer_base.yaml"
    assert main(["recipe", str(path), "--plan", "--gpus", "8", "--device-name", "V100"]) == 0
    assert "13.7% of the peak assumed, what a dense Transformer reached" in capsys.readouterr().out


def test_devices_that_are_left_out_are_named(elsewhere, capsys):
    path = ROOT / "configs" / "iwslt14_deen_base.yaml"
    assert main(["recipe", str(path), "--plan", "--gpus", "32", "--device-name", "V100"]) == 0
    assert "32 V100: 16 of 32 devices are used" in capsys.readouterr().out
