"""Checkpoints load safely, batches are complete; and the commands all work with it."""

import argparse
import io
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import TokenBlockDataset, data_utils
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA
from fairseq.modules.dynamic_convolution import DynamicConv_scripatable
from fairseq.nan_detector import NanDetector

import moa_fairseq
from moa_fairseq.errors import UserError
from moa_fairseq.plugin import fairseq_compat
from moa_fairseq.plugin.patches import table
from moa_fairseq.plugin.patches.half_precision import (
    refuse_half_precision_on_a_cpu,
    take_bf16_for_a_gpu,
)
from moa_fairseq.plugin.patches.user_errors import print_user_errors

USER_DIR = os.path.dirname(moa_fairseq.__file__)


class Planted:
    """Unpickling an instance would run a command."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("legacy", [False, True])
def test_fairseqs_own_loader_cannot_be_told_to_switch_safety_off(tmp_path, legacy):
    path = tmp_path / "planted.pt"
    marker = tmp_path / "marker"
    state = {
        "args": argparse.Namespace(arch="x"),
        "cfg": None,
        "model": {"w": torch.arange(4.0)},
    }
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    loaded = fairseq_compat.load_checkpoint(path)
    assert loaded["args"].arch == "x" and torch.equal(loaded["model"]["w"], torch.arange(4.0))
    torch.save(
        {**state, "extra_state": Planted(marker)},
        path,
        _use_new_zipfile_serialization=not legacy,
    )
    for load in (
        fairseq_compat.load_checkpoint,
        checkpoint_utils.load_checkpoint_to_cpu,
        lambda path: checkpoint_utils.torch.load(path, weights_only=False),
    ):
        with pytest.raises(
            UserError, match=r"planted\.pt was refused: it holds (posix|nt)\.system"
        ):
            load(str(path))
    assert not marker.exists()
    assert checkpoint_utils.torch.tensor is torch.tensor  # everything else passes through
    with pytest.raises(UserError, match="does not exist"):
        fairseq_compat.load_checkpoint(tmp_path / "none.pt")


@pytest.mark.parametrize("patch", fairseq_compat.PATCHES, ids=lambda patch: patch.target)
def test_every_patch_is_in_place_and_has_its_reason_and_test(patch):
    # Modules that are loaded later are left as they are: test_literals.py looks at those that call eval.
    for owner, name in patch.places() if patch.way and "*" not in patch.target else ():
        if patch.way is table.wrapped_by:
            assert getattr(owner, name).__wrapped__
        elif patch.target not in ("numpy:compat", "sys:excepthook"):
            installed = getattr(owner, name)
            assert getattr(installed, "__module__", type(installed).__module__).startswith(
                "moa_fairseq"
            )
    assert patch.reason.endswith(".") and not patch.reason.startswith(("Args:", "Raises:"))
    file, _, name = patch.test.partition("::")
    assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")


def test_the_last_batch_is_kept():
    sizes = np.array([3, 4, 5, 6, 6, 7, 7, 8, 8, 9, 9, 9])
    for max_tokens in (None, 40, 500):
        batches = data_utils.batch_by_size(
            np.arange(12),
            lambda i: sizes[i],
            max_tokens=max_tokens,
            required_batch_size_multiple=8,
        )
        assert np.concatenate(batches).tolist() == list(range(12))


def test_a_sentence_is_a_block_of_a_language_model():
    """`--sample-break-mode eos`, for which fairseq asks NumPy for a type that NumPy 2 no longer has."""
    sentences = [torch.tensor([5, 6, 2]), torch.tensor([7, 2])]
    blocks = TokenBlockDataset(
        sentences, [3, 2], block_size=None, pad=1, eos=2, break_mode="eos"
    )
    assert [block.tolist() for block in blocks] == [[5, 6, 2], [7, 2]]


def test_bf16_is_a_gpu_dtype_when_there_is_a_gpu(monkeypatch):
    seen = []
    for gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        take_bf16_for_a_gpu(
            lambda args: seen.append(args.tpu), argparse.Namespace(bf16=True, tpu=True)
        )
    assert seen == [False, True]


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_half_precision_needs_a_gpu(half, monkeypatch):
    def parsed(cpu=True, **more):
        line = argparse.Namespace(**{"cpu": cpu, "lr_scheduler": "fixed", half: True, **more})
        return refuse_half_precision_on_a_cpu(lambda args: "taken", line)

    with pytest.raises(UserError, match=f"--{half} needs a GPU.*--amp"):
        parsed()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parsed(cpu=False) == "taken"
    with pytest.raises(UserError, match=f"--{half}"):
        parsed(cpu=True)
    evaluation = argparse.Namespace(**{"cpu": True, half: True})
    assert refuse_half_precision_on_a_cpu(lambda args: "taken", evaluation) == "taken"


def test_workers_send_each_other_configs_but_load_no_file(toy_checkpoint):
    from fairseq.distributed import utils as distributed_utils
    from omegaconf import OmegaConf

    buffer = io.BytesIO()
    torch.save({"cfg": OmegaConf.create({"a": 1})}, buffer)
    buffer.seek(0)
    assert distributed_utils.torch.load(buffer, map_location="cpu")["cfg"].a == 1
    with pytest.raises(TypeError, match="received from another process"):
        distributed_utils.torch.load(str(toy_checkpoint))


# --- fairseq's commands -------------------------------------------------------------------------


def test_generate_interactive_and_validate(fairseq, toy_data, toy_checkpoint):
    options = ("--user-dir", USER_DIR, "--cpu", "--path", toy_checkpoint, "--beam", 2)
    done = fairseq("generate", toy_data, *options, "--num-workers", 0)
    ids = {line.split("\t")[0] for line in done.stdout.splitlines() if line.startswith("H-")}
    assert ids == {f"H-{i}" for i in range(12)}
    done = fairseq("interactive", toy_data, *options, stdin="w1 w2 w3\nw4\n")
    assert sum(line.startswith("H-") for line in done.stdout.splitlines()) == 2
    of_validation = ("--task", "translation", "--valid-subset", "test", "--max-tokens", 400)
    done = fairseq("validate", toy_data, *options[:-2], *of_validation)
    assert "load_balance_loss" in done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("arch", ["moa_transformer_tiny", "mae_transformer_tiny"])
def test_batches_in_buckets(fairseq, toy_data, tmp_path, arch):
    done = fairseq.train(
        toy_data, tmp_path, "--num-batch-buckets", 3, "--max-epoch", 1, arch=arch
    )
    buckets = set(
        re.findall(r"bucketing (?:source|target) lengths: (\[.*\])", done.stdout + done.stderr)
    )
    assert buckets and all(1 <= bucket.count(",") + 1 <= 3 for bucket in buckets)
    assert (tmp_path / "checkpoint1.pt").exists()


@pytest.mark.parametrize("conv_bias", [False, True])
def test_dynamic_convolutions_leave_no_weight_unfilled(conv_bias):
    torch.use_deterministic_algorithms(True)  # torch fills memory with NaN
    try:
        convolution = DynamicConv_scripatable(
            8, kernel_size=3, num_heads=2, bias=True, conv_bias=conv_bias
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(weight.isfinite().all() for weight in convolution.state_dict().values())


@pytest.mark.thorough
@pytest.mark.parametrize("precision", [(), ("--ema-fp32",)])
def test_a_moving_average_of_a_model_with_counts(fairseq, toy_data, tmp_path, precision):
    """The gates' batch normalisations count updates; the averaged model resumes and translates."""
    flags = ("--task", "translation_bcd", "--store-ema", "--ema-decay", 0.9, *precision)
    for epochs in (1, 2):
        done = fairseq.train(
            toy_data, tmp_path, *flags, "--max-epoch", epochs, arch="mae_transformer_tiny"
        )
    assert "Loading EMA from checkpoint" in done.stdout + done.stderr
    state = fairseq_compat.load_checkpoint(tmp_path / "checkpoint_last.pt")
    averaged = state["extra_state"]["ema"]
    count = "encoder.layers.0.self_attn.gate.norm.num_batches_tracked"
    assert averaged.keys() == state["model"].keys() and averaged[count] > 0
    weight = "encoder.layers.0.self_attn.gate.fc2.weight"
    assert not torch.equal(averaged[weight], state["model"][weight])

    checkpoint_utils.save_ema_as_checkpoint(
        str(tmp_path / "checkpoint_last.pt"), str(tmp_path / "ema.pt")
    )
    assert torch.equal(
        fairseq_compat.load_checkpoint(tmp_path / "ema.pt")["model"][weight], averaged[weight]
    )
    options = (
        "--user-dir",
        USER_DIR,
        "--cpu",
        "--path",
        tmp_path / "ema.pt",
        "--num-workers",
        0,
    )
    done = fairseq("generate", toy_data, *options)
    assert "Translated 12 sentences" in done.stdout + done.stderr


@pytest.mark.thorough
def test_hydra_train(fairseq, toy_data, tmp_path):
    (tmp_path / "moa.yaml").write_text(
        f"common: {{user_dir: {USER_DIR}, cpu: true, log_format: json}}\n"
        f"task: {{_name: translation, data: {toy_data}, source_lang: en, target_lang: de}}\n"
        "model: {_name: moa_transformer_tiny, encoder_layers: 1, share_all_embeddings: true,\n"
        "        num_experts: 6}\n"
        "criterion: {_name: label_smoothed_cross_entropy_with_routing, label_smoothing: 0.1}\n"
        "optimizer: {_name: adam}\n"
        "lr_scheduler: {_name: fixed}\n"
        "dataset: {max_tokens: 400, num_workers: 0}\n"
        "optimization: {lr: [0.003], max_epoch: 1}\n"
        f"checkpoint: {{save_dir: {tmp_path / 'checkpoints'}}}\n"
    )
    flags = ("--config-dir", tmp_path, "--config-name", "moa", f"hydra.run.dir={tmp_path}")
    fairseq("hydra_train", *flags, cwd=tmp_path)
    checkpoint = tmp_path / "checkpoints" / "checkpoint_last.pt"
    state = fairseq_compat.load_checkpoint(checkpoint)
    assert state["model"]["encoder.layers.0.self_attn.q_experts.weight"].shape[0] == 6
    options = ("--user-dir", USER_DIR, "--cpu", "--path", checkpoint, "--num-workers", 0)
    done = fairseq("generate", toy_data, *options)
    assert "Translated 12 sentences" in done.stdout + done.stderr


def test_the_short_user_dir_works_from_the_folder_above_it(fairseq, toy_data, tmp_path):
    parent = os.path.dirname(USER_DIR)
    done = fairseq.train(
        toy_data, tmp_path, "--user-dir", "moa_fairseq", "--max-update", 1, cwd=parent
    )
    assert "load_entropy" in done.stdout + done.stderr


def test_user_errors_of_fairseq_train_are_one_paragraph(fairseq, toy_data, tmp_path):
    done = fairseq.train(toy_data, tmp_path, "--experts-per-token", 9, check=False)
    assert done.returncode != 0
    assert "--experts-per-token 9 must be between 1 and --num-experts 8" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "story, diverged",
    [
        ("gradients are Nan/Inf", True),
        ("Fatal error: gradients are inconsistent between workers.", False),
    ],
)
def test_a_training_that_diverges_names_the_flags_that_help(story, diverged, capsys):
    error = FloatingPointError(story)
    print_user_errors(FloatingPointError, error, None)
    said = capsys.readouterr().err
    assert story in said and all(
        (flag in said) == diverged for flag in ("--finetune-from-model", "--lr")
    )


def test_the_module_that_made_a_nan_is_named(build_trainer, caplog):
    """An encoder returns a dict of lists, in which torch's backward hooks find no tensor."""
    trainer, batches = build_trainer(arch="transformer_tiny", task="translation")
    model = trainer.get_model()
    sample = batches[0]

    def spoil(module, inputs, output):
        output.register_hook(lambda grad: grad * np.nan)

    model.encoder.layers[0].fc1.register_forward_hook(spoil)
    with NanDetector(model), caplog.at_level("WARNING"):
        model(**sample["net_input"])[0].sum().backward()
    assert "NaN detected in output of encoder.layers.0." in caplog.text


def test_a_moving_average_copies_counts_and_what_it_is_told_to():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    average = EMA(model, EMAConfig(), skip_keys={"0.bias"})
    assert average.skip_keys == {"0.bias", "1.num_batches_tracked"}
    assert EMA(model, EMAConfig()).skip_keys == {"1.num_batches_tracked"}
