"""What the runs of a study must share: one commit, one text, and one kind of machine per block."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy
import played_study
import pytest
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from played_study import (
    COMMIT,
    OTHER,
    STUDY,
    Player,
    changed,
    record_of,
    report_of,
)

from moa_fairseq.experiments.make import read_step_records, write_step_record
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.records import provenance
from moa_fairseq.experiments.study import conditions, running
from moa_fairseq.experiments.study.records import append_record, records_of


def left_a_checkpoint(name):
    checkpoints = Path("runs", "toy", name, "checkpoints")
    checkpoints.mkdir()
    (checkpoints / "checkpoint_last.pt").write_bytes(b"a model")


def test_records_name_their_data_and_other_data_is_refused(study, tmp_path, capsys):
    data = tmp_path / "data" / "binarised"
    data.mkdir(parents=True)
    (data / "dict.txt").write_text("a 1\n")
    builder = MMapIndexedDatasetBuilder(str(data / "valid.bin"), dtype=numpy.uint16)
    builder.add_item(torch.tensor([4, 3, 4, 4, 2]))
    builder.finalize(str(data / "valid.idx"))
    (tmp_path / "data" / "manifest.json").write_text(
        json.dumps({"settings": {"recipe": "wikitext2_sp4k"}})
    )
    Player.data = data
    Player.end = 2
    _, records = study("--data", str(data))
    digest = record_of(records, "A-seed1")["data"]
    assert len(digest) == 16 and record_of(records, "B-seed1")["data"] == digest
    assert record_of(records, "A-seed1")["unknown"] == 0.25 == report_of(study)["unknown"]
    assert "25.00% <unk>" in (records / "report.md").read_text()
    (data / "dict.txt").write_text("b 1\n")  # as many bytes
    Player.end = None
    Player.ran = []
    capsys.readouterr()
    assert study("--data", str(tmp_path / "data"))[0] == 2 and not Player.ran
    assert digest in (told := capsys.readouterr().err) and "--data" in told
    changed(records, "B-seed1", data="another")
    study("--report")
    assert f"unequal data ({digest}; another)" in capsys.readouterr().out


def test_a_run_on_changed_raw_text_is_not_recorded(study, capsys):
    """Its digest is known only when a run's recipe has prepared it."""
    Player.conditions = {"data": "1" * 16}
    study(seeds=1)
    Player.conditions = {"data": "2" * 16}
    status, records = study(seeds=2)
    assert (
        status == 2
        and set(records_of(records)) == {("A", 1), ("B", 1)}
        and len(Player.ran) == 3
    )
    told = capsys.readouterr().err
    assert "1" * 16 in told and "2" * 16 in told and "delete runs/toy/A-seed2" in told


def test_data_prepared_with_other_values_than_the_recipes_is_refused(study, tmp_path, capsys):
    data = tmp_path / "data" / "binarised"
    data.mkdir(parents=True)
    (tmp_path / "data" / "manifest.json").write_text(
        json.dumps({"settings": {"recipe": "wikitext2_sp512"}})
    )
    for place in (data, data.parent):
        assert study("--data", str(place))[0] == 2 and not Player.ran
        assert "wikitext2_sp4k → wikitext2_sp512" in capsys.readouterr().err
    (tmp_path / "data" / "manifest.json").write_text(
        json.dumps({"settings": {"recipe": "wikitext2_sp4k"}})
    )
    assert study("--data", str(data))[0] == 0 and len(Player.ran) == 8


@pytest.mark.parametrize(
    "made_by", [None, OTHER, f"{OTHER}-dirty-01234567", f"{COMMIT}, {OTHER}"]
)
def test_trainings_of_another_commit_are_not_recorded_under_this_one(study, capsys, made_by):
    """For example, after a commit, with a new --records but the old run folders."""
    study(seeds=1)
    left_a_checkpoint("A-seed1")
    mark = read_step_records(Path("runs/toy/A-seed1"))["train"]
    sessions = [
        {**mark["made_by"][0], "commit": commit}
        for commit in (made_by or "").split(", ")
        if commit
    ]
    write_step_record(Path("runs/toy/A-seed1"), "train", **{**mark, "made_by": sessions})
    capsys.readouterr()
    Player.ran = []
    assert study("--records", "others", seeds=1)[0] == 2 and not Player.ran
    assert not records_of(Path("others/toy"))
    said = capsys.readouterr().err
    assert (made_by or "unknown") in said and re.search("--runs.*--records", said)
    assert ("git worktree add" in said) == (made_by == OTHER)
    assert study("--records", "others", "--runs", "again", seeds=1)[0] == 0, "the remedy"
    assert Player.ran == ["A-seed1", "B-seed1"]


def test_a_training_of_this_commit_is_recorded_as_it_was_made(study, monkeypatch):
    """For example, after its record was lost.

    The record has the date and versions of the training, not today's.
    """
    study(seeds=1)
    left_a_checkpoint("A-seed1")
    folder = Path("runs/toy/A-seed1")
    mark = read_step_records(folder)["train"]
    mark["made_by"][0].update(date="2001-01-01", versions={"torch": "0.1"})
    write_step_record(folder, "train", **mark)
    monkeypatch.setattr(played_study, "say_what_trains", lambda folder: None)  # it is done
    assert study("--records", "others", seeds=1)[0] == 0
    record = record_of(Path("others/toy"), "A-seed1")
    assert (record["date"], record["versions"]) == ("2001-01-01", {"torch": "0.1"})


def test_a_commit_in_the_middle_of_a_study_ends_it(study, monkeypatch, capsys):
    """Each training is a separate process, which runs the source tree as it is at that time."""
    play = Player.run

    def run(self, command, log):
        if len(Player.ran) == 2:
            for module in (running, provenance):
                monkeypatch.setattr(module, "commit", lambda: OTHER)
        play(self, command, log)

    monkeypatch.setattr(Player, "run", run)
    status, records = study()
    assert status == 2 and OTHER in capsys.readouterr().err
    assert {each.content["commit"] for each in records_of(records).values()} == {COMMIT}
    assert set(records_of(records)) == {("A", 1), ("B", 1)}
    assert study()[0] == 2 and len(Player.ran) == 3, "nothing is trained under two commits"


def test_a_block_that_another_machine_has_continued_is_left_to_it(study, monkeypatch, capsys):
    """It has recorded B of seed 1 while A ran here."""
    systems = {**STUDY["systems"], "C": {"label": "third", "recipe": "../tiny.yaml"}}
    play = Player.run
    records = Path("results/studies/toy")

    def run(self, command, log):
        play(self, command, log)
        if Player.ran == ["A-seed1"]:
            about = {"study": "toy", "system": "B", "seed": 1, "end": "finished", "curve": []}
            about = {**about, "parameters": None, "tokens_per_second": None}
            append_record(records, {**about, "hardware": "another machine", "commit": COMMIT})

    monkeypatch.setattr(Player, "run", run)
    assert study(systems=systems, seeds=2)[0] == 0
    assert Player.ran == ["A-seed1", *(f"{name}-seed2" for name in "ABC")]
    said = capsys.readouterr()
    (line,) = (line for line in (said.out + said.err).splitlines() if "another machine" in line)
    assert "seed 1" in line


def test_runs_that_differ_in_more_than_the_system_are_not_mixed(study, monkeypatch, capsys):
    Player.end = 3
    study()
    here = conditions.Workspace.conditions

    def on_another_machine(*arguments):
        return here(*arguments)._replace(hardware="another machine, 1 threads")

    monkeypatch.setattr(conditions.Workspace, "conditions", on_another_machine)
    Player.end = None
    Player.conditions = {"hardware": "another machine"}
    study()
    assert "B-seed2" not in Player.ran and "B-seed3" in Player.ran, "seed 2 was begun elsewhere"
    said = capsys.readouterr()
    assert "seed 2" in said.out + said.err and "seed 1" not in said.out + said.err, (
        "seed 1 has ended"
    )
    tuning = {"tuning": {"grid": {"train.flags.lr": [1, 2]}}}
    monkeypatch.setattr(conditions.Workspace, "conditions", here)
    Player.ran = []
    Player.end = 1
    Player.conditions = {}
    study("--tune", name="tuned", **tuning)

    def in_another_precision(*arguments):
        return here(*arguments)._replace(precision="amp")

    monkeypatch.setattr(conditions.Workspace, "conditions", in_another_precision)
    Player.end = None
    Player.conditions = {"precision": "amp"}
    study("--tune", name="tuned", **tuning)
    assert "A-lr=2-seed101" not in Player.ran and "B-lr=2-seed101" in Player.ran, (
        "A was begun elsewhere"
    )
    monkeypatch.setattr(running, "commit", lambda: "4567def")
    assert study()[0] == 2 and "git worktree" in capsys.readouterr().err


def test_conditions_name_only_the_gpus_that_a_small_batch_uses(monkeypatch):
    recipe = SimpleNamespace(train=SimpleNamespace(precision="fp16"), model=None)
    monkeypatch.setattr(conditions, "choose_devices", lambda *_, dry_run: Hardware(4))
    fewer = Hardware(2, "NVIDIA H100")
    monkeypatch.setattr(conditions, "fit_devices", lambda *_: (recipe, fewer, ""))
    workspace = conditions.Workspace(SimpleNamespace(threads=1), Path(), None, gpus=4)
    run = SimpleNamespace(name="A-seed1", load=lambda: recipe)
    assert workspace.conditions(run).hardware.startswith("2 x NVIDIA H100")
