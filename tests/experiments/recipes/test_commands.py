"""YAML → command lines: batch arithmetic, precision by hardware, flags, processes that train together."""

import contextlib
import shlex

import pytest
import torch

from moa_fairseq import process
from moa_fairseq.cli import Console, reporting_to
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.batch import plan_batch
from moa_fairseq.experiments.recipes.hardware import (
    Hardware,
    World,
    choose_devices,
    detect_hardware,
    device_kind,
    find_world,
)
from moa_fairseq.experiments.recipes.loading import load_recipe
from moa_fairseq.experiments.recipes.precision import precision_name
from moa_fairseq.experiments.recipes.prepare_stage import show_corpus_line
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.running import run_recipe
from moa_fairseq.experiments.recipes.schema import Model, Train

CPU = Hardware()
AMX = Hardware(bfloat16_units=True)
V100 = Hardware(1, "V100", (7, 0), ("0",))
A100 = Hardware(8, "A100", (8, 0), tuple("01234567"))


def plan(effective, max_tokens, devices):
    train = Train(
        max_tokens=max_tokens, criterion="c", effective_batch_tokens=effective, max_epoch=1
    )
    return plan_batch(train, devices)


@pytest.mark.parametrize(
    ("effective", "max_tokens", "devices", "freq", "per_device"),
    [
        (262144, 8192, 1, 32, 8192),
        (262144, 8192, 8, 4, 8192),
        (262144, 8192, 32, 1, 8192),
        (
            262144,
            8192,
            64,
            1,
            4096,
        ),  # more devices than it needs: smaller batches, not a bigger update
        (262144, 8192, 3, 11, 7943),  # 3 does not divide: 10 steps would exceed max_tokens
        (8192, 4096, 1, 2, 4096),
        (2048, 4096, 1, 1, 2048),
        (None, 4096, 4, 1, 4096),
    ],
)
def test_the_effective_batch_holds_on_any_number_of_devices(
    effective, max_tokens, devices, freq, per_device
):
    batch = plan(effective, max_tokens, devices)
    assert (batch.update_freq, batch.max_tokens) == (freq, per_device)
    assert batch.max_tokens <= max_tokens
    if effective:
        assert 0 <= effective - batch.effective < devices * freq
    assert ("rounding" in batch.describe()) == bool(effective and effective % devices)
    assert plan(40, 400, 7).deviation == -1 / 8


@pytest.mark.parametrize(
    ("precision", "hardware", "expected"),
    [
        ("auto", CPU, "fp32"),
        ("auto", V100, "fp16"),
        ("auto", A100, "bf16"),
        ("fp32", A100, "fp32"),
        ("fp16", A100, "fp16"),
        ("auto", Hardware(1, "P100", (6, 0)), "fp32"),
        ("fp16", CPU, None),
        ("bf16", V100, None),
        ("bf16", CPU, None),
    ],
)
def test_precision_follows_the_hardware(precision, hardware, expected):
    refused = (
        contextlib.nullcontext()
        if expected
        else pytest.raises(UserError, match=r"train\.precision")
    )
    with refused:
        assert precision_name(precision, hardware) == expected


@pytest.mark.parametrize(
    ("arch", "flags", "expected"),
    [
        ("moa_transformer_base", {}, "amp"),
        ("transformer_lm_gpt", {}, "amp"),
        ("moa_roberta_8k8e128d", {}, "amp"),
        ("transformer_tiny", {}, "fp32"),
        ("transformer_tiny", {"encoder-embed-dim": 512}, "amp"),
    ],
)
def test_wide_models_train_in_bfloat16_on_cpus_that_have_units_for_it(arch, flags, expected):
    model = Model(arch=arch, flags=flags)
    assert precision_name("auto", AMX, model) == expected
    assert precision_name("auto", CPU, model) == precision_name("fp32", AMX, model) == "fp32"
    assert precision_name("amp", CPU, model) == "amp"


def test_the_least_gpu_decides_for_all(monkeypatch):
    """fp16 on a machine with an A100 and a V100; its numbers are of neither card."""
    gpus = [("NVIDIA A100-SXM4-80GB", (8, 0)), ("Tesla V100-SXM2-32GB", (7, 0))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpus[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index][1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    found = detect_hardware()
    assert (found.gpus, found.capability, found.visible) == (2, (7, 0), ("3", "5"))
    assert device_kind(found.name) == "unknown" and all(name in found.name for name, _ in gpus)
    del gpus[1]
    assert (
        detect_hardware().capability == (8, 0) and device_kind(detect_hardware().name) == "A100"
    )


def test_adaptive_inputs_do_not_train_under_autocast():
    """fairseq writes the bands' bfloat16 into a float32 tensor."""
    model = Model(arch="transformer_lm_wiki103")
    assert precision_name("auto", AMX, model) == "fp32"
    with pytest.raises(UserError, match="adaptive inputs"):
        precision_name("amp", CPU, model)


@pytest.mark.parametrize(("hardware", "warned"), [(CPU, True), (AMX, False), (A100, False)])
def test_bfloat16_without_units_for_it_is_slow(hardware, warned, small, write_config):
    small["train"]["precision"] = "amp"
    lines = []
    with reporting_to(Console(lines.append)):
        run_recipe(
            load_recipe(write_config(small)), hardware, Options(stage="train"), dry_run=True
        )
    assert any("train.precision=fp32" in line for line in lines) == warned


def test_choice_of_devices():
    assert choose_devices(A100, None, False) == A100
    two = choose_devices(A100, 2, False)
    none = choose_devices(A100, 0, False)
    assert (two.gpus, none.gpus) == (2, 0)
    assert two.environment == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert A100.environment == CPU.environment == none.environment == {}
    with pytest.raises(UserError, match="--gpus 2"):
        choose_devices(CPU, 2, False)
    assert precision_name("auto", choose_devices(CPU, 2, True)) == "fp16"
    with pytest.raises(UserError, match="--gpus -1"):
        choose_devices(CPU, -1, False)


def test_flags():
    values = {
        "a": 1,
        "b": True,
        "c": False,
        "d": None,
        "e": [1, 2],
        "f": -1,
        "g": "(0.9, 0.98)",
    }
    assert process.flags(values) == [
        "--a",
        "1",
        "--b",
        "--e",
        "1",
        "2",
        "--f=-1",
        "--g",
        "(0.9, 0.98)",
    ]


def test_the_printed_line_means_what_is_executed():
    command = ["fairseq-train", "a folder", "--adam-betas", "(0.9, 0.98)"]
    assert shlex.split(process.to_shell(command)) == command
    assert process.to_shell(command, {"A": "1,2"}).startswith("A=1,2 fairseq-train")
    assert process.to_argv(command)[1:] == ["-u", "-m", "fairseq_cli.train", *command[1:]]


def test_a_headline_of_another_chain_is_scored(small, write_config, tmp_path, shown):
    path = write_config(small)

    def line(*overrides):
        (command,) = shown(load_recipe(path, overrides), CPU, Options(stage="score"))
        return process.to_shell(command)

    assert "--also" not in line() and "--also" not in line("score.headline=sacrebleu")
    assert "--also moa-release --remove-bpe none" in line("score.headline=moa_release_bleu")
    assert "--also get-ende-bleu --remove-bpe none" in line("score.flags.also=get-ende-bleu")


def test_train_command_of_a_mixture(small, write_config, tmp_path, shown):
    small["model"].update(
        arch="moa_transformer_tiny", num_experts=8, experts_per_token=4, expert_dim=16
    )
    recipe = load_recipe(write_config(small))
    options = Options(stage="train")
    line = process.to_shell(shown(recipe, CPU, options)[0])
    assert (
        "--num-experts 8 --experts-per-token 4 --expert-dim 16 --share-all-embeddings" in line
    )
    assert line.endswith("--distributed-world-size 1 --cpu")
    assert "--cpu" not in shown(recipe, A100, options)[0]


@pytest.mark.parametrize(("said", "on_cpu", "on_gpu"), [(None, "0", None), (2, "2", "2")])
def test_on_a_cpu_the_training_loads_its_batches_itself(
    small, write_config, said, on_cpu, on_gpu, shown
):
    small["train"]["flags"].pop("num-workers", None)
    if said is not None:
        small["train"]["flags"]["num-workers"] = said
    recipe = load_recipe(write_config(small))
    for hardware, workers in ((CPU, on_cpu), (A100, on_gpu)):
        (line,) = shown(recipe, hardware, Options(stage="train"))
        assert (
            line[line.index("--num-workers") + 1] if "--num-workers" in line else None
        ) == workers


def test_without_averaging_the_best_checkpoint_is_evaluated(
    small, write_config, tmp_path, shown
):
    small["average"] = None
    recipe = load_recipe(write_config(small))
    options = Options(stage="generate", save_dir=tmp_path / "run")
    (line,) = shown(recipe, CPU, options)
    assert line[line.index("--path") + 1] == str(
        tmp_path / "run" / "checkpoints" / "checkpoint_best.pt"
    )


def test_the_dry_run_of_the_embedded_corpus_begins_with_it(small, write_config, shown):
    small["data"]["recipe"] = "embedded"
    planned = shown(load_recipe(write_config(small)), CPU, Options())
    assert [command[0] for command in planned[:2]] == ["moa-fairseq", "fairseq-preprocess"]
    assert planned[0][1] == "corpus"
    assert planned[1][planned[1].index("--destdir") + 1] == planned[2][1]


# --- several processes ----------------------------------------------------------------------

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
TORCHRUN.update(MASTER_ADDR="a", MASTER_PORT="1", TORCHELASTIC_RUN_ID="x")


def test_of_the_corpus_a_run_shows_what_tells_something(said):
    packages = [
        f"[{number:2}/42] p{number} 1.0 (1.0 MB): {number} clean pairs"
        for number in range(1, 43)
    ]
    gap = "[ 3/42] p3 1.0: left out. No network."
    end = "24,357 unique pairs from 42 packages (117 MB) in data: built (96.8 s)"
    table = [
        "package  pairs",
        "-------  -----",
        "p10      1,035",
        "train  21,857  176,404  167,056",
    ]
    for line in ("downloading pip:p1==1.0", *packages, gap, *table, end):
        show_corpus_line(line)
    shown = [line.strip() for line in said]
    assert shown == [*(packages[number - 1] for number in (10, 20, 30, 40, 42)), gap, end]


def test_machines_by_flags():
    world = find_world(8, nodes=4, node_rank=2, master="node0", environment={})
    assert world == World(32, 16, 8, "tcp://node0:29500", spawn=True)
    assert Hardware(8, world=world).shared and not Hardware(8, world=world).is_main_process
    assert find_world(0, 2, 1, "tcp://node0:7", {}) == World(
        2, 1, 1, "tcp://node0:7", spawn=False
    )
    assert find_world(8, environment={}) is None
    assert find_world(1, nodes=1, node_rank=0, master="x", environment={}) is None


def test_torchrun_is_one_process_of_many():
    world = find_world(8, environment=TORCHRUN)
    assert world == World(16, 9, 1, "env://", spawn=False, device=1)
    assert find_world(0, environment=TORCHRUN).device is None
    assert (
        find_world(1, environment={**TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
        is None
    )


def test_a_machine_inside_of_a_slurm_job_keeps_to_itself():
    world = find_world(8, environment={"SLURM_JOB_ID": "123456"})
    assert (
        world == World(8, 0, 8, "tcp://127.0.0.1:33456", spawn=True)
        and not Hardware(8, world=world).shared
    )
    assert find_world(1, environment={"SLURM_JOB_ID": "123456"}) is None


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ((8, 2, 2, "a"), {}, "--node-rank 2"),
        ((8, 2, 0, None), {}, "needs --master"),
        ((8, 2, 0, "a b"), {}, "HOST or HOST:PORT"),
        ((8, 2, 0, "a:99999"), {}, "HOST or HOST:PORT"),
        ((8, 2, 0, "a"), TORCHRUN, "leave them out"),
        ((4, None, None, None), TORCHRUN, "--nproc-per-node 4"),
    ],
)
def test_worlds_that_contradict_each_other(arguments, environment, message):
    with pytest.raises(UserError, match=message):
        find_world(*arguments, environment=environment)


def test_the_papers_batch_on_any_world(small, write_config, tmp_path, shown):
    small["train"].update(effective_batch_tokens=262144, max_tokens=8192)
    recipe = load_recipe(write_config(small))
    for nodes, gpus, steps in ((1, 1, 32), (1, 8, 4), (2, 8, 2), (4, 8, 1), (8, 8, 1)):
        world = find_world(gpus, nodes, nodes - 1, "head", {})
        hardware = Hardware(gpus, "V100", (7, 0), tuple("01234567")[:gpus], world)
        batch = plan_batch(recipe.train, hardware.devices)
        assert (batch.effective, batch.update_freq) == (262144, steps)
        (line,) = shown(recipe, hardware, Options(stage="train"))
        assert line[line.index("--distributed-world-size") + 1] == str(nodes * gpus)
        if world:
            assert line[line.index("--distributed-rank") + 1] == str((nodes - 1) * gpus)
        assert "--ddp-backend" not in line and "--cpu" not in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "all"}, "share the train stage only"),
        ({"stage": "train", "restart": True}, "--stage prepare"),
        ({"stage": "train"}, "--stage prepare"),
    ],
)
def test_what_several_programs_cannot_share(options, message, small, write_config, tmp_path):
    hardware = Hardware(world=find_world(0, 2, 1, "head", {}))
    with pytest.raises(UserError, match=message):
        run_recipe(
            load_recipe(write_config(small)),
            hardware,
            Options(save_dir=tmp_path / "run", **options),
        )
    assert not (tmp_path / "run" / ".lock").exists()


def test_processes_on_one_cpu_do_not_multiply_its_cores():
    """A record said "2 x 2 CPU cores" of two processes of torchrun on a machine with two cores."""
    world = find_world(0, environment={**TORCHRUN, "WORLD_SIZE": "2", "RANK": "0"})
    assert (
        Hardware(name="2 CPU cores", world=world).describe()
        == "2 processes, 2 CPU cores on each machine"
    )
    assert Hardware(2, "V100", (7, 0), ("0", "1"), world).describe() == "2 x V100"
    assert Hardware(name="2 CPU cores").describe() == "2 CPU cores"
