"""SIGTERM at an update: what is saved there and what that update still validates."""

import signal
import sys

import pytest
from fairseq import checkpoint_utils
from fairseq_cli import train as program

from moa_fairseq.plugin.fairseq_compat import load_checkpoint
from moa_fairseq.plugin.patches import save_on_sigterm

LAST = "checkpoint_last.pt"
BEST = "checkpoint_best.pt"
NUMBERED = "checkpoint_2_1.pt"


@pytest.fixture(autouse=True)
def _anew():
    """fairseq keeps the best value and the count of --patience at its functions."""
    functions = (checkpoint_utils.save_checkpoint, program.should_stop_early)
    for step in ("before", "after"):
        for function in functions:
            for name in ("best", "num_runs"):
                vars(function).pop(name, None)
        if step == "before":
            yield


@pytest.mark.parametrize(
    ("flags", "files", "best", "patience"),
    [
        (("--no-last-checkpoints",), {LAST}, False, False),
        (("--no-save", "--save-interval-updates", 1), set(), False, False),
        (
            ("--save-interval-updates", 1, "--no-last-checkpoints"),
            {LAST, BEST, NUMBERED},
            True,
            True,
        ),
        (
            ("--validate-interval-updates", 1),
            {LAST},
            False,
            True,
        ),  # fairseq's best is that of a save
    ],
)
def test_what_an_update_saves_and_validates(
    build_trainer, tmp_path, monkeypatch, caplog, flags, files, best, patience
):
    caplog.set_level("INFO")
    monkeypatch.setattr(save_on_sigterm, "was_told", lambda: True)
    trainer, _ = build_trainer("--save-dir", tmp_path, "--patience", 3, *flags)
    epochs = trainer.get_train_iterator(1, load_dataset=False)
    trainer.task.load_dataset("valid")
    trainer.train_step([next(epochs.next_epoch_itr())])
    step = save_on_sigterm.saving_when_told(program.validate_and_save)
    with pytest.raises(SystemExit) as ended:
        step(trainer.cfg, trainer, trainer.task, epochs, ["valid"], False)
    assert ended.value.code == 143
    assert {path.name for path in tmp_path.iterdir()} == files
    assert ("--no-save" in caplog.text) == (not files) == ("SIGTERM: saving" not in caplog.text)
    if files:
        extra = load_checkpoint(tmp_path / LAST)["extra_state"]
        assert extra["train_iterator"]["iterations_in_epoch"] == 1
        assert ("best" in extra, "patience" in extra) == (best, patience)
    if NUMBERED in files:
        assert load_checkpoint(tmp_path / NUMBERED)["extra_state"]["val_loss"] == extra["best"]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None])
def test_a_handler_that_the_caller_has_set_stays(monkeypatch, handler):
    monkeypatch.setattr(sys, "argv", ["fairseq-train"])
    monkeypatch.setattr(program, "validate_and_save", program.validate_and_save)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        save_on_sigterm.install()
        installed = signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    expected = save_on_sigterm._on_sigterm if handler is signal.SIG_DFL else handler
    assert installed is expected


@pytest.mark.thorough
def test_a_process_that_waits_for_the_others_ends_at_once(fairseq, toy_data, tmp_path):
    """They may have been told, too, and never come."""
    first, second = fairseq.pair(*fairseq.words(toy_data, tmp_path))
    second.process.kill()
    second.end()
    first.said_until("distributed init (rank 0)")
    first.send_signal(signal.SIGTERM)
    assert first.end().returncode == -signal.SIGTERM
