"""What a study keeps of a run's log."""

import json
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.loading import shipped_recipes
from moa_fairseq.experiments.study import running
from moa_fairseq.experiments.study.design import Run
from moa_fairseq.experiments.study.running import Place, curve_of
from moa_fairseq.plugin.fairseq_compat import load_checkpoint
from moa_fairseq.process import DIVERGED

LINES = [
    {"epoch": 1, "num_updates": 10, "loss": 5.0, "nll_loss": 4.0},
    {"epoch": 1, "num_updates": 20, "loss": 4.0, "nll_loss": 3.0},
    {"epoch": 1, "valid_num_updates": 20, "valid_loss": 4.5, "valid_nll_loss": 3.5},
    {"epoch": 2, "num_updates": 30, "loss": 3.0, "nll_loss": 2.0},
    {"epoch": 2, "valid_num_updates": 30, "valid_loss": 3.5, "valid_nll_loss": 2.5},
    {"epoch": 2, "num_updates": 30, "loss": 3.2, "nll_loss": 2.2},
    {"epoch": 2, "valid_num_updates": 30, "valid_loss": 3.25, "valid_nll_loss": 2.25},
]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_validation_repeated_after_a_restart_counts_once(tmp_path):
    assert curve_of(write(tmp_path / "train.jsonl", LINES)) == [
        {"updates": 20, "valid": 3.5, "train": 3.5},
        {"updates": 30, "valid": 2.25, "train": 2.2},
    ]


def test_without_a_likelihood_the_loss_counts(tmp_path):
    plain = [
        {key: value for key, value in line.items() if "nll" not in key} for line in LINES[:3]
    ]
    assert curve_of(write(tmp_path / "train.jsonl", plain)) == [
        {"updates": 20, "valid": 4.5, "train": 4.5}
    ]


def test_a_model_that_is_not_saved_has_diverged(tmp_path):
    """One that is loaded may have been so before."""
    state = {"model": {"w": torch.tensor([float("nan")])}}
    with pytest.raises(UserError) as refusal:
        checkpoint_utils.torch_persistent_save(state, str(tmp_path / "checkpoint_last.pt"))
    assert DIVERGED.search(f"fairseq-train: error: {refusal.value}")
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(UserError, match="had diverged") as refusal:
        load_checkpoint(tmp_path / "other.pt")
    assert not DIVERGED.search(f"fairseq-train: error: {refusal.value}")


def test_the_studys_seed_comes_last(tmp_path, monkeypatch):
    """A system's own values cannot take the place of the seed by which runs are paired."""
    commands = []

    class Stopped(Exception):
        pass

    class Executor:
        def __init__(self, environment):
            pass

        def run(self, command, log):
            commands.append(command)
            raise Stopped

    monkeypatch.setattr(running, "Executor", Executor)
    recipe = shipped_recipes()["quickstart_moa"]
    one = Run("A", 3, recipe, {"train.seed": 9, "train.flags.lr": 0.1}, tmp_path)
    place = Place(SimpleNamespace(study="toy", threads=1, stage="all"), tmp_path, None, 0)
    with pytest.raises(Stopped):
        running._train_and_record(one, place)
    values = [word for before, word in zip(commands[0], commands[0][1:]) if before == "--set"]
    assert [value for value in values if value.startswith("train.seed")][-1] == "train.seed=3"
    assert "train.flags.lr=0.1" in values


def test_translations_are_written_before_the_record(tmp_path, monkeypatch):
    """A run with a record is never carried out again, so what a kill left unwritten would be lost."""
    written = []
    outcome = running.Outcome(running.Provenance(), [{"updates": 1, "valid": 2.0}], False)
    monkeypatch.setattr(running, "_train", lambda *_: outcome)
    translated = SimpleNamespace(hypotheses=["x"])
    monkeypatch.setattr(running, "read_generate_log", lambda path: translated)
    monkeypatch.setattr(running, "write_output", lambda *_: written.append("translation"))
    monkeypatch.setattr(running, "append_record", lambda *_: written.append("record"))
    (tmp_path / "A-seed3").mkdir()
    (tmp_path / "A-seed3" / "generate-test.txt").touch()
    result = {"subset": "test", "metrics": {}, "other_subsets": {}}
    (tmp_path / "A-seed3" / "result.json").write_text(json.dumps(result))
    one = Run("A", 3, shipped_recipes()["quickstart_moa"], {}, tmp_path)
    place = Place(SimpleNamespace(study="toy", threads=1, stage="all"), tmp_path, None, 0)
    running._train_and_record(one, place)
    assert written == ["translation", "record"]
