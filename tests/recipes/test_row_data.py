"""A recipe stands for its row of a paper on that row's data only."""

import json
from pathlib import Path

from moa_fairseq.cli import Console, reporting_to
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.row_data import on_the_rows_data

ROOT = Path(__file__).resolve().parents[2]
IWSLT = {"train": 160239, "valid": 7283, "test": 6750}
MULTI30K = {"train": 29000, "valid": 1014, "test": 1000}


def manifest(folder, **settings):
    (folder / "manifest.json").write_text(json.dumps({"settings": settings}))


def recipe_of(name, *overrides):
    return load_recipe(ROOT / "configs" / f"{name}.yaml", overrides)


def judged(name, folder, lines, *overrides):
    """(the recipe on that data, what was said)"""
    said = []
    with reporting_to(Console(said.append)):
        return on_the_rows_data(recipe_of(name, *overrides), folder, lines), said


def test_another_data_set_is_known_by_its_lines(tmp_path):
    recipe, said = judged("iwslt14_deen_mae7", tmp_path, MULTI30K)
    assert recipe.reproduces is None
    (line,) = said
    assert line.startswith("WARNING: this run does not stand for mae, table 3, MAE-7, BLEU: 35.5. ")
    assert "29,000" in line and "160,239" in line and "reproduces: null" in line


def test_and_by_the_name_in_its_manifest(tmp_path):
    data = tmp_path / "iwslt14_de_en_cased" / "binarised"
    data.mkdir(parents=True)
    manifest(data.parent, recipe="iwslt14_de_en_cased", source="de", target="en", bpe=10000)
    recipe, (line,) = judged("iwslt14_deen_mae7", data, IWSLT)
    assert recipe.reproduces is None and "iwslt14_de_en_cased" in line and "manifest.json" in line
    manifest(data.parent, recipe="iwslt14_de_en", source="de", target="en", bpe=8000)
    assert "8,000" in judged("iwslt14_deen_mae7", data, IWSLT)[1][0]
    manifest(data.parent, recipe="iwslt14_de_en", source="de", target="en", bpe=10000)
    recipe, said = judged("iwslt14_deen_mae7", data, IWSLT)
    assert recipe.reproduces.value == 35.5 and said == ["stands for mae, table 3, MAE-7, BLEU: 35.5"]
    assert judged("iwslt14_deen_mae7", data, {**IWSLT, "train": 160238})[0].reproduces is None


def test_data_of_another_name_is_told_of_a_recipe_without_a_row_too(tmp_path):
    for name, warned in (("listops_depth3", True), ("listops", False), ("binarised", False)):
        manifest(tmp_path, recipe=name)
        recipe, said = judged("listops_switchhead_2h", tmp_path, {})
        assert recipe == recipe_of("listops_switchhead_2h") and bool(said) == warned
        assert not warned or ("is for data of listops, and" in said[0] and "listops_depth3" in said[0])


def test_a_part_of_the_training_pairs_is_counted_as_such(tmp_path):
    whole, tenth = {"train": 160239, "valid": 7283}, {"train": 16024, "valid": 7283}
    part = recipe_of("iwslt14_ende_mae7_scratch", "data.train_fraction=0.1")
    assert part.reproduces is None  # by its --set; the lines are compared all the same where it is the file's
    assert judged("iwslt14_ende_mae7_scratch", tmp_path, whole)[0].reproduces
    assert judged("iwslt14_ende_mae7_scratch", tmp_path, tenth)[0].reproduces is None


def test_an_own_copy_of_the_text_is_compared_with_the_rows_data(tmp_path):
    own = "data.recipe=binarised"
    assert judged("iwslt14_deen_mae7", tmp_path, IWSLT, own)[0].reproduces
    assert judged("iwslt14_deen_mae7", tmp_path, MULTI30K, own)[0].reproduces is None


def test_words_of_a_masked_lms_text(tmp_path):
    def facts(recipe, words):
        splits = {"train": {"words": words - 1801350, "lines": 1801350}}
        (tmp_path / "manifest.json").write_text(json.dumps({"recipe": recipe, "splits": splits}))
        return judged("wikitext103_mlm_transformer", tmp_path, {"train": 1801350, "test": 4358})[0].reproduces

    assert facts("wikitext103_gpt2bpe", 103227021)
    assert facts("wikitext103_gpt2bpe", 103227020) is None
    assert facts("wikitext2_gpt2bpe", 103227021) is None


def test_data_of_which_nothing_is_known_stands_for_nothing(tmp_path):
    recipe, (line,) = judged("wmt14_enfr_moa_base", tmp_path, {"train": 5, "valid": 2})
    assert recipe.reproduces is None and "cannot be told" in line


def test_a_damaged_manifest_is_no_proof(tmp_path):
    for text in ("{", "[]", '{"settings": 3}', '{"splits": {"train": 3}, "recipe": []}'):
        (tmp_path / "manifest.json").write_text(text)
        assert judged("iwslt14_deen_mae7", tmp_path, MULTI30K)[0].reproduces is None
