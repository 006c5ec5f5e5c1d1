"""The losses of a study's runs, and their comparison at equal training loss."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from played_study import STUDY, Player, changed, record_of, report_of, say_what_trains

from moa_fairseq.experiments.study import command, losses
from moa_fairseq.experiments.study.design import Run


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
    levels = losses.common_levels(study, list(records.values()))
    assert levels.tolist() == pytest.approx([4.5, 4.55, 4.6])
    runs = [Run(name, 1, Path(), {}, Path()) for name in "AB"]
    found = losses.losses_of(study, runs, records, levels)
    assert found["A"][1] == pytest.approx(found["B"][1]) == pytest.approx(4.65)
    assert losses.losses_of(study, runs, records, None)["A"][1] == 4.4, "the last one"
    records = curves(A=[(5.6, 5.7), (5.0, 5.2)], B=late)
    assert not len(losses.common_levels(study, list(records.values()))), "none that both have"
    records["A-seed1"]["end"] = losses.DIVERGED
    records |= curves(C=[])
    assert losses.common_levels(study, list(records.values())).tolist() == [4.5, 4.55, 4.6]


def test_losses_are_compared_at_equal_training_loss(study, picture_names, monkeypatch):
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
    assert picture_names() == {"differences", "contrasts", "branch", "generalisation"}
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


def test_a_contrast_without_a_common_training_loss_is_left_out(study):
    _, records = study(levels=2)
    for name, first in (("A", 9.0), ("B", 5.0)):
        curve = [{"updates": n, "train": first - n, "valid": first - n} for n in (1, 2)]
        for seed in (1, 2, 3, 4):
            changed(records, f"{name}-seed{seed}", curve=curve)
    found = report_of(study, levels=2)
    assert found["at_equal_training_loss"] == [] and len(found["contrasts"]) == 1
