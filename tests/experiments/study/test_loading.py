"""Study files: their base, the mistakes in them, and the values that the tuning chooses."""

import json
import re
from pathlib import Path

import pytest
import yaml
from played_study import (
    RECIPE,
    STUDY,
    Player,
    changed,
    record_of,
)

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.loading import shipped_recipes
from moa_fairseq.experiments.study import loading
from moa_fairseq.experiments.study.design import runs_of
from moa_fairseq.experiments.study.loading import load_study
from moa_fairseq.experiments.study.records import records_of

STUDIES = Path(__file__).resolve().parents[3].glob("configs/studies/*.yaml")


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


def test_tuning_seeds_may_border_on_the_studys_seeds(study):
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
    """Its loss counts as the largest of all runs, which is that of the other rate, so the two tie."""
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


def test_points_of_a_grid_that_are_no_names_stay_in_the_folders(study, tmp_path):
    grid = {"model.flags.decoder-layers-to-keep": ["../../../x/y", "(0, 1)", "a/b", "a_b"]}
    assert study("--tune", tuning={"grid": grid})[0] == 0
    found = records_of(tmp_path / "results/studies/toy_tuning")
    assert len(found) == len(set(Player.ran)) == 8 and not any(
        "/" in name for name in Player.ran
    )
    assert {path.parent.name for path in tmp_path.rglob("train.jsonl")} == set(Player.ran)


def test_a_study_that_is_not_there_is_not_taken_for_a_recipe(study, tmp_path, capsys):
    study("--dry-run", name="nearest")
    capsys.readouterr()
    for name in ("nearist", "zzzzzz"):
        assert main(["study", str(tmp_path / "configs" / "studies" / f"{name}.yaml")]) == 2
        said = capsys.readouterr().err
        assert "nearest" in said and not re.search("quickstart_|_lm_", said)


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


def test_every_claim_names_a_contrast_of_a_study():
    root = Path(__file__).resolve().parents[3]
    for row in yaml.safe_load((root / "results" / "claims.yaml").read_text()):
        for contrast in row["contrasts"]:
            study = loading._with_base(
                root / "configs" / "studies" / f"{contrast['study']}.yaml"
            )
            assert contrast["contrast"] in study["contrasts"]


def test_the_file_name_of_a_grid_point_does_not_change():
    """Existing records are found by it."""
    assert loading._file_name("0.5") == "0.5"
    assert loading._file_name("a/b") == "a_bc14cddc0"
