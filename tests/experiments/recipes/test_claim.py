"""A run stands for its row of a paper with the row's settings, on the row's data, and not otherwise."""

import json
from pathlib import Path

import pytest

from moa_fairseq.cli import main
from moa_fairseq.experiments.data.catalogue import datasets
from moa_fairseq.experiments.make import write_step_record
from moa_fairseq.experiments.recipes.claim import (
    data_differences,
    differences,
    finished_settings,
    requested_settings,
)
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.loading import load_recipe
from moa_fairseq.experiments.recipes.result import maker
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.running import run_recipe

ROOT = Path(__file__).resolve().parents[3]
IWSLT = {"train": 160239, "valid": 7283, "test": 6750}
MULTI30K = {"train": 29000, "valid": 1014, "test": 1000}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.seed=7", None),
        ("train.max_tokens=2048", None),
        ("train.flags.ddp-backend=legacy_ddp", None),
        ("model.flags.checkpoint-activations=true", None),
        ("generate.max_tokens=512", None),
        ("score.headline=sacrebleu", None),
        ("train.max_update=800", "train.max_update"),
        ("model.experts_per_token=4", "model.experts_per_token"),
        ("train.flags.clip-norm=1.0", "train.flags.clip-norm"),
        ("generate.beam=1", "evaluation.beam"),
        ("average.epochs=5", "averaged"),
        ("train.flags.save-interval-updates=500", None),  # epochs are averaged
    ],
)
def test_settings_that_differ_are_named(override, key, shipped):
    published = shipped("wmt14_ende_moa_base")
    found = differences(
        published, requested_settings(shipped("wmt14_ende_moa_base", override)), {}
    )
    assert [line.partition(":")[0] for line in found] == ([key] if key else [])


def test_checkpoints_that_are_averaged_are_a_part_of_the_experiment(shipped):
    published = shipped("quickstart_moa")
    other = shipped("quickstart_moa", "train.flags.save-interval-updates=7")
    assert differences(published, requested_settings(other), {})


def manifest(folder, **said):
    (folder / "manifest.json").write_text(json.dumps(said))


def made_by(published, **changed):
    """What manifest.json says of the data that a recipe asks for, but for some settings."""
    values = {**vars(published.data), **changed}
    made = values.pop("dataset", values["recipe"])
    splits = datasets()[published.data.recipe].splits
    steps = {split: datasets()[made].treatment(split, values) for split in splits}
    return {"settings": values, "dataset": made, "steps": steps}


@pytest.mark.parametrize(
    ("changed", "lines", "key"),
    [
        ({}, IWSLT, None),
        ({"flags": {"workers": 5}}, IWSLT, None),
        ({}, MULTI30K, "data.lines of train"),
        ({}, {**IWSLT, "train": 160238}, "data.lines of train"),
        ({}, {}, "data.lines of test"),  # which nobody has counted
        ({"recipe": "iwslt14_de_en_cased"}, IWSLT, "data.recipe"),
        ({"recipe": "iwslt14_de_en_cased"}, IWSLT, "data.steps of test"),
        ({"bpe": 8000}, IWSLT, "data.bpe"),
        ({"lowercase": True}, IWSLT, "data.lowercase"),
        ({"codes": "their/codes"}, IWSLT, "data.codes"),
        ({"train_fraction": 0.5}, IWSLT, "data.train_fraction"),
        ({"flags": {"thresholdtgt": 9}}, IWSLT, "data.flags.thresholdtgt"),
        ({"recipe": "parallel", "tokenize": True}, IWSLT, "data.recipe"),
        (
            {"dataset": "parallel"},
            IWSLT,
            "data.recipe",
        ),  # asked for as the data set, and found to be own text
    ],
)
def test_data_that_differs_is_named(tmp_path, changed, lines, key, shipped):
    data = tmp_path / "binarised"
    recipe = shipped("iwslt14_deen_mae7")
    data.mkdir()
    manifest(tmp_path, **made_by(recipe, **changed))
    found = data_differences(recipe, data, lines, claim=True)
    assert (key in found) if key else not found, found


@pytest.mark.parametrize(
    "text",
    [None, "{", "[]", '{"settings": 3}', '{"splits": {"train": 3}, "recipe": [], "steps": 3}'],
)
def test_what_cannot_be_told_stands_for_no_row(tmp_path, text, shipped):
    """A folder of fairseq-preprocess alone, or with a manifest that proves nothing."""
    recipe = shipped("wmt14_ende_moa_base")
    lines = {**datasets()[recipe.data.recipe].expected, "train": 4500966}
    if text:
        (tmp_path / "manifest.json").write_text(text)
    found = data_differences(recipe, tmp_path, lines, claim=True)
    assert {"data.recipe", "data.steps of test", "data.bpe"} <= found.keys()
    assert "data.recipe" in data_differences(recipe, tmp_path, {})


def test_an_older_manifest_does_not_tell_the_tokenisation(tmp_path, shipped):
    recipe = shipped("wmt14_ende_moa_base")
    whole = made_by(recipe)
    lines = {"train": 4500000, "valid": 3000, "test": 3003}
    manifest(tmp_path, settings=whole["settings"])
    assert "data.steps of train" in data_differences(recipe, tmp_path, lines, claim=True)
    manifest(tmp_path, **whole)
    assert not data_differences(recipe, tmp_path, lines, claim=True)
    whole["steps"]["test"] = "straight_apostrophe, tokenize"  # without -a
    manifest(tmp_path, **whole)
    assert "data.steps of test" in data_differences(recipe, tmp_path, lines, claim=True)
    assert "data.steps of test" in data_differences(recipe, tmp_path, {}), (
        "a contradiction for everybody"
    )


def test_a_row_of_text_of_ones_own_cannot_be_told(tmp_path, shipped):
    """A file that inherits `reproduces` and says other data."""
    recipe = shipped("wmt14_ende_moa_base", "data.recipe=parallel", "data.tokenize=true")
    manifest(tmp_path, **made_by(recipe))
    assert "data.recipe" in data_differences(recipe, tmp_path, {}, claim=True)
    assert not data_differences(recipe, tmp_path, {})


def test_expressions_that_are_drawn_otherwise_are_named(tmp_path, shipped):
    recipe = shipped("listops_switchhead_2h")
    generated = dict(datasets()["listops"].generated)
    for seed, same in ((generated["seed"], True), (7, False)):
        settings = {"recipe": "listops", "generated": {**generated, "seed": seed}}
        manifest(tmp_path, settings=settings, dataset="listops", steps={})
        found = data_differences(recipe, tmp_path, {}, claim=True)
        assert ("data.generated.seed" not in found) == same and same == (not found)


def test_text_that_is_not_the_published_one_is_named(tmp_path, shipped):
    for overrides, lines in (
        ((), datasets()["multi30k"].expected),
        (("generate.subsets=[test]",), MULTI30K),  # the other two test sets are not read
    ):
        recipe = shipped("multi30k_ende_transformer_tiny", *overrides)
        for md5, same in (("a", True), ("b", False)):
            published = {"bpe/test.de": {"md5": md5, "published": "a"}}
            manifest(tmp_path, **made_by(recipe), published=published)
            found = data_differences(recipe, tmp_path, lines, claim=True)
            assert found.keys() == (set() if same else {"data.md5 of bpe/test.de"})


def test_words_of_a_masked_lms_text_and_a_part_of_the_pairs(tmp_path, shipped):
    recipe = shipped("wikitext103_mlm_transformer")
    lines = datasets()["wikitext103_gpt2bpe"].expected
    for words, name, same in (
        (103227021, "103", True),
        (103227020, "103", False),
        (103227021, "2", False),
    ):
        counts = {**datasets()["wikitext103_gpt2bpe"].words, "train": words}
        splits = {
            split: {"words": counts[split] - lines[split], "lines": lines[split]}
            for split in lines
        }
        manifest(tmp_path, recipe=f"wikitext{name}_gpt2bpe", splits=splits)
        assert bool(data_differences(recipe, tmp_path, lines, claim=True)) != same
    tenth = shipped("iwslt14_ende_mae7_scratch", "data.train_fraction=0.1")
    manifest(tmp_path, **made_by(tenth))
    lines = {**IWSLT, "train": 16024}
    assert not data_differences(tenth, tmp_path, lines, claim=True)
    manifest(tmp_path, **made_by(tenth, train_fraction_seed=2))  # as many other pairs
    assert data_differences(tenth, tmp_path, lines, claim=True).keys() == {
        "data.train_fraction"
    }


def test_it_is_said_before_the_training(make_lines, tmp_path, monkeypatch, capsys, shipped):
    monkeypatch.chdir(tmp_path)
    line = ["recipe", "iwslt14_deen_mae7", "--dry-run", "--data"]
    for lines, word in (
        (MULTI30K, "WARNING: this run does not reproduce mae, table 3"),
        (IWSLT, "\nreproduces mae, table 3"),
    ):
        data = make_lines(tmp_path / f"{lines['train']}", lines)
        manifest(data, **made_by(shipped("iwslt14_deen_mae7")))
        assert main([*line, str(data)]) == 0
        assert word in capsys.readouterr().out


def test_data_prepared_with_other_values_is_said_for_a_recipe_without_a_row(
    small, write_config, binarised, said
):
    recipe = load_recipe(write_config(small))
    for merges, warned in ((recipe.data.bpe, False), (99, True)):
        manifest(binarised, settings=vars(recipe.data) | {"bpe": merges})
        run_recipe(recipe, Hardware(), Options(data=binarised), dry_run=True)
        words = f"{binarised} differs from the recipe: data.bpe: {recipe.data.bpe} → 99"
        assert any(words in line for line in said) == warned


@pytest.mark.parametrize(("method", "commit"), [("noft", "evaluated"), ("ftg", "trained")])
def test_the_maker_of_a_run_is_its_training_or_without_one_its_evaluation(
    tmp_path, method, commit, shipped
):
    recipe = shipped("iwslt14_ende_mae7_transfer", f"finetune={method}")
    evaluation = f"generate-{recipe.subsets[0]}"
    for step, made_by in (("train", "trained"), (evaluation, "evaluated")):
        write_step_record(tmp_path, step, inputs={}, made_by=[{"commit": made_by}])
    assert maker(tmp_path, recipe)["commit"] == commit


def test_only_the_content_of_records_counts_as_damage(shipped):
    """Not an error of this program."""
    with pytest.raises(TypeError):
        finished_settings(None, shipped("wmt14_ende_moa_base"))
