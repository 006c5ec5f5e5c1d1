"""The runs of a study: their order, what is kept of their logs, and how workers share them."""

import errno
import json
import multiprocessing
import re
import time
from pathlib import Path
from types import SimpleNamespace

import portalocker
import pytest
import torch
from fairseq import checkpoint_utils
from played_study import (
    COMMIT,
    STUDY,
    Player,
    record_of,
    report_of,
    without,
)

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.loading import shipped_recipes
from moa_fairseq.experiments.records import provenance
from moa_fairseq.experiments.study import running
from moa_fairseq.experiments.study.design import Run
from moa_fairseq.experiments.study.records import append_record, records_of
from moa_fairseq.experiments.study.running import Workspace, curve_of
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
    workspace = Workspace(
        SimpleNamespace(study="toy", threads=1, stage="all"), tmp_path, None, 0
    )
    with pytest.raises(Stopped):
        running._train_and_record(one, workspace)
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
    workspace = Workspace(
        SimpleNamespace(study="toy", threads=1, stage="all"), tmp_path, None, 0
    )
    running._train_and_record(one, workspace)
    assert written == ["translation", "record"]


def test_systems_of_a_seed_run_back_to_back(study, capsys):
    status, records = study()
    assert status == 0
    assert Player.ran == [f"{system}-seed{seed}" for seed in (1, 2, 3, 4) for system in "AB"]
    assert sorted(path.name for path in records.iterdir()) == ["records.jsonl"]
    record = record_of(records, "B-seed2")
    assert record["curve"][0] == {"updates": 2, "valid": 5.54, "train": 9.0}
    assert (record["system"], record["seed"], record["end"], record["commit"]) == (
        "B",
        2,
        "finished",
        COMMIT,
    )
    assert "--set train.seed=2" in record["command"] and "1 threads" in record["hardware"]
    assert record["precision"] == "fp32"
    without(records, "B-seed2")
    capsys.readouterr()
    assert study("--dry-run")[0] == 0
    assert re.findall(r"[AB]-seed\d", capsys.readouterr().out) == ["B-seed2"], "what is left"


def test_a_record_names_no_folder_of_its_machine(study, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    status, records = study("--runs", str(elsewhere))
    command = record_of(records, "B-seed2")["command"]
    assert status == 0 and (elsewhere / "toy" / "B-seed2").is_dir()
    assert "--save-dir B-seed2 " in command and "recipe configs/" in command
    assert str(elsewhere) not in command and str(Path.cwd()) not in command


@pytest.mark.thorough
def test_a_study_that_was_interrupted_twice_says_the_same(study):
    for Player.end in (3, 5):
        status, _ = study(name="again")
        assert status == 130
    Player.end = None
    study(name="again")
    assert len(Player.ran) == len(set(Player.ran)) == 8, "a recorded run is never made again"
    study(name="whole")
    again = report_of(study, name="again")
    whole = report_of(study, name="whole")
    assert again["systems"] == whole["systems"] and again["contrasts"] == whole["contrasts"]
    (contrast,) = whole["contrasts"]
    assert (
        contrast["mean"] == pytest.approx(-0.5)
        and contrast["verdict"] == "better"
        and contrast["n"] == 4
    )


def test_a_run_whose_last_validation_is_no_number_has_diverged(study, monkeypatch):
    """fairseq goes on training where only a validation is NaN."""
    play = Player.run

    def run(self, command, log):
        play(self, command, log)
        folder = Path(command[command.index("--save-dir") + 1])
        row = {"epoch": 2, "valid_loss": "nan", "valid_num_updates": "5"}
        with open(folder / "train.jsonl", "a") as stream:
            stream.write(json.dumps(row) + "\n" if folder.name.startswith("B") else "")

    monkeypatch.setattr(Player, "run", run)
    _, records = study(seeds=1)
    ends = {name: record_of(records, f"{name}-seed1")["end"] for name in "AB"}
    assert ends == {"A": "finished", "B": "diverged"}


def test_a_training_that_failed_otherwise_has_not_diverged(study, monkeypatch, capsys):
    """An earlier attempt with other settings did, and its log is still in the folder."""
    folder = Path("runs/toy/A-seed1")
    folder.mkdir(parents=True)
    (folder / "train.log").write_text(
        "fairseq-train: error: The training has diverged: Loss is nan\n"
    )
    monkeypatch.setattr(
        Player, "run", lambda *_: (_ for _ in ()).throw(UserError("other settings"))
    )
    status, records = study()
    assert status == 2 and not records_of(records)


def test_a_finished_run_without_a_validation_has_not_diverged(study, monkeypatch, capsys):
    """For example, because its train.jsonl was deleted."""
    play = Player.run

    def run(self, command, log):
        play(self, command, log)
        Path(command[command.index("--save-dir") + 1], "train.jsonl").unlink()

    monkeypatch.setattr(Player, "run", run)
    status, records = study()
    assert status == 2 and not records_of(records)
    assert "A-seed1/train.jsonl" in capsys.readouterr().err


def test_any_other_failure_ends_the_study(study, monkeypatch, capsys):
    monkeypatch.setattr(
        Player, "run", lambda *_: (_ for _ in ()).throw(UserError("the disk is full"))
    )
    status, records = study()
    assert status == 2 and "the disk is full" in capsys.readouterr().err
    assert not records_of(records)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"train.flags.nonsense": 3}, "nonsense"),
        ({"model.flags.key-heads": 3}, "key-heads|key heads"),
        ({"model.arch": "none"}, "none"),
    ],
)
def test_a_mistake_in_a_later_system_is_found_before_the_first_is_trained(
    study, capsys, values, named
):
    systems = {
        **STUDY["systems"],
        "wrong": {"label": "?", "recipe": "../tiny.yaml", "set": values},
    }
    for flags_of_it in ((), ("--dry-run",)):
        assert study(*flags_of_it, systems=systems)[0] == 2 and not Player.ran
        assert re.search(rf"wrong.*({named})", capsys.readouterr().err)


def test_workers_share_a_study(study, monkeypatch):
    """As the workers of --jobs do on one machine, and those of a job array on several."""
    play = Player.run
    monkeypatch.setattr(Player, "run", lambda *args: (play(*args), time.sleep(0.05)))
    fork = multiprocessing.get_context("fork")
    ran = [fork.Queue(), fork.Queue()]
    workers = [
        fork.Process(target=lambda queue=queue: (study(), queue.put(Player.ran)))
        for queue in ran
    ]
    for worker in workers:
        worker.start()
    first, second = (queue.get(timeout=60) for queue in ran)
    assert (
        first
        and second
        and sorted(first + second) == [f"{s}-seed{n}" for s in "AB" for n in (1, 2, 3, 4)]
    )
    assert report_of(study)["runs"] == 8


@pytest.mark.parametrize("held", ["A-seed1.lock", "records.jsonl"])
def test_without_locks_nothing_is_trained_and_the_study_has_failed(
    study, monkeypatch, capsys, held
):
    """Locks that do not work are not taken for another worker's.

    The records' lock is tried before any training.
    """
    acquire = portalocker.Lock.acquire

    def acquire_unless_held(lock, *arguments, **options):
        if Path(lock.filename).name != held:
            return acquire(lock, *arguments, **options)
        raise portalocker.LockException(
            OSError(errno.ENOLCK, "No locks available"), "No locks available"
        )

    monkeypatch.setattr(portalocker.Lock, "acquire", acquire_unless_held)
    status, records = study(seeds=1)
    assert status == 2 and not Player.ran and not records_of(records)
    assert held in (said := capsys.readouterr().err) and "has no locks" in said


def test_a_run_that_another_worker_holds_is_left_to_it_with_a_message(study, capsys):
    folder = Path("runs/toy")
    folder.mkdir(parents=True)
    with portalocker.Lock(folder / "A-seed1.lock", "a", timeout=0):
        assert study(seeds=1)[0] == 0
    assert Player.ran == ["B-seed1"]
    said = capsys.readouterr()
    assert "another worker runs A-seed1" in said.out + said.err
    Player.ran = []
    assert study(seeds=1)[0] == 0 and Player.ran == ["A-seed1"], (
        "a lock that nobody holds is free"
    )


def test_a_run_that_another_worker_has_finished_is_not_repeated(tmp_path, monkeypatch):
    runs = [Run("A", seed, tmp_path / "tiny.yaml", {}, tmp_path) for seed in range(3)]
    ran = []

    def train_and_record(run, workspace):
        ran.append(run.seed)
        about = {"study": "toy", "system": "A", "seed": 1, "end": "finished", "curve": []}
        about["commit"] = provenance.commit()
        append_record(tmp_path, {**about, "parameters": None, "tokens_per_second": None})

    monkeypatch.setattr(running, "_train_and_record", train_and_record)
    running.run_pending(
        runs, Workspace(SimpleNamespace(study="toy"), tmp_path / "folders", None, 0)
    )
    assert ran == [0, 2]
