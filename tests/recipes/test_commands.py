"""YAML → command lines: batch arithmetic, precision by hardware, flags."""

import dataclasses
import shlex

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.recipes.batch import plan_batch
from moa_fairseq.recipes.command import Options
from moa_fairseq.recipes.hardware import Hardware, choose_devices, precision_flags
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.schema import Model, Train
from moa_fairseq.running import command_line

CPU = Hardware()
V100 = Hardware(1, "V100", (7, 0), ("0",))
A100 = Hardware(8, "A100", (8, 0), tuple("01234567"))


def plan(effective, max_tokens, devices):
    train = Train(max_tokens=max_tokens, criterion="c", effective_batch_tokens=effective, max_epoch=1)
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
        ),  # more devices than the batch needs: smaller batches, not a bigger update
        (262144, 8192, 3, 11, 7943),  # 3 does not divide: 10 steps would exceed max_tokens
        (8192, 4096, 1, 2, 4096),
        (2048, 4096, 1, 1, 2048),
        (None, 4096, 4, 1, 4096),
    ],
)
def test_the_effective_batch_holds_on_any_number_of_devices(effective, max_tokens, devices, freq, per_device):
    batch = plan(effective, max_tokens, devices)
    assert (batch.update_freq, batch.max_tokens) == (freq, per_device)
    assert batch.max_tokens <= max_tokens
    if effective:
        assert 0 <= effective - batch.effective < devices * freq


def test_rounding_is_stated():
    assert "by rounding" in plan(262144, 8192, 3).describe()
    assert "rounding" not in plan(262144, 8192, 8).describe()
    assert "= 262,144 tokens" in plan(262144, 8192, 8).describe()


@pytest.mark.parametrize(
    ("precision", "hardware", "expected"),
    [
        ("auto", CPU, []),
        ("auto", V100, ["--fp16"]),
        ("auto", A100, ["--bf16"]),
        ("fp32", A100, []),
        ("fp16", A100, ["--fp16"]),
        ("auto", Hardware(1, "P100", (6, 0)), []),
    ],
)
def test_precision_follows_the_hardware(precision, hardware, expected):
    assert precision_flags(precision, hardware) == expected


@pytest.mark.parametrize(
    ("arch", "flags", "expected"),
    [
        ("moa_transformer_base", {}, ["--amp"]),
        ("transformer_lm_gpt", {}, ["--amp"]),
        ("moa_roberta_8k8e128d", {}, ["--amp"]),
        ("transformer_tiny", {}, []),
        ("transformer_tiny", {"encoder-embed-dim": 512}, ["--amp"]),
    ],
)
def test_wide_models_train_in_bfloat16_on_cpus_that_have_units_for_it(arch, flags, expected):
    model = Model(arch=arch, flags=flags)
    assert precision_flags("auto", dataclasses.replace(CPU, bfloat16_units=True), model) == expected
    assert precision_flags("auto", CPU, model) == []
    assert precision_flags("fp32", dataclasses.replace(CPU, bfloat16_units=True), model) == []
    assert precision_flags("amp", CPU, model) == ["--amp"]


def test_adaptive_inputs_do_not_train_under_autocast():
    """fairseq writes the bands' bfloat16 into a float32 tensor."""
    model = Model(arch="transformer_lm_wiki103")
    assert precision_flags("auto", dataclasses.replace(CPU, bfloat16_units=True), model) == []
    with pytest.raises(UserError, match="adaptive inputs"):
        precision_flags("amp", CPU, model)


@pytest.mark.parametrize(("precision", "hardware"), [("fp16", CPU), ("bf16", V100), ("bf16", CPU)])
def test_precision_that_the_hardware_lacks(precision, hardware):
    with pytest.raises(UserError, match=r"train\.precision"):
        precision_flags(precision, hardware)


def test_choice_of_devices():
    assert choose_devices(A100, None, False) == A100
    assert choose_devices(A100, 2, False).gpus == 2
    assert choose_devices(A100, 0, False).gpus == 0
    with pytest.raises(UserError, match="--gpus 2"):
        choose_devices(CPU, 2, False)
    assert precision_flags("auto", choose_devices(CPU, 2, True)) == ["--fp16"]
    with pytest.raises(UserError, match="--gpus -1"):
        choose_devices(CPU, -1, False)


def test_fewer_gpus_than_present_restricts_what_fairseq_sees():
    assert choose_devices(A100, 2, False).environment == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert A100.environment == CPU.environment == choose_devices(A100, 0, False).environment == {}


def test_flags():
    values = {"a": 1, "b": True, "c": False, "d": None, "e": [1, 2], "f": -1, "g": "(0.9, 0.98)"}
    assert command_line.flags(values) == ["--a", "1", "--b", "--e", "1", "2", "--f=-1", "--g", "(0.9, 0.98)"]


def test_the_printed_line_means_what_is_executed():
    command = ["fairseq-train", "a folder", "--adam-betas", "(0.9, 0.98)"]
    assert shlex.split(command_line.to_shell(command)) == command
    assert command_line.to_shell(command, {"A": "1,2"}).startswith("A=1,2 fairseq-train")
    assert command_line.to_argv(command)[1:] == ["-u", "-m", "fairseq_cli.train", *command[1:]]


def test_a_redirection_is_shown_and_the_runner_does_it_itself(small, write_config, tmp_path, shown):
    folder = tmp_path / "my run"
    options = Options(save_dir=folder)
    generate, score = shown(load_recipe(write_config(small)), CPU, options)[-2:]
    output = folder / "generate-test.txt"
    assert command_line.to_shell(generate).endswith(f"--cpu > '{output}'")
    assert command_line.to_shell(score).endswith(f"--json > '{folder / 'score-test.json'}'")


def test_a_headline_of_another_chain_is_scored(small, write_config, tmp_path, shown):
    path = write_config(small)

    def line(*overrides):
        (command,) = shown(load_recipe(path, overrides), CPU, Options(stage="score"))
        return command_line.to_shell(command)

    assert "--also" not in line() and "--also" not in line("score.headline=sacrebleu")
    assert "--also moa-release --json" in line("score.headline=moa_release_bleu")
    assert "--also get-ende-bleu --json" in line("score.flags.also=get-ende-bleu")


def test_train_command_of_a_mixture(small, write_config, tmp_path, shown):
    small["model"].update(arch="moa_transformer_tiny", num_experts=8, experts_per_token=4, expert_dim=16)
    recipe, options = load_recipe(write_config(small)), Options(stage="train")
    line = command_line.to_shell(shown(recipe, CPU, options)[0])
    assert "--num-experts 8 --experts-per-token 4 --expert-dim 16 --share-all-embeddings" in line
    assert line.endswith("--distributed-world-size 1 --cpu")
    assert "--cpu" not in shown(recipe, A100, options)[0]


@pytest.mark.parametrize(("said", "on_cpu", "on_gpu"), [(None, "0", None), (2, "2", "2")])
def test_on_a_cpu_the_training_loads_its_batches_itself(small, write_config, said, on_cpu, on_gpu, shown):
    small["train"]["flags"].pop("num-workers", None)
    if said is not None:
        small["train"]["flags"]["num-workers"] = said
    recipe = load_recipe(write_config(small))
    for hardware, workers in ((CPU, on_cpu), (A100, on_gpu)):
        (line,) = shown(recipe, hardware, Options(stage="train"))
        assert (line[line.index("--num-workers") + 1] if "--num-workers" in line else None) == workers


def test_without_averaging_the_best_checkpoint_is_evaluated(small, write_config, tmp_path, shown):
    small["average"] = None
    recipe = load_recipe(write_config(small))
    options = Options(stage="generate", save_dir=tmp_path / "run")
    (line,) = shown(recipe, CPU, options)
    assert line[line.index("--path") + 1] == str(tmp_path / "run" / "checkpoints" / "checkpoint_best.pt")


def test_the_dry_run_of_the_embedded_corpus_begins_with_it(small, write_config, shown):
    small["data"]["recipe"] = "embedded"
    planned = shown(load_recipe(write_config(small)), CPU, Options())
    assert [command[:2] for command in planned[:2]] == [
        ["moa-fairseq", "corpus"],
        ["fairseq-preprocess", "--source-lang"],
    ]
    assert planned[1][planned[1].index("--destdir") + 1] == planned[2][1]
