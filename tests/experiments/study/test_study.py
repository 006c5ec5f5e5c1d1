"""Studies: order, records, interruptions, tuning and what the tables say; trainings are played, not run."""

import errno
import functools
import json
import multiprocessing
import re
import signal
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy
import portalocker
import pytest
import torch
import yaml
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

from moa_fairseq.cli import main
from moa_fairseq.errors import Diverged, UserError
from moa_fairseq.experiments.data.prepare import content_digest
from moa_fairseq.experiments.make import read_step_records, write_step_record
from moa_fairseq.experiments.recipes.hardware import Hardware, choose_devices, detect_hardware
from moa_fairseq.experiments.recipes.loading import load_recipe, shipped_recipes
from moa_fairseq.experiments.records import provenance
from moa_fairseq.experiments.scoring.complexity import complexity
from moa_fairseq.experiments.study import command, design, loading, report, running
from moa_fairseq.experiments.study import pictures as picture_module
from moa_fairseq.experiments.study.design import Run, fitting_records, runs_of, settings_of
from moa_fairseq.experiments.study.loading import load_study
from moa_fairseq.experiments.study.records import append_record, records_of
from moa_fairseq.process import environment_of_a_child, flags

STUDIES = Path(__file__).resolve().parents[3].glob("configs/studies/*.yaml")

RECIPE = """
experiment: tiny
summary: a language model that is never trained
data: {recipe: wikitext2_sp4k}
model: {arch: dense_transformer_lm_base, flags: {decoder-layers: 1, decoder-embed-dim: 64,
  decoder-input-dim: 64, decoder-output-dim: 64, decoder-ffn-embed-dim: 64, decoder-attention-heads: 4}}
train: {task: language_modeling, criterion: cross_entropy, max_tokens: 16, max_update: 4, precision: fp32}
"""
STUDY = {
    "study": "toy",
    "question": "Is B better than A?",
    "seeds": 4,
    "last": 2,
    "systems": {
        "A": {"label": "dense", "recipe": "../tiny.yaml"},
        "B": {"label": "mixture", "recipe": "../tiny.yaml"},
    },
    "contrasts": {"gain": {"first": "B", "second": "A", "question": "?"}},
}


COMMIT = "0123abc" * 5 + "01234"
OTHER = "fedcba9876" * 4


def say_what_trains(folder):
    """As the recipe does in the run's folder."""
    conditions = {"hardware": detect_hardware().describe(), "threads": 1, "precision": "fp32"}
    if Player.data:
        conditions["data"] = content_digest(Player.data)
        write_step_record(folder, "prepare", inputs={}, facts={"folder": str(Player.data)})
    conditions |= Player.conditions
    write_step_record(
        folder, "train", inputs={}, facts={}, made_by=[provenance.provenance(**conditions)]
    )


class Player:
    """Stands for the executor: writes what a training would have logged. end: after so many runs, Ctrl-C.

    conditions: of the trainings, where they are not those of this machine.
    """

    ran: ClassVar[list] = []
    end = None
    diverges = ()
    data = None
    conditions: ClassVar[dict] = {}

    def __init__(self, environment):
        assert environment == {"OMP_NUM_THREADS": "1"}

    def run(self, command, log):
        folder = Path(command[command.index("--save-dir") + 1])
        settings = dict(text.partition("=")[::2] for text in command if "=" in text)
        if Player.end is not None and len(Player.ran) >= Player.end:
            raise KeyboardInterrupt
        Player.ran.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        say_what_trains(folder)
        if folder.name in Player.diverges:
            raise Diverged("fairseq-train failed")
        rate = float(settings.get("train.flags.lr", 1))
        loss = (
            3
            - 0.5 * folder.name.startswith("B")
            + 0.01 * int(settings["train.seed"]) ** 2
            + (rate - 2) ** 2
        )
        rows = [{"epoch": 1, "num_updates": str(n), "loss": "9"} for n in (1, 2)]
        rows += [
            {"epoch": 1, "valid_loss": str(loss + 4 - n), "valid_num_updates": str(n)}
            for n in (2, 3, 4)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "Executor", Player)
    for module in (running, provenance):
        monkeypatch.setattr(module, "commit", lambda: COMMIT)
    monkeypatch.setattr(
        command, "draw", lambda study, content: {}
    )  # it takes longer than all else
    monkeypatch.chdir(tmp_path)
    Player.ran = []
    Player.end = None
    Player.diverges = ()
    Player.data = None
    Player.conditions = {}
    folder = tmp_path / "configs" / "studies"
    folder.mkdir(parents=True)
    (folder.parent / "tiny.yaml").write_text(RECIPE)
    monkeypatch.setattr(
        design, "load_recipe", lambda file, overrides: once(file, tuple(overrides))
    )
    once = functools.cache(load_recipe)  # each run's recipe is read several times

    def call(*flags, name="toy", **changes):
        once.cache_clear()
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps({**STUDY, "study": name, **changes}))
        status = main(["study", str(path), *flags])
        records = tmp_path / "results" / "studies" / name
        return status, records

    return call


@pytest.fixture
def pictures(study, monkeypatch):
    """The names of those that a report leaves."""
    monkeypatch.setattr(command, "draw", picture_module.draw)
    folder = Path("results/studies/toy")
    return lambda: {path.stem for path in folder.glob("*.png") if path.stat().st_size > 1000}


def record_of(folder, name):
    """The record of a run, such as B-seed2."""
    return {
        f"{system}-seed{seed}".replace(" ", "-"): each.content
        for (system, seed), each in records_of(folder).items()
    }[name]


def keep(folder, records):
    """Write a study's records anew."""
    lines = (json.dumps(content) + "\n" for content in records)
    (folder / "records.jsonl").write_text("".join(lines))


def changed(folder, name, **values):
    """Give a run's record other values: a rerun's line comes last, and counts."""
    append_record(folder, {**record_of(folder, name), **values})


def without(folder, name):
    """Take a run's record away."""
    gone = record_of(folder, name)
    keep(folder, [each.content for each in records_of(folder).values() if each.content != gone])


def report_of(study, **changes):
    status, records = study("--report", **changes)
    assert status == 0
    return json.loads((records / "report.json").read_text())


def test_a_record_names_no_folder_of_its_machine(study, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    status, records = study("--runs", str(elsewhere))
    command = record_of(records, "B-seed2")["command"]
    assert status == 0 and (elsewhere / "toy" / "B-seed2").is_dir()
    assert "--save-dir B-seed2 " in command and "recipe configs/" in command
    assert str(elsewhere) not in command and str(Path.cwd()) not in command


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


def test_a_seed_that_is_not_complete_does_not_count(study, pictures, capsys):
    Player.end = 1
    study()
    assert study("--report")[0] == 2, "no seed is complete"
    Player.end = 7
    _, records = study()
    whole = report_of(study)
    assert pictures() == {"differences", "contrasts", "branch"}
    assert (whole["runs"], whole["planned"]) == (6, 8) and "seed 4" in capsys.readouterr().out
    assert [row["n"] for row in (*whole["systems"], *whole["contrasts"])] == [3, 3, 3]
    for row in whole["systems"]:  # of the seeds that are a sample
        assert row["deviation"] == pytest.approx(statistics.stdev(row["by_seed"].values()))
    without(records, "A-seed2")
    assert sorted(report_of(study)["systems"][1]["by_seed"]) == ["1", "3"]


def test_speeds_are_compared_within_a_seed(study):
    _, records = study()
    for seed, speed in enumerate(((100, 50), (900, 675), (10, 2), (1000, 900)), 1):
        for system, tokens_per_second in zip("AB", speed):
            changed(records, f"{system}-seed{seed}", tokens_per_second=tokens_per_second)
    assert [row["speed"] for row in report_of(study)["systems"]] == [
        1.0,
        pytest.approx((0.5 + 0.75) / 2),
    ]


def test_a_seed_that_one_system_has_alone_has_no_speed():
    speeds = {("A", 1): 100, ("B", 1): 50, ("B", 2): 70, ("A", 3): 0, ("B", 3): 60}
    found = [
        {"system": key, "seed": n, "tokens_per_second": speed}
        for (key, n), speed in speeds.items()
    ]
    assert report._speed([row for row in found if row["system"] == "B"], "A", found) == 0.5


def test_a_report_says_how_large_each_attention_starts(study):
    small = {**STUDY["systems"]["B"], "set": {"model.flags.attention-branch-scale": 0.25}}
    changes = {"systems": {**STUDY["systems"], "B": small}}
    study(**changes)
    dense, quarter = (row["branch"] for row in report_of(study, **changes)["systems"])
    assert quarter / dense == pytest.approx(0.25, rel=1e-5)


def test_bits_stand_beside_bytes_of_cache(study, pictures, tmp_path, capsys):
    """B has one of A's four key heads and fewer bits; C has two and more bits than both."""
    systems = {**STUDY["systems"], "C": {"label": "between", "recipe": "../tiny.yaml"}}
    for name, heads in (("B", 1), ("C", 2)):
        systems[name] = {**systems[name], "set": {"model.flags.key-heads": heads}}
    study(systems=systems)
    for seed in (1, 2, 3, 4):
        curve = record_of(Path("results/studies/toy"), f"C-seed{seed}")["curve"]
        worse = [{**row, "valid": row["valid"] + 0.1} for row in curve]
        changed(Path("results/studies/toy"), f"C-seed{seed}", curve=worse)
    seconds = {"A": 0.2, "B": 0.1}
    measured = tmp_path / "results/studies/toy/decoding-cpu.json"
    measured.write_text(json.dumps({"device": "cpu", "seconds_per_token": {"1": seconds}}))
    assert study("--report", systems=systems)[0] == 2
    assert re.search(
        r"decoding-cpu\.json: seconds_per_token\.1 .*\bC\b", capsys.readouterr().err
    )
    seconds["C"] = 0.3
    measured.write_text(json.dumps({"device": "cpu", "seconds_per_token": {"1": seconds}}))
    found = report_of(study, systems=systems)
    rows = found["cache"]
    assert [(row["system"], row["cache_bytes"], row["is_pareto_optimal"]) for row in rows] == [
        ("B", 64, True),  # keys and values of 16 numbers, two bytes each
        ("C", 128, False),
        ("A", 256, False),
    ]
    assert rows[0]["mean"] == found["contrasts"][0]["mean"] < 0 < rows[1]["mean"]
    assert "mean" not in rows[2], "the first system itself"
    assert [row["decoding"]["cpu, 1"] for row in rows] == pytest.approx([0.5, 1.5, 1])
    assert "0.50 (cpu, 1)" in Path("results/studies/toy/report.md").read_text()
    assert "cache" in pictures()


def test_a_report_of_the_first_seeds_stands_beside_that_of_all(study):
    _, records = study()
    whole = report_of(study)
    assert study("--report", "--seeds", "3")[0] == 0
    (contrast,) = json.loads((records / "report-3-seeds.json").read_text())["contrasts"]
    assert contrast["n"] == 3 and whole == json.loads((records / "report.json").read_text())
    assert study("--report", "--seeds", "9")[0] == study("--seeds", "3")[0] == 2


@pytest.mark.thorough
def test_a_report_scores_the_recorded_translations(study, tmp_path, capsys):
    pairs = {
        "experiment": "pairs",
        "summary": "translations",
        "data": {"recipe": "tatoeba", "source": "en", "target": "de", "bpe": 100},
        "model": {"arch": "dense_transformer_tiny"},
        "train": {"criterion": "cross_entropy", "max_tokens": 16, "max_update": 4},
        "generate": {"subsets": ["test"], "beam": 1},
    }
    (tmp_path / "configs" / "pairs.yaml").write_text(json.dumps(pairs))
    systems = {name: {"label": name, "recipe": "../pairs.yaml"} for name in "AB"}
    _, records = study(systems=systems)
    target = [f"Das ist der Satz {n} von allen ." for n in range(30)]
    references = tmp_path / "test.de"
    references.write_text("".join(f"{line}\n" for line in target))
    (records / "outputs").mkdir()
    for name, words in (("A", 4), ("B", 7)):
        for seed in (1, 2, 3):
            lines = "".join(
                " ".join(line.split()[: words + (n % (seed + 1) == 0)]) + "\n"
                for n, line in enumerate(target)
            )
            (records / "outputs" / f"{name}-seed{seed}.test.txt").write_text(lines)
    assert study("--report", "--references", str(references), systems=systems)[0] == 0
    loose = (records / "report.json").read_text()
    assert study("--pack", systems=systems)[0] == 0 and not (records / "outputs").exists()
    assert study("--report", "--references", str(references), systems=systems)[0] == 0
    assert (records / "report.json").read_text() == loose, "packed they say the same"
    rows = json.loads(loose)["translations"]
    assert [(row["metric"], row["n"]) for row in rows] == [("BLEU", 3), ("chrF", 3)]
    for row in rows:
        assert row["low"] < row["difference"] < row["high"] and row["difference"] > 5
        assert row["p_holm"] == row["p"] < 0.01 and row["p_seeds_holm"] == row["p_seeds"] < 0.05
        assert row["signature"] in (records / "report.md").read_text()
    assert "case:mixed" in rows[0]["signature"]
    references.write_text(target[0])
    assert study("--report", "--references", str(references), systems=systems)[0] == 2
    assert "--references" in capsys.readouterr().err
    assert study("--references", str(references))[0] == 2, "without --report"
    assert study("--report", "--references", str(references))[0] == 2, "a language model"


def test_losses_are_compared_at_equal_training_loss(study, pictures, monkeypatch):
    """B learns half as fast, and the lower a training loss is, the more its validation loss is above A's.

    C, with a dropout of its own, reaches no training loss below 6.75: it moves no level, and has no row.
    """
    systems = {**STUDY["systems"], "C": {"label": "dropped", "recipe": "../tiny.yaml"}}
    systems["C"]["set"] = {"model.flags.attention-dropout": 0.3}
    contrasts = {
        **STUDY["contrasts"],
        "dropout": {"first": "C", "second": "A", "question": "?"},
    }
    changes = {"levels": 4, "systems": systems, "contrasts": contrasts}

    def play(self, command, log):
        folder = Path(command[command.index("--save-dir") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        say_what_trains(folder)
        rows = []
        for n in range(1, 6):
            train = 8 - n / {"A": 1, "B": 2, "C": 4}[folder.name[0]]
            behind = 0.1 * (8 - train) * folder.name.startswith("B")
            valid = train + 1 + behind + 0.001 * int(folder.name[-1]) ** 2
            rows.append({"epoch": n, "num_updates": str(n), "loss": str(train)})
            rows.append({"epoch": n, "valid_loss": str(valid), "valid_num_updates": str(n)})
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(Player, "run", play)
    study(**changes)
    found = report_of(study, **changes)
    (row,) = found["at_equal_training_loss"]
    assert row["contrast"] == "gain" and row["n"] == 4 and row["verdict"] == "worse"
    assert row["mean"] == pytest.approx(0.2), "levels from 5.5 to 6.5"
    assert found["contrasts"][0]["mean"] > 2
    assert found["systems"][0]["curve"][-1] == pytest.approx([3.0, 4.0075])
    assert found["systems"][2]["dropout"]["attention-dropout"] == 0.3
    assert pictures() == {"differences", "contrasts", "branch", "generalisation"}
    monkeypatch.setattr(command, "draw", lambda study, content: {})
    records = Path("results/studies/toy")
    assert "0.2000" in (records / "report.md").read_text()
    # Diverged at a high training loss, which moves no level
    curve = record_of(records, "B-seed4")["curve"]
    changed(records, "B-seed4", end="diverged", curve=curve[:1])
    (row,) = report_of(study, **changes)["at_equal_training_loss"]
    assert row["mean"] == pytest.approx(0.2 - 0.007 / 4) and row["n"] == 4, (
        "it is the worst of the others"
    )


@pytest.mark.parametrize(
    ("validation", "last"),
    [
        ({"updates": 3, "valid": None}, 2),
        ({"updates": 3, "valid": 4.0}, 2),
        ({"updates": 3, "train": None, "valid": 4.0}, 2),
        (None, 1),
    ],
)
def test_a_validation_without_both_losses_is_at_no_training_loss(study, validation, last):
    """The mean over the seeds is then of the validations that all have; the means of the others stay."""
    changes = {"levels": 2, "last": last}
    _, records = study(**changes)
    curve = [{"updates": n, "train": 8.0 - n, "valid": 9.0 - n} for n in (2, 3, 4, 5)]
    for name in "AB":
        for seed in (1, 2, 3, 4):
            changed(records, f"{name}-seed{seed}", curve=curve)
    rest = [row for row in curve if row["updates"] != 3]
    changed(
        records, "A-seed2", curve=[rest[0], *([validation] if validation else []), *rest[1:]]
    )
    found = report_of(study, **changes)
    assert [row["curve"] for row in found["systems"]] == [
        [[6.0, 7.0], [4.0, 5.0], [3.0, 4.0]],
        [[6.0, 7.0], [5.0, 6.0], [4.0, 5.0], [3.0, 4.0]],
    ]
    (row,) = found["at_equal_training_loss"]
    assert row["n"] == 4 and row["mean"] == pytest.approx(0)


def curves(**of_system):
    """A record of each system's (training, validation) losses."""
    found = {}
    for name, pairs in of_system.items():
        rows = [
            {"updates": n, "train": train, "valid": valid}
            for n, (train, valid) in enumerate(pairs)
        ]
        found[f"{name}-seed1"] = {"end": "finished", "curve": rows}
    return found


def test_no_level_lies_above_a_runs_first_training_loss():
    """B learns as A does, and its training loss is first measured later."""
    late = [(4.6, 4.9), (4.5, 4.4)]
    records = curves(A=[(5.6, 5.7), *late], B=late)
    study = SimpleNamespace(levels=3, last=1, systems={"A": None, "B": None})
    levels = design.common_levels(study, list(records.values()))
    assert levels.tolist() == pytest.approx([4.5, 4.55, 4.6])
    runs = [Run(name, 1, Path(), {}, Path()) for name in "AB"]
    found = design.losses_of(study, runs, records, levels)
    assert found["A"][1] == pytest.approx(found["B"][1]) == pytest.approx(4.65)
    records = curves(A=[(5.6, 5.7), (5.0, 5.2)], B=late)
    assert not len(design.common_levels(study, list(records.values()))), "none that both have"


def test_a_contrast_without_a_common_training_loss_is_left_out(study):
    _, records = study(levels=2)
    for name, first in (("A", 9.0), ("B", 5.0)):
        curve = [{"updates": n, "train": first - n, "valid": first - n} for n in (1, 2)]
        for seed in (1, 2, 3, 4):
            changed(records, f"{name}-seed{seed}", curve=curve)
    found = report_of(study, levels=2)
    assert found["at_equal_training_loss"] == [] and len(found["contrasts"]) == 1


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


def test_raw_text_that_changed_is_not_recorded_beside_the_other(study, capsys):
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


def test_data_that_the_recipe_does_not_mean_is_refused(study, tmp_path, capsys):
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


def test_a_diverged_run_is_the_worst_and_stays(study):
    Player.diverges = ("B-seed3",)
    study()
    study()
    assert Player.ran.count("B-seed3") == 1
    systems = {row["system"]: row for row in report_of(study)["systems"]}
    assert systems["B"]["diverged"] == 1
    assert systems["B"]["by_seed"]["3"] == max(systems["A"]["by_seed"].values())


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


@pytest.fixture
def tree(monkeypatch):
    """The source tree: its commit can change."""
    found = SimpleNamespace(commit=COMMIT)
    for module in (running, provenance):
        monkeypatch.setattr(module, "commit", lambda: found.commit)
    return found


def left_a_checkpoint(name):
    checkpoints = Path("runs", "toy", name, "checkpoints")
    checkpoints.mkdir()
    (checkpoints / "checkpoint_last.pt").write_bytes(b"a model")


@pytest.mark.parametrize(
    "made_by", [None, OTHER, f"{OTHER}-dirty-01234567", f"{COMMIT}, {OTHER}"]
)
def test_trainings_of_another_commit_are_not_recorded_under_this_one(
    study, tree, capsys, made_by
):
    """As with other --records after a commit, where the run folders are those of before."""
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
    assert study("--records", "others", "--runs", "anew", seeds=1)[0] == 0, "the remedy"
    assert Player.ran == ["A-seed1", "B-seed1"]


def test_a_training_of_this_commit_is_recorded_as_it_was_made(study, tree, monkeypatch):
    """Where its record was lost, say; what trained it is not what runs now."""
    study(seeds=1)
    left_a_checkpoint("A-seed1")
    folder = Path("runs/toy/A-seed1")
    mark = read_step_records(folder)["train"]
    mark["made_by"][0].update(date="2001-01-01", versions={"torch": "0.1"})
    write_step_record(folder, "train", **mark)
    monkeypatch.setitem(globals(), "say_what_trains", lambda folder: None)  # it is done
    assert study("--records", "others", seeds=1)[0] == 0
    record = record_of(Path("others/toy"), "A-seed1")
    assert (record["date"], record["versions"]) == ("2001-01-01", {"torch": "0.1"})


def test_a_commit_in_the_middle_of_a_study_ends_it(study, tree, monkeypatch, capsys):
    """Each training is a program of its own, which runs what the tree holds then."""
    play = Player.run

    def run(self, command, log):
        if len(Player.ran) == 2:
            tree.commit = OTHER
        play(self, command, log)

    monkeypatch.setattr(Player, "run", run)
    status, records = study()
    assert status == 2 and OTHER in capsys.readouterr().err
    assert {each.content["commit"] for each in records_of(records).values()} == {COMMIT}
    assert set(records_of(records)) == {("A", 1), ("B", 1)}
    assert study()[0] == 2 and len(Player.ran) == 3, "nothing is trained under two commits"


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


def test_a_finished_run_without_a_validation_is_no_diverged_one(study, monkeypatch, capsys):
    """Its train.jsonl was deleted, say."""
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


def test_a_tuning_study_chooses_each_systems_values(study):
    grid = {"train.flags.lr": [1, 2, 3]}
    common = {"train.max_update": 4, "train.flags.clip-norm": 1}
    budgets = {"set": common, "tuning": {"grid": grid, "set": {"train.max_update": 2}}}
    own = {**STUDY["systems"]["A"], "set": {"train.flags.lr": 9, "train.flags.clip-norm": 2}}
    budgets["systems"] = {**STUDY["systems"], "A": own}
    assert study(**budgets)[0] == 2 and not Player.ran, "the tuning comes first"
    study("--tune", **budgets)
    assert Player.ran == [
        f"{system}-lr={rate}-seed101" for system in "AB" for rate in (1, 2, 3)
    ]
    tried = record_of(Path("results/studies/toy_tuning"), "A-lr=1-seed101")
    assert "--set train.max_update=2 " in tried["command"] + " "
    study(**budgets)
    command = record_of(Path("results/studies/toy"), "A-seed1")["command"]
    assert "--set train.flags.lr=2" in command and "--set train.max_update=4" in command
    assert "--set train.flags.clip-norm=2" in command, "its own lies over what all have"
    assert study("--tune")[0] == 2, "nothing to tune"


def test_a_result_follows_from_a_flag_of_zero_too(tmp_path):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    run = Run("A", 1, tmp_path / "tiny.yaml", {"train.flags.clip-norm": 0}, tmp_path)
    assert settings_of(run, "train")["train.flags.clip-norm"] == 0


def test_seeds_of_the_tuning_may_stand_beside_those_that_count(study):
    apart = (
        ({"seeds": 100}, {}),
        ({"first_seed": 102}, {}),
        ({"first_seed": 2}, {"first_seed": 1}),
    )
    for seeds, tuned in apart:
        tuning = {"grid": {"train.flags.lr": [1, 2]}, **tuned}
        assert study("--tune", "--dry-run", tuning=tuning, **seeds)[0] == 0


def test_tuning_counts_every_seed(study):
    """The rate with the lowest loss of a single seed is not the best one."""
    tuning = {"grid": {"train.flags.lr": [1, 2]}, "seeds": 2}
    study("--tune", tuning=tuning)
    # With a rate of 2 both are above 100, and below 110
    for seed, loss in (
        (101, 500.0),
        (102, 1.0),
    ):
        folder = Path("results/studies/toy_tuning")
        curve = record_of(folder, f"A-lr=1-seed{seed}")["curve"]
        changed(folder, f"A-lr=1-seed{seed}", curve=[{**row, "valid": loss} for row in curve])
    study(tuning=tuning)
    command = record_of(Path("results/studies/toy"), "A-seed1")["command"]
    assert "--set train.flags.lr=2" in command


def test_a_rate_that_diverged_is_not_chosen(study, capsys):
    """Its loss counts as the worst, which is that of the other rate: a tie."""
    tuning = {"grid": {"train.flags.lr": [3, 1]}}
    Player.diverges = ("A-lr=3-seed101",)
    study("--tune", tuning=tuning)
    study(tuning=tuning)
    assert (
        "--set train.flags.lr=1 "
        in record_of(Path("results/studies/toy"), "A-seed1")["command"] + " "
    )
    records = Path("results/studies/toy_tuning")
    changed(records, "A-lr=1-seed101", end="diverged")
    capsys.readouterr()
    for flag in ("--dry-run", "--report"):
        assert study(flag, tuning=tuning)[0] == 2
        assert re.search(r"tuning\.grid.* A ", capsys.readouterr().err)
    assert study("--tune", "--report", tuning=tuning)[0] == 0, "what was tried can be looked at"


def test_a_point_with_fewer_diverged_runs_is_chosen(study):
    tuning = {"grid": {"train.flags.lr": [2, 1]}, "seeds": 2}
    Player.diverges = ("A-lr=2-seed102", "B-lr=1-seed101", "B-lr=1-seed102")
    study("--tune", tuning=tuning)
    study(tuning=tuning)
    rates = {"A": 1, "B": 2}
    for name, rate in rates.items():
        command = record_of(Path("results/studies/toy"), f"{name}-seed1")["command"]
        assert f"--set train.flags.lr={rate}" in command


@pytest.mark.parametrize(
    "other",
    [
        {"hardware": "another machine"},
        {"precision": "another precision"},
        {"commit": "another one"},
    ],
)
def test_a_report_says_where_runs_differ_in_more_than_the_system(study, capsys, other):
    _, records = study()
    capsys.readouterr()
    report_of(study)
    assert "unequal" not in (said := capsys.readouterr()).out + said.err
    before = record_of(records, "B-seed2")
    changed(records, "B-seed2", **other)
    found = report_of(study)
    said = capsys.readouterr()
    (line,) = (line for line in (said.out + said.err).splitlines() if "unequal" in line)
    (key,) = other
    assert key in line and before[key] in line and ("seed 2" in line) == (key != "commit")
    assert found["runs"] == 8 and len(found["made_by"][key]) == 2


def test_a_block_that_another_machine_goes_on_with_is_left_to_it(study, monkeypatch, capsys):
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


CARDS = Hardware(4, "NVIDIA H100", (9, 0), ("4", "5", "6", "7"))


@pytest.mark.parametrize(
    ("present", "gpus", "jobs", "given"),
    [
        (CARDS, 1, 4, ["4", "5", "6", "7"]),
        (CARDS, 2, 2, ["4,5", "6,7"]),
        (CARDS, 3, 2, ["4,5,6", "7,4,5"]),
        (CARDS, 1, 6, ["4", "5", "6", "7", "4", "5"]),
        (Hardware(1, "NVIDIA H100", (9, 0), ("0",)), 1, 3, ["0"] * 3),
        (CARDS, 0, 2, ["as it was"] * 2),
    ],
)
def test_workers_have_gpus_of_their_own(monkeypatch, present, gpus, jobs, given):
    found = []

    class Worker:
        returncode = 0

        def __init__(self, command, env, preexec_fn):
            found.append(env)

        def poll(self):
            return 0

        terminate = wait = poll

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as it was")
    monkeypatch.setattr(command.subprocess, "Popen", Worker)
    command._work_together(jobs, choose_devices(present, gpus, dry_run=False))
    assert [env.pop("CUDA_VISIBLE_DEVICES") for env in found] == given
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    # So a worker also finds this package if it is not installed
    assert all(env == environment_of_a_child() for env in found)


def test_a_second_signal_waits_for_workers_that_save(monkeypatch):
    """They end with this program: it is the parent without which they are killed."""
    waited = []

    class Worker:
        returncode = None

        def __init__(self, command, env, preexec_fn):
            pass

        def poll(self):
            signal.raise_signal(signal.SIGTERM)

        def terminate(self):
            pass

        def wait(self):
            signal.raise_signal(signal.SIGTERM)
            waited.append(self)

    monkeypatch.setattr(command.subprocess, "Popen", Worker)
    with pytest.raises(KeyboardInterrupt):
        command._work_together(2, Hardware())
    assert len(waited) == 2


def test_an_interrupt_while_a_worker_starts_ends_the_worker(interrupted_start):
    with pytest.raises(KeyboardInterrupt):
        command._work_together(2, Hardware())
    assert [worker.poll() is None for worker in interrupted_start] == [False]


def test_more_gpus_for_a_run_than_there_are_are_refused_before_any_worker(study, capsys):
    assert study("--jobs", "2", "--gpus", "1000")[0] == 2
    assert "--gpus 1000" in capsys.readouterr().err


@pytest.mark.parametrize("said", [{}, {"train.flags.tokens-per-sample": 64}])
def test_a_language_model_is_counted_with_the_length_that_it_is_trained_with(study, said):
    """fairseq takes 1,024 tokens where a recipe names no number."""
    study(set=said)
    (row, _) = report_of(study, set=said)["systems"]
    length = said.get("train.flags.tokens-per-sample", 1024)
    model = yaml.safe_load(RECIPE)["model"]
    cost = complexity(model["arch"], 1000, length, length, "shared", flags(model["flags"]))
    assert row["attention_macs"] == cost.attention_macs


def test_a_study_of_one_system_has_no_differences_to_draw(study, pictures):
    alone = {"systems": {"A": STUDY["systems"]["A"]}, "contrasts": {}, "seeds": 2}
    study(**alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        report_of(study, **alone)
    assert pictures() == {"branch"}


def test_a_study_that_is_not_there_is_not_taken_for_a_recipe(study, tmp_path, capsys):
    study("--dry-run", name="nearest")
    capsys.readouterr()
    for name in ("nearist", "zzzzzz"):
        assert main(["study", str(tmp_path / "configs" / "studies" / f"{name}.yaml")]) == 2
        said = capsys.readouterr().err
        assert "nearest" in said and not re.search("quickstart_|_lm_", said)


@pytest.mark.parametrize("other", [{"hardware": "another machine"}, {"precision": "amp"}])
def test_runs_that_differ_in_more_than_the_system_are_not_mixed(
    study, monkeypatch, capsys, other
):
    Player.end = 3
    study()
    here = running.Place.conditions
    shown = {key: value + ", 1 threads" * (key == "hardware") for key, value in other.items()}
    elsewhere = lambda *arguments: {**here(*arguments), **shown}  # noqa: E731
    monkeypatch.setattr(running.Place, "conditions", elsewhere)
    Player.end = None
    Player.conditions = other
    study()
    assert "B-seed2" not in Player.ran and "B-seed3" in Player.ran, "seed 2 was begun elsewhere"
    said = capsys.readouterr()
    assert "seed 2" in said.out + said.err and "seed 1" not in said.out + said.err, (
        "seed 1 has ended"
    )
    tuning = {"tuning": {"grid": {"train.flags.lr": [1, 2]}}}
    monkeypatch.setattr(running.Place, "conditions", here)
    Player.ran = []
    Player.end = 1
    Player.conditions = {}
    study("--tune", name="tuned", **tuning)
    monkeypatch.setattr(running.Place, "conditions", elsewhere)
    Player.end = None
    Player.conditions = other
    study("--tune", name="tuned", **tuning)
    assert "A-lr=2-seed101" not in Player.ran and "B-lr=2-seed101" in Player.ran, (
        "A was begun elsewhere"
    )
    monkeypatch.setattr(running, "commit", lambda: "4567def")
    assert study()[0] == 2 and "git worktree" in capsys.readouterr().err


def test_only_records_of_the_study_as_it_is_now_are_read(study, tmp_path, capsys, monkeypatch):
    Player.end = 4
    _, records = study(set={"train.flags.lr": 1})
    Player.end = None
    assert study(set={"train.flags.lr": 5})[0] == 2 and len(Player.ran) == 4, (
        "seeds 1 and 2 are of another rate"
    )
    assert "train.flags.lr: 1 → 5" in capsys.readouterr().err
    assert study("--report", set={"train.flags.lr": 5})[0] == 2, "no seed is complete"
    assert (
        study(set={"train.flags.lr": 1}, stage="all")[0] == 2
        and "stage: train → all" in capsys.readouterr().err
    )

    monkeypatch.setattr(design, "load_recipe", load_recipe)

    def fitting(**changes):
        path = tmp_path / "configs" / "studies" / "toy.yaml"
        path.write_text(json.dumps({**STUDY, "set": {"train.flags.lr": 1}, **changes}))
        capsys.readouterr()
        found = load_study(path, records.parent)
        return set(fitting_records(found, runs_of(found, path.parent, records.parent)))

    every = {f"{system}-seed{seed}" for system in "AB" for seed in (1, 2)}
    assert (
        fitting()
        == fitting(question="worded anew", set={"train.flags.lr": 1, "train.precision": "amp"})
        == every
    )
    before = (records / "records.jsonl").read_text()
    changed(records, "B-seed2", study="another")  # was copied here
    assert fitting() == every - {"B-seed2"}
    assert study("--dry-run", set={"train.flags.lr": 1})[0] == 2
    assert "records.jsonl, line 5 (study: another → toy)" in (said := capsys.readouterr().err)
    assert "git checkout" in said
    (records / "records.jsonl").write_text(before)
    # as records were: what the study added stands in the command
    changed(records, "B-seed2", settings=None)
    assert fitting() == every
    command = record_of(records, "B-seed2")["command"]
    changed(records, "B-seed2", command=command.replace("lr=1", "lr=2"))
    assert fitting() == every - {"B-seed2"}
    (tmp_path / "configs" / "tiny.yaml").write_text(
        RECIPE.replace("max_update: 4", "max_update: 8")
    )
    assert not fitting()


def test_points_of_a_grid_that_are_no_names_stay_in_the_folders(study, tmp_path):
    grid = {"model.flags.decoder-layers-to-keep": ["../../../x/y", "(0, 1)", "a/b", "a_b"]}
    assert study("--tune", tuning={"grid": grid})[0] == 0
    found = records_of(tmp_path / "results/studies/toy_tuning")
    assert len(found) == len(set(Player.ran)) == 8 and not any(
        "/" in name for name in Player.ran
    )
    assert {path.parent.name for path in tmp_path.rglob("train.jsonl")} == set(Player.ran)


@pytest.mark.parametrize("flag", ["user-dir", "user-di"])
def test_a_report_runs_nothing_that_a_study_brings(study, tmp_path, capsys, flag):
    _, records = study()
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "__init__.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    planted = {**STUDY["systems"]["A"], "set": {f"model.flags.{flag}": str(tmp_path / "trap")}}
    for system, seed in list(
        records_of(records)
    ):  # a stranger's records fit the stranger's study
        settings = record_of(records, f"{system}-seed{seed}")["settings"]
        settings = {**settings, f"model.flags.{flag}": str(tmp_path / "trap")}
        if system == "A":
            changed(records, f"A-seed{seed}", settings=settings)
    systems = {"A": planted, "B": STUDY["systems"]["B"]}
    assert study("--report", systems=systems)[0] == 2
    assert flag in capsys.readouterr().err and not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seeds": 0}, "seeds"),
        ({"systems": {"../A": STUDY["systems"]["A"]}}, "systems"),
        *(({"study": name}, "study") for name in ("/abs", "../../x", "..", "x" * 300)),
        ({"set": {"train.flag.lr": 1}}, "train.flag"),
        (
            {"contrasts": {"gain": {"first": "A", "second": "A", "question": "?"}}},
            "contrasts.gain",
        ),
        *(
            (
                {"contrasts": {"gain": {"first": one, "second": other, "question": "?"}}},
                "contrasts.gain",
            )
            for one, other in ("CA", "AC")
        ),
        ({"sistems": {}}, "sistems"),
        ({"systems": {"A": {"label": "dense"}}}, "systems.A.recipe"),
        # a seed that chooses a rate and then counts
        *(
            (
                {**seeds, "tuning": {"grid": {"train.flags.lr": [1, 2]}, **tuned}},
                "tuning.first_seed",
            )
            for seeds, tuned in (
                ({"first_seed": 101}, {}),
                ({"seeds": 101}, {}),
                ({"seeds": 4}, {"first_seed": 4}),
                ({"first_seed": 5, "seeds": 1}, {"first_seed": 4, "seeds": 2}),
            )
        ),
    ],
)
def test_mistakes_are_named(study, capsys, changes, named):
    assert study(**changes)[0] == 2 and named in capsys.readouterr().err
    assert not Player.ran


@pytest.mark.thorough(keep="path0")
@pytest.mark.parametrize(
    "path", [path for path in STUDIES if "study" in yaml.safe_load(path.read_text())]
)
def test_every_system_of_the_studies_here_is_a_recipe(path, tmp_path):
    text = yaml.safe_load(path.read_text())
    study = load_study(path, tmp_path, tune=bool({"tuning", "base"} & text.keys()))
    assert study.study.removesuffix("_tuning") == path.stem
    for run in runs_of(study, path.parent, tmp_path):
        recipe = run.load()
        families = {"moa": "MoA", "mae": "MAE", "moh": "MoH", "switchhead": "SwitchHead"}
        family = study.systems[run.system].family
        assert family.startswith(families.get(recipe.model.arch.partition("_")[0], family))


def test_a_study_has_what_its_base_has_under_its_own(tmp_path):
    (tmp_path / "below").mkdir()
    below = {**STUDY, "margin": 0.02, "set": {"train.max_update": 7, "train.update_freq": 2}}
    (tmp_path / "below" / "toy.yaml").write_text(json.dumps(below))
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    new = {"label": "new", "recipe": "../tiny.yaml", "set": {"train.update_freq": 3}}
    above = {"study": "more", "base": "toy.yaml", "seeds": 2, "set": {"train.max_update": 9}}
    path = tmp_path / "below" / "more.yaml"
    path.write_text(json.dumps({**above, "systems": {"B": new, "C": new}}))
    study = load_study(path, tmp_path)
    assert (study.study, study.seeds, study.margin, list(study.systems)) == (
        "more",
        2,
        0.02,
        ["A", "B", "C"],
    )
    assert study.systems["A"].set == {"train.max_update": 9, "train.update_freq": 2}
    assert (
        study.systems["B"].label == "new" and study.systems["B"].set["train.update_freq"] == 3
    )
    assert study.contrasts["gain"].second == "A"
    for name, base in (("twice", "more.yaml"), ("none", "missing.yaml"), ("number", 3)):
        path = tmp_path / "below" / f"{name}.yaml"
        path.write_text(json.dumps({**above, "base": base}))
        with pytest.raises(UserError, match="base" if name != "none" else "missing.yaml"):
            load_study(path, tmp_path)


def test_a_study_names_a_shipped_recipe_as_a_base_does(tmp_path):
    path = tmp_path / "named.yaml"
    systems = {"A": {"label": "dense", "recipe": "quickstart_transformer.yaml"}}
    path.write_text(
        json.dumps({"study": "named", "question": "Why?", "seeds": 1, "systems": systems})
    )
    (run,) = runs_of(load_study(path, tmp_path), tmp_path, tmp_path)
    assert run.recipe == shipped_recipes()["quickstart_transformer"]
    assert run.load().experiment == "quickstart_transformer"


def test_workers_share_a_study(study, monkeypatch):
    """As --jobs does it on one machine, and a job array on several."""
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
    """A lock that cannot be taken is not one that another worker has; of the records, before the training."""
    acquire = portalocker.Lock.acquire

    def without(lock, *arguments, **options):
        if Path(lock.filename).name != held:
            return acquire(lock, *arguments, **options)
        raise portalocker.LockException(
            OSError(errno.ENOLCK, "No locks available"), "No locks available"
        )

    monkeypatch.setattr(portalocker.Lock, "acquire", without)
    status, records = study(seeds=1)
    assert status == 2 and not Player.ran and not records_of(records)
    assert held in (said := capsys.readouterr().err) and "has no locks" in said


def test_a_run_that_a_living_worker_has_is_left_to_it_and_said(study, capsys):
    folder = Path("runs/toy")
    folder.mkdir(parents=True)
    with portalocker.Lock(folder / "A-seed1.lock", "a", timeout=0):
        assert study(seeds=1)[0] == 0
    assert Player.ran == ["B-seed1"]
    said = capsys.readouterr()
    assert "another worker runs A-seed1" in said.out + said.err
    Player.ran = []
    assert study(seeds=1)[0] == 0 and Player.ran == ["A-seed1"], (
        "its lock was left behind, and is nobody's"
    )


def test_workers_end_with_a_killed_study(tmp_path):
    """Else they go on training, and a rerun adds as many."""
    work = f"import os, time; open(f'{tmp_path}/{{os.getpid()}}', 'w'); time.sleep(60)"
    parent = (
        "import sys\nfrom moa_fairseq.experiments.study import command\n"
        "from moa_fairseq.experiments.recipes.hardware import Hardware\n"
        f"command.to_argv = lambda words: [sys.executable, '-c', {work!r}]\n"
        "command._work_together(2, Hardware())\n"
    )
    running = subprocess.Popen([sys.executable, "-c", parent])
    workers = []
    while len(workers) < 2:
        assert running.poll() is None
        workers = [int(path.name) for path in tmp_path.iterdir()]
        time.sleep(0.05)
    running.kill()
    running.wait()
    for _ in range(600):
        states = [Path(f"/proc/{worker}/stat") for worker in workers]
        if all(not state.exists() or ") Z " in state.read_text() for state in states):
            break
        time.sleep(0.05)
    else:
        raise AssertionError(f"still at work: {workers}")


def test_a_run_that_another_worker_has_finished_is_not_repeated(tmp_path, monkeypatch):
    runs = [Run("A", seed, tmp_path / "tiny.yaml", {}, tmp_path) for seed in range(3)]
    ran = []

    def carry_out(run, place):
        ran.append(run.seed)
        about = {"study": "toy", "system": "A", "seed": 1, "end": "finished", "curve": []}
        about["commit"] = provenance.commit()
        append_record(tmp_path, {**about, "parameters": None, "tokens_per_second": None})

    monkeypatch.setattr(running, "_train_and_record", carry_out)
    running.run_pending(
        runs, running.Place(SimpleNamespace(study="toy"), tmp_path / "folders", None, 0)
    )
    assert ran == [0, 2]


def test_every_claim_names_a_contrast_of_a_study():
    root = Path(__file__).resolve().parents[3]
    for row in yaml.safe_load((root / "results" / "claims.yaml").read_text()):
        for contrast in row["contrasts"]:
            study = loading._with_base(
                root / "configs" / "studies" / f"{contrast['study']}.yaml"
            )
            assert contrast["contrast"] in study["contrasts"]
