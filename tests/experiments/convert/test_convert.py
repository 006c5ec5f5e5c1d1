"""Conversions of models that have been trained: equal, or refused, or said to be neither and by how much."""

import argparse
import math
import os
import re
import warnings

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from shared_fixtures import USER_DIR

from moa_fairseq.experiments.convert import check, command
from moa_fairseq.experiments.convert.models import Checkpoint
from moa_fairseq.experiments.scoring.trained_model import batches, load_trained
from moa_fairseq.plugin.patches.checkpoint_reading import load_checkpoint
from moa_fairseq.plugin.patches.checkpoint_writing import save_checkpoint

BASE_MODELS = ["translation", "masked LM", "causal LM"]
ALL_HEADS = ("--to", "moh", "--moh-shared-heads", 2, "--experts-per-token", 2)
LEARNED = (*ALL_HEADS, "--moh-router", "learned")


def outputs(checkpoint, data):
    """The model's outputs on the first batch of the data, positions of padding left out."""
    model, task = load_trained(checkpoint, data)
    sample = next(iter(batches(task, model, "valid", 300, torch.device("cpu"))))
    with torch.no_grad():
        out = model.eval()(**sample["net_input"])[0]
    words = sample["net_input"].get("prev_output_tokens", sample["net_input"]["src_tokens"])
    return out[words.ne(1)]


@pytest.mark.thorough(
    keep=("[moh learned-translation", "[moh none shared-translation", "[mae-translation")
)
@pytest.mark.parametrize("job", BASE_MODELS)
@pytest.mark.parametrize(
    "flags",
    [
        ALL_HEADS,
        LEARNED,
        (*LEARNED, "--moh-scaling", "released"),
        (*LEARNED[:3], 1, "--experts-per-token", 3, "--moh-router", "learned"),
        (*LEARNED[:3], 0, "--experts-per-token", 4, "--moh-router", "learned"),
        ("--to", "mae"),
        ("--to", "mae", "--mae-gate", "uniform", "--mae-dropped-heads", 2),
    ],
    ids=[
        "moh",
        "moh learned",
        "moh released",
        "moh one shared",
        "moh none shared",
        "mae",
        "uni-mae",
    ],
)
def test_exact_conversions_give_the_same_outputs(job, flags, dense, convert, tmp_path):
    checkpoint, data = dense(job)
    target = tmp_path / "out.pt"
    printed = convert(checkpoint, target, *flags, "--data", data)
    assert printed.startswith("exact: ")
    assert re.search(r"\(\+0\.0000\)|\(-0\.0000\)", printed)
    torch.testing.assert_close(
        outputs(target, data), outputs(checkpoint, data), atol=2e-5, rtol=1e-5
    )


@pytest.mark.thorough(keep="moh-translation")
@pytest.mark.parametrize("job", BASE_MODELS)
@pytest.mark.parametrize("target", ["mae", "moh"])
def test_back_to_dense_gives_the_first_weights_again(job, target, dense, convert, tmp_path):
    checkpoint, data = dense(job)
    there = tmp_path / "there.pt"
    back = tmp_path / "back.pt"
    convert(checkpoint, there, *(LEARNED if target == "moh" else ("--to", "mae")))
    assert "exact" in convert(there, back, "--to", "dense")
    before = load_checkpoint(checkpoint)["model"]
    after = load_checkpoint(back)["model"]
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, msg=name)
    torch.testing.assert_close(outputs(back, data), outputs(checkpoint, data))


def test_stock_fairseq_serves_what_came_back(dense, convert, fairseq, tmp_path):
    checkpoint, data = dense("translation")
    there = tmp_path / "there.pt"
    back = tmp_path / "back.pt"
    convert(checkpoint, there, "--to", "mae")
    convert(there, back, "--to", "dense")
    lines = []
    for path in (checkpoint, back):  # no --user-dir: nothing of this package is imported
        command = ("generate", data, "--path", path, "--cpu", "--beam", 3, "--max-tokens", 400)
        # fairseq relies on torch.load as it was before torch 2.6
        env = {"PYTHONPATH": "", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
        out = fairseq(*command, env=env).stdout
        lines.append([line for line in out.splitlines() if line.startswith(("H-", "T-"))])
    # it drops the last sentences, since 12 is not a multiple of 8
    assert len(lines[0]) >= 16 and lines[0] == lines[1]


@pytest.mark.thorough(keep="translation")
@pytest.mark.parametrize("job", BASE_MODELS)
def test_fewer_heads_say_so_and_by_how_much(job, dense, convert, tmp_path):
    checkpoint, data = dense(job)
    target = tmp_path / "out.pt"
    printed = convert(checkpoint, target, "--to", "moh", "--data", data)
    assert "not exact: 3 of 4 heads" in printed
    before, after = map(float, re.search(r"([\d.]+) → ([\d.]+) bits", printed).groups())
    assert before != after and target.is_file()
    settings = load_checkpoint(target)["cfg"]["model"]
    assert (settings.moh_shared_heads, settings.experts_per_token) == (2, 1)


def test_the_loss_before_is_that_of_the_first_model(dense, convert, tmp_path, monkeypatch):
    def number_of_routers(models, *limits):
        return [sum("router" in name for name, _ in model.named_modules()) for model in models]

    monkeypatch.setattr(command, "mean_losses", number_of_routers)
    checkpoint, data = dense("translation")
    printed = convert(checkpoint, tmp_path / "out.pt", *LEARNED, "--data", data)
    before, after, change = map(float, re.findall(r"[+\d]+\.\d{4}", printed))
    assert before == 0 < after == change


@pytest.mark.parametrize("scaling", ["paper", "released"])
def test_the_loss_of_a_new_router_stays_near(scaling, dense, convert, tmp_path):
    """Even gates are 1 after a conversion, whatever the scaling: so leaving one head out changes little."""
    checkpoint, data = dense("translation")
    flags = ("--to", "moh", "--moh-router", "learned", "--moh-scaling", scaling)
    printed = convert(checkpoint, tmp_path / "out.pt", *flags, "--data", data)
    before, after = map(float, re.search(r"([\d.]+) → ([\d.]+) bits", printed).groups())
    assert abs(after - before) < 0.5


def test_nothing_is_printed_that_nobody_can_change(dense, convert, tmp_path):
    """torch warns of fairseq's masks, which are no flag of the user's."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        convert(dense("translation")[0], tmp_path / "out.pt", "--to", "mae")
    assert not [one for one in warned if "key_padding_mask" in str(one.message)]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--to", "mae"), "has a gate that depends on its input"),
        (LEARNED, "a learned router cannot become dense"),
        (("--to", "moh"), "has 3 of 4 active heads"),
        (ALL_HEADS, "--positions rope"),
    ],
)
def test_no_way_back_is_refused_with_the_reason(flags, reason, dense, convert, tmp_path):
    convert(dense("translation")[0], tmp_path / "there.pt", *flags)
    state = load_checkpoint(tmp_path / "there.pt")
    for name, tensor in state["model"].items():
        if "router.projection" in name or "gate.fc2" in name:  # as training would
            tensor.add_(torch.randn(tensor.shape))
    if "rope" in reason:
        state["cfg"]["model"].positions = "rope"
    save_checkpoint(state, tmp_path / "there.pt")
    assert reason in convert(
        tmp_path / "there.pt", tmp_path / "out.pt", "--to", "dense", status=2
    )
    assert not (tmp_path / "out.pt").exists()


def test_a_uni_mae_becomes_dense_for_stock_fairseq(save_model, toy_data, convert, tmp_path):
    flags = (
        f"--mae-gate uniform --user-dir {USER_DIR} --label-smoothing 0.1 --criterion".split()
    )
    criterion = "label_smoothed_cross_entropy_with_routing"
    checkpoint = save_model(toy_data, tmp_path / "checkpoint.pt", *flags, criterion)
    convert(checkpoint, tmp_path / "dense.pt", "--to", "dense")
    cfg = load_checkpoint(tmp_path / "dense.pt")["cfg"]
    assert (
        cfg["criterion"]["_name"] == "label_smoothed_cross_entropy"
        and cfg["common"]["user_dir"] is None
    )
    torch.testing.assert_close(
        outputs(tmp_path / "dense.pt", toy_data), outputs(checkpoint, toy_data)
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flags",
    [
        ("--positions", "rope"),
        ("--positions", "rope-half"),
        ("--positions", "xl"),
        ("--sigma-moe-num-experts", "4", "--sigma-moe-expert-dim", "8"),
        ("--query-key-norm", "head", "--window", "3"),
        ("--window", "3"),
    ],
    ids=["rope", "rope-half", "xl", "sigma-moe", "norm", "window"],
)
def test_what_dense_models_lack_other_mixtures_take_over(
    flags, save_model, toy_data, convert, tmp_path
):
    heads = ("--encoder-attention-heads", 4, "--decoder-attention-heads", 4)
    uniform = ("--mae-gate", "uniform", *heads, *flags)
    checkpoint = save_model(toy_data, tmp_path / "uniform.pt", *uniform)
    target = tmp_path / "out.pt"
    assert " ".join(flags[:2]) + ": " in convert(checkpoint, target, "--to", "dense", status=2)
    assert not target.exists()
    assert convert(checkpoint, target, *LEARNED).startswith("exact: ")


@pytest.mark.thorough
def test_training_goes_on_and_translates(dense, convert, fairseq, tmp_path):
    checkpoint, data = dense("translation")
    convert(checkpoint, tmp_path / "moh.pt", "--to", "moh")
    flags = f"--finetune-from-model {tmp_path}/moh.pt --max-epoch 1 --decoder-ffn-embed-dim 24"
    flags += " --encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 24"
    flags += " --moh-router query-norm --balance-loss moh"
    log = fairseq.train(
        data, tmp_path / "on", *flags.split(), arch="moh_transformer_tiny"
    ).stdout
    assert '"train_balance_loss"' in log
    path = tmp_path / "on" / "checkpoint_last.pt"
    user_dir = ("--user-dir", USER_DIR)
    out = fairseq("generate", data, "--path", path, "--cpu", "--beam", 3, *user_dir).stdout
    assert len([line for line in out.splitlines() if line.startswith("H-")]) == 12


def test_tied_weights_stay_tied_and_no_optimizer_is_kept(dense, convert, tmp_path):
    checkpoint, _ = dense("translation")
    convert(checkpoint, tmp_path / "out.pt", "--to", "mae")
    state = load_checkpoint(tmp_path / "out.pt")
    shared = {
        state["model"][f"{side}.embed_tokens.weight"].data_ptr()
        for side in ("encoder", "decoder")
    }
    assert shared == {state["model"]["decoder.output_projection.weight"].data_ptr()}
    assert state["last_optimizer_state"] is None


def test_half_precision_stays_half(dense, convert, tmp_path):
    checkpoint, _ = dense("translation")
    state = load_checkpoint(checkpoint)
    state["model"] = {name: tensor.half() for name, tensor in state["model"].items()}
    save_checkpoint(state, tmp_path / "half.pt")
    assert "exact" in convert(tmp_path / "half.pt", tmp_path / "out.pt", *LEARNED)
    model = load_checkpoint(tmp_path / "out.pt")["model"]
    routers = {name for name, tensor in model.items() if tensor.dtype == torch.float32}
    assert routers and all("router" in name or name.endswith("version") for name in routers)


def test_old_checkpoints_with_a_namespace(dense, convert, tmp_path):
    checkpoint, data = dense("translation")
    state = load_checkpoint(checkpoint)
    cfg = state.pop("cfg")
    args = {**vars(cfg["model"]), **cfg["task"], "task": "translation", "optimizer": "adam"}
    args.update(criterion="cross_entropy", lr_scheduler="fixed", lr=[0.1], arch="transformer")
    save_checkpoint({**state, "args": argparse.Namespace(**args)}, tmp_path / "old.pt")
    assert "exact" in convert(tmp_path / "old.pt", tmp_path / "new.pt", "--to", "mae")
    assert load_checkpoint(tmp_path / "new.pt")["args"].arch == "mae_transformer_base"
    assert "--data needs a checkpoint" in convert(
        tmp_path / "old.pt", tmp_path / "x.pt", "--to", "mae", "--data", data, status=2
    )


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/moa-fairseq-was-here",)


def spoiled(kind, checkpoint, folder):
    path = folder / "spoiled.pt"
    state = load_checkpoint(checkpoint)
    if kind == "truncated":
        path.write_bytes(checkpoint.read_bytes()[:2000])
        return path
    if kind == "hostile":
        state["cfg"]["model"].dropout = Hostile()
    elif kind == "no model":
        state["model"] = {"weights": [1, 2]}
    elif kind == "no settings":
        state["cfg"] = None
    elif kind == "unknown architecture":
        state["cfg"]["model"]._name = state["cfg"]["model"].arch = "lstm"
    elif kind == "a weight too few":
        del state["model"]["encoder.layers.0.fc1.weight"]
    elif kind == "a weight too many":
        state["model"]["encoder.layers.7.fc1.weight"] = torch.ones(2, 2)
    elif kind == "another shape":
        state["model"]["encoder.layers.0.self_attn.q_proj.weight"] = torch.ones(3, 3)
    elif kind == "odd settings":
        state["cfg"]["model"].encoder_layers = "many"
    torch.save(state, path)
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated", "truncated"),
        ("hostile", "refused: it holds posix.system"),
        ("no model", "is of the type list"),
        ("no settings", "cfg.model"),
        ("unknown architecture", "architecture lstm"),
        ("a weight too few", "lacks encoder.layers.0.fc1.weight"),
        ("a weight too many", "encoder.layers.7.fc1.weight"),
        ("another shape", "size mismatch for encoder.layers.0.self_attn.q_proj.weight"),
        ("odd settings", "spoiled.pt cannot be converted"),
    ],
)
def test_bad_inputs_are_refused_and_nothing_is_written(kind, words, dense, convert, tmp_path):
    path = spoiled(kind, dense("translation")[0], tmp_path)
    (tmp_path / "out.pt").write_text("as it was")
    assert words in convert(path, tmp_path / "out.pt", "--to", "mae", "--force", status=2)
    assert (tmp_path / "out.pt").read_text() == "as it was"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.pt", "spoiled.pt"]
    assert not os.path.exists("/tmp/moa-fairseq-was-here")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--to", "moh", "--mae-dropped-heads", 1), "--to moh has no flag --mae-dropped-heads"),
        (("--to", "dense"), "--to dense: "),
        (("--to", "moh", "--experts-per-token", 3), "between 1 and 2"),
        (("--to", "moh", "--data", "/nowhere"), "--data /nowhere is not a folder"),
        (("--to", "moh", "--data", "/"), "binarised/ in a prepared data set"),
    ],
)
def test_flags_that_make_no_sense(flags, words, dense, convert, tmp_path):
    assert words in convert(dense("translation")[0], tmp_path / "out.pt", *flags, status=2)
    assert not list(tmp_path.iterdir())


def test_heads_of_a_width_of_their_own_are_refused(save_model, toy_data, tmp_path, convert):
    flags = ("--attention-head-dim", 6)
    source = save_model(toy_data, tmp_path / "dense.pt", *flags, arch="dense_transformer_tiny")
    assert "--attention-head-dim" in convert(
        source, tmp_path / "mae.pt", "--to", "mae", status=2
    )
    assert not (tmp_path / "mae.pt").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "control",
    [
        ("--attention-branch-scale", 0.25),
        ("--attention-output-scale", 0.25),
        ("--head-gate", "head"),
    ],
)
def test_the_plugins_dense_models_become_mixtures(
    control, save_model, toy_data, tmp_path, convert
):
    source = save_model(
        toy_data, tmp_path / "plain.pt", *control, arch="dense_transformer_tiny"
    )
    mixture = tmp_path / "mae.pt"
    assert "exact" in convert(source, mixture, "--to", "mae", "--mae-gate", "uniform")
    if control[0] != "--attention-branch-scale":  # the weights alone have that
        assert control[0] in convert(mixture, tmp_path / "dense.pt", "--to", "dense", status=2)


@pytest.mark.parametrize("most", [1, 2])
def test_so_many_batches_are_measured_and_no_more(most, dense, convert, tmp_path, monkeypatch):
    checkpoint, data = dense("translation")
    seen = []
    sums = torch.zeros(2)

    class Counted(CrossEntropyCriterion):
        def forward(self, model, sample, reduce=True):
            seen.append(sample["id"].tolist())
            loss, size, values = super().forward(model, sample, reduce)
            sums.add_(torch.tensor([float(loss), float(size)]))
            return loss, size, values

    monkeypatch.setattr(check, "CrossEntropyCriterion", Counted)
    few = ("--data", data, "--max-tokens", 40, "--max-batches", most)
    printed = convert(checkpoint, tmp_path / "out.pt", "--to", "moh", *few)
    losses = [
        float(number) for number in re.search(r"([\d.]+) → ([\d.]+) bits", printed).groups()
    ]
    # both have as many tokens: the loss of all is the mean of theirs
    assert sum(losses) / 2 == pytest.approx(float(sums[0] / sums[1]) / math.log(2), abs=1e-3)
    assert len(seen) == 2 * most and seen[::2] == seen[1::2]  # both models, the same batches


def test_a_dense_models_settings_name_fairseqs_own_task():
    cfg = {
        "task": {"_name": "translation_bcd"},
        "criterion": {"_name": "masked_lm_with_routing"},
    }
    dense = command._config(Checkpoint({}, cfg), None, "dense")
    assert [dense[key]["_name"] for key in cfg] == ["translation", "masked_lm"]
