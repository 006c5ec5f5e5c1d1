"""A training that is killed and started again ends where an uninterrupted one ends."""

import signal
from types import SimpleNamespace

import pytest
import torch
from fairseq.dataclass.configs import CheckpointConfig
from fairseq_cli import train as program

import moa_fairseq
from moa_fairseq.plugin.fairseq_compat import load_checkpoint
from moa_fairseq.plugin.patches.resumption import end_at_the_goal, load_patience, save_patience

EPOCHS = (
    "--max-tokens",
    100,
    "--max-epoch",
    2,
    "--save-interval-updates",
    4,
    "--keep-interval-updates",
    2,
)
# the second epoch, in which the kill comes, has G steps
BCD = (
    "--task",
    "translation_bcd",
    "--bcd-g-every",
    2,
    "--criterion",
    "label_smoothed_cross_entropy",
)
HASH = ("--router-choice", "hash", "--router-gates", "uniform", "--amp")
CASES = {
    "moa": ("moa_transformer_tiny", (), "q_experts.weight"),
    "hash": ("moa_transformer_tiny", HASH, "q_experts.weight"),
    "frozen": ("moh_transformer_tiny", ("--router-choice", "frozen", "--amp"), "q_proj.weight"),
    "bcd": ("mae_transformer_tiny", BCD, "gate.fc2.weight"),
    "joint": ("mae_transformer_tiny", (*BCD, "--bcd", "none"), "gate.norm.running_mean"),
}


def final(folder):
    state = load_checkpoint(folder / "checkpoint_last.pt")
    return (
        state["model"],
        state["extra_state"]["val_loss"],
        state["optimizer_history"][-1]["num_updates"],
    )


def assert_same_end(one, two):
    """Bit for bit."""
    assert one[1:] == two[1:]
    torch.testing.assert_close(two[0], one[0], rtol=0, atol=0)


@pytest.mark.thorough
def test_a_terminated_training_saves_a_checkpoint(fairseq, toy_data, tmp_path):
    """In the middle of an epoch, without a validation, and it goes on from there to the same end."""
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    flags = ("--max-tokens", 60, "--max-epoch", 3, "--no-epoch-checkpoints")
    fairseq.train(toy_data, whole, *flags)
    stop = {"killed_at": '"epoch": 2, "update": 1.', "number": signal.SIGTERM}
    assert fairseq.train(toy_data, killed, *flags, **stop).returncode == 128 + signal.SIGTERM
    state = load_checkpoint(killed / "checkpoint_last.pt")
    reached = state["optimizer_history"][-1]["num_updates"]
    extra = state["extra_state"]
    assert extra["train_iterator"]["iterations_in_epoch"] > 0 and extra["val_loss"] is None
    assert 0 < extra["previous_training_time"] < 600
    resumed = fairseq.train(toy_data, killed, *flags)
    assert f"@ {reached} updates" in resumed.stdout + resumed.stderr
    assert reached < final(killed)[2]
    assert_same_end(final(whole), final(killed))


@pytest.mark.thorough(keep="[moa]")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_equals_uninterrupted(fairseq, toy_data, tmp_path, case):
    arch, flags, moving = CASES[case]
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    fairseq.train(toy_data, whole, *EPOCHS, *flags, arch=arch)
    updates = final(whole)[2]
    stop = f'"num_updates": "{updates * 3 // 4}"'
    done = fairseq.train(toy_data, killed, *EPOCHS, *flags, arch=arch, killed_at=stop)
    assert done.returncode == -signal.SIGKILL
    part, _, reached = final(killed)
    assert updates // 2 < reached < updates  # in the second epoch
    resumed = fairseq.train(toy_data, killed, *EPOCHS, *flags, arch=arch)
    assert f"@ {reached} updates" in resumed.stdout + resumed.stderr
    assert_same_end(final(whole), final(killed))
    name = f"encoder.layers.0.self_attn.{moving}"
    # It had not been finished before the kill
    assert not torch.allclose(part[name], final(whole)[0][name])


@pytest.mark.thorough
def test_a_joint_run_that_gave_its_gates_to_adam_goes_on_so(fairseq, toy_data, tmp_path):
    """As all did before the flag existed: a checkpoint says nothing of it, its optimizer holds the gates."""
    flags = (*BCD, "--bcd", "none", "--max-tokens", 400)
    old = dict(arch="mae_transformer_tiny")
    of_adam = ("--gate-optimizer", "fairseq")
    fairseq.train(toy_data, tmp_path, *flags, *of_adam, "--max-epoch", 1, **old)
    path = tmp_path / "checkpoint_last.pt"
    state = load_checkpoint(path)
    del state["cfg"]["task"]["gate_optimizer"], state["cfg"]["model"].gate_norm
    torch.save(state, path)
    on_cpu = ("--user-dir", moa_fairseq.__path__[0], "--cpu", "--max-tokens", 400)
    fairseq("validate", toy_data, *on_cpu, "--path", path, *BCD[:2])
    before = path.read_bytes()
    refused = fairseq.train(toy_data, tmp_path, *flags, "--max-epoch", 2, check=False, **old)
    message = " ".join(refused.stderr.split())
    assert refused.returncode and "Traceback" not in message
    assert "checkpoint_last.pt" in message and "--gate-optimizer fairseq" in message
    assert path.read_bytes() == before
    fairseq.train(toy_data, tmp_path, *flags, *of_adam, "--max-epoch", 2, **old)
    assert final(tmp_path)[2] > state["optimizer_history"][-1]["num_updates"]
    anew = ("--reset-optimizer", "--reset-lr-scheduler", "--max-epoch", 3)
    again = fairseq.train(toy_data, tmp_path, *flags, *anew, **old)
    assert "gates by plain SGD" in again.stdout + again.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["in the middle of epoch 2", "at the end of epoch 1"])
def test_a_resumed_masked_lm_sees_the_masks_of_an_uninterrupted_one(
    train_masked_lm, tmp_path, place
):
    """fairseq's own number of data workers, and nothing but its own command started twice."""
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    flags = (
        "--max-epoch",
        2,
        "--num-workers",
        1,
        "--log-interval",
        1,
        "--save-interval-updates",
        4,
    )
    train_masked_lm(whole, *flags)
    middle = f'"num_updates": "{final(whole)[2] * 3 // 4}"'
    words = "end of epoch 1 " if "end" in place else middle
    assert train_masked_lm(killed, *flags, killed_at=words).returncode == -signal.SIGKILL
    state = load_checkpoint(killed / "checkpoint_last.pt")["extra_state"]["train_iterator"]
    assert state["epoch"] == 2 and (state["iterations_in_epoch"] == 0) == ("end" in place)
    train_masked_lm(killed, *flags)
    assert_same_end(final(whole), final(killed))


def test_a_training_at_its_goal_makes_no_further_update(monkeypatch):
    """As after a kill between the last save and the end."""
    monkeypatch.setattr(program, "train", program.train)
    end_at_the_goal()
    trainer = SimpleNamespace(get_num_updates=lambda: 5)
    for most, ended in ((5, True), (4, True), (6, False), (0, False)):
        cfg = SimpleNamespace(optimization=SimpleNamespace(max_update=most))
        if ended:
            assert program.train(cfg, trainer, None, None) == ([None], True)
        else:
            with pytest.raises(AttributeError):  # it trains
                program.train(cfg, trainer, None, None)


def test_patience_goes_on_where_it_was(monkeypatch):
    cfg = SimpleNamespace(checkpoint=CheckpointConfig(patience=3))
    stop = program.should_stop_early
    monkeypatch.setattr(stop, "best", None, raising=False)
    monkeypatch.setattr(stop, "num_runs", 0, raising=False)
    assert [stop(cfg, loss) for loss in (2.0, 3.0, 2.5)] == [False, False, False]
    extra = {}
    place = object()
    save_patience(
        lambda trainer, filename, extra_state: None, None, "checkpoint_last.pt", extra
    )
    for updates, flag, left in (
        (7, "", 2),
        (0, "", 0),  # a fine-tuning begins at no update
        (7, "reset_dataloader", 2),  # as of the best value, fairseq's
        (7, "reset_meters", 0),
        (7, "reset_optimizer", 0),
    ):
        stop.best = None
        stop.num_runs = 0
        trainer = SimpleNamespace(get_num_updates=lambda updates=updates: updates)
        resets = CheckpointConfig(**({flag: True} if flag else {}))
        assert load_patience(lambda cfg, trainer: (extra, place), resets, trainer) == (
            extra,
            place,
        )
        assert stop.num_runs == left and stop(cfg, 2.25) == (left == 2)


def test_another_architecture_is_refused_and_overwrites_nothing(
    fairseq, toy_data, toy_checkpoint, tmp_path
):
    (tmp_path / "checkpoint_last.pt").write_bytes(toy_checkpoint.read_bytes())
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    done = fairseq.train(toy_data, tmp_path, arch="transformer", check=False)
    assert done.returncode != 0
    assert "--arch was moa_transformer_tiny and is transformer" in done.stderr.splitlines()[-1]
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
    restored = ("--finetune-from-model", str(toy_checkpoint))
    done = fairseq.train(
        toy_data, tmp_path / "other", *restored, arch="transformer", check=False
    )
    assert done.returncode != 0 and not list((tmp_path / "other").glob("*.pt"))
    assert "leave --finetune-from-model out" in done.stderr.splitlines()[-1]
