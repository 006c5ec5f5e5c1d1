"""The settings of a study's runs, and which records fit them."""

import json

from played_study import (
    RECIPE,
    STUDY,
    Player,
    changed,
    record_of,
)

from moa_fairseq.experiments.recipes.loading import load_recipe
from moa_fairseq.experiments.study import design
from moa_fairseq.experiments.study.design import Run, fitting_records, runs_of, settings_of
from moa_fairseq.experiments.study.loading import load_study


def test_a_result_follows_from_a_flag_of_zero_too(tmp_path):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    run = Run("A", 1, tmp_path / "tiny.yaml", {"train.flags.clip-norm": 0}, tmp_path)
    settings = settings_of(run, "train")
    assert settings["train.flags.clip-norm"] == 0
    assert not settings.keys() & {"experiment", "summary"}, "no result follows from them"


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
        == fitting(question="worded again", set={"train.flags.lr": 1, "train.precision": "amp"})
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
