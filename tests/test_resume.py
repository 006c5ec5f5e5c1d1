"""A training that is killed and started again ends where an uninterrupted one ends."""

import os
import signal
import subprocess
import sys

import pytest
import torch

import moa_fairseq
from moa_fairseq.fairseq_compat import load_checkpoint

USER_DIR = os.path.dirname(moa_fairseq.__file__)
EPOCHS = ("--max-tokens", 100, "--max-epoch", 3, "--save-interval-updates", 4, "--keep-interval-updates", 2)
# the second epoch, in which the kill comes, has G steps
BCD = ("--task", "translation_bcd", "--bcd-g-every", 2, "--criterion", "label_smoothed_cross_entropy")
# of 12 updates per epoch; --num-workers 1 is fairseq's default
MASKED_LM = ("--max-epoch", 3, "--num-workers", 1, "--log-interval", 1, "--save-interval-updates", 4)
CASES = {
    "moa": ("moa_transformer_tiny", (), "q_experts.weight"),
    "hash": (
        "moa_transformer_tiny",
        ("--router-choice", "hash", "--router-gates", "uniform", "--amp"),
        "q_experts.weight",
    ),
    "frozen": ("moh_transformer_tiny", ("--router-choice", "frozen", "--amp"), "q_proj.weight"),
    "bcd": ("mae_transformer_tiny", BCD, "gate.fc2.weight"),
    "joint": ("mae_transformer_tiny", (*BCD, "--bcd", "none"), "gate.norm.running_mean"),
}


def kill_at(words, command, number=signal.SIGKILL):
    """Start the training and kill it once its log says `words`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    for line in process.stdout:
        if words in line:
            process.send_signal(number)
            break
    process.stdout.read()
    return process.wait()


def final(folder):
    state = load_checkpoint(folder / "checkpoint_last.pt")
    return state["model"], state["extra_state"]["val_loss"], state["optimizer_history"][-1]["num_updates"]


def test_a_terminated_training_saves_a_checkpoint(fairseq, toy_data, tmp_path):
    """In the middle of an epoch, without a validation, and it goes on from there to the same end."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    flags = ("--max-tokens", 60, "--max-epoch", 6, "--no-epoch-checkpoints")
    done = fairseq.train(toy_data, whole, *flags)
    command = [sys.executable, "-m", "fairseq_cli.train", *map(str, done.args[3:])]
    command = [str(killed) if word == str(whole) else word for word in command]
    assert kill_at('"epoch": 2, "update": 1.', command, signal.SIGTERM) == 128 + signal.SIGTERM
    state = load_checkpoint(killed / "checkpoint_last.pt")
    reached, extra = state["optimizer_history"][-1]["num_updates"], state["extra_state"]
    assert extra["train_iterator"]["iterations_in_epoch"] > 0 and extra["val_loss"] is None
    assert 0 < extra["previous_training_time"] < 600
    resumed = fairseq.train(toy_data, killed, *flags)
    assert f"@ {reached} updates" in resumed.stdout + resumed.stderr
    model, loss, updates = final(whole)
    again, loss_again, updates_again = final(killed)
    assert reached < updates_again == updates and loss_again == loss
    assert [name for name, tensor in model.items() if not torch.equal(again[name], tensor)] == []


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_equals_uninterrupted(fairseq, toy_data, tmp_path, case):
    arch, flags, moving = CASES[case]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = fairseq.train(toy_data, whole, *EPOCHS, *flags, arch=arch)
    command = [sys.executable, "-m", "fairseq_cli.train", *map(str, done.args[3:])]
    command = [str(killed) if word == str(whole) else word for word in command]
    model, loss, updates = final(whole)

    assert kill_at(f'"num_updates": "{updates // 2}"', command) == -signal.SIGKILL
    part, _, reached = final(killed)
    assert 0 < reached < updates
    resumed = fairseq.train(toy_data, killed, *EPOCHS, *flags, arch=arch)
    assert f"@ {reached} updates" in resumed.stdout + resumed.stderr

    again, loss_again, updates_again = final(killed)
    assert updates_again == updates
    assert abs(loss_again - loss) < 1e-4
    for name, tensor in model.items():
        torch.testing.assert_close(
            again[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    name = f"encoder.layers.0.self_attn.{moving}"
    assert not torch.allclose(part[name], model[name])  # it had not been finished before the kill


def test_a_joint_run_that_gave_its_gates_to_adam_goes_on_so(fairseq, toy_data, tmp_path):
    """As all did before the flag existed: a checkpoint says nothing of it, its optimizer holds the gates."""
    flags = (*BCD, "--bcd", "none", "--max-tokens", 400)
    old, of_adam = dict(arch="mae_transformer_tiny"), ("--gate-optimizer", "fairseq")
    fairseq.train(toy_data, tmp_path, *flags, *of_adam, "--max-epoch", 1, **old)
    path = tmp_path / "checkpoint_last.pt"
    state = load_checkpoint(path)
    del state["cfg"]["task"]["gate_optimizer"], state["cfg"]["model"].gate_norm
    torch.save(state, path)
    on_cpu = ("--user-dir", USER_DIR, "--cpu", "--max-tokens", 400)
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


@pytest.fixture(scope="module")
def whole_masked_lm(train_masked_lm, tmp_path_factory):
    """An uninterrupted masked LM, three epochs: its run folder, and its command."""
    folder = tmp_path_factory.mktemp("masked_lm") / "whole"
    return folder, train_masked_lm(folder, *MASKED_LM).args


@pytest.mark.parametrize("place", ["in the middle of epoch 2", "at the end of epoch 1"])
def test_a_resumed_masked_lm_sees_the_masks_of_an_uninterrupted_one(whole_masked_lm, tmp_path, place):
    """fairseq's own number of data workers, and nothing but its own command started twice."""
    whole, args = whole_masked_lm
    model, loss, updates = final(whole)
    command = [str(tmp_path) if word == str(whole) else word for word in args]
    words = "end of epoch 1 " if "end" in place else f'"num_updates": "{updates // 2 + 1}"'
    assert kill_at(words, command) == -signal.SIGKILL
    state = load_checkpoint(tmp_path / "checkpoint_last.pt")["extra_state"]["train_iterator"]
    assert state["epoch"] == 2 and (state["iterations_in_epoch"] == 0) == ("end" in place)

    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    again, loss_again, updates_again = final(tmp_path)
    assert (updates_again, loss_again) == (updates, loss)
    torch.testing.assert_close(again, model, rtol=0, atol=0)


def test_another_architecture_is_refused_and_overwrites_nothing(fairseq, toy_data, toy_checkpoint, tmp_path):
    (tmp_path / "checkpoint_last.pt").write_bytes(toy_checkpoint.read_bytes())
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    done = fairseq.train(toy_data, tmp_path, arch="transformer", check=False)
    assert done.returncode != 0
    assert "--arch was moa_transformer_tiny and is transformer" in done.stderr.splitlines()[-1]
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
