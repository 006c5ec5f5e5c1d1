"""A run stands for its row of a paper with the row's settings, on the row's data, and not otherwise."""

import json
from pathlib import Path

import pytest

from moa_fairseq.cli import main
from moa_fairseq.recipes.result import data_differences, differences, settings

ROOT = Path(__file__).resolve().parents[2]
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
    ],
)
def test_settings_that_differ_are_named(override, key, shipped):
    published = shipped("wmt14_ende_moa_base")
    found = differences(published, settings(shipped("wmt14_ende_moa_base", override)), {})
    assert [line.partition(":")[0] for line in found] == ([key] if key else [])


def test_checkpoints_that_are_averaged_are_a_part_of_the_experiment(shipped):
    published = shipped("quickstart_moa")
    other = shipped("quickstart_moa", "train.flags.save-interval-updates=7")
    assert differences(published, settings(other), {})


def manifest(folder, **said):
    (folder / "manifest.json").write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("said", "lines", "key"),
    [
        ({}, IWSLT, None),
        ({}, MULTI30K, "data.lines of train"),
        ({}, {**IWSLT, "train": 160238}, "data.lines of train"),
        ({"recipe": "iwslt14_de_en_cased", "bpe": 10000}, IWSLT, "data.recipe"),
        ({"recipe": "iwslt14_de_en", "bpe": 8000}, IWSLT, "data.bpe"),
        ({"recipe": "iwslt14_de_en", "lowercase": True}, IWSLT, "data.lowercase"),
        ({"recipe": "iwslt14_de_en", "bpe": 10000}, IWSLT, None),
        ({"recipe": "parallel", "bpe": None}, IWSLT, None),  # the user's own copy of the text
        ({}, {}, "data.recipe"),  # of which nothing is known
    ],
)
def test_data_that_differs_is_named(tmp_path, said, lines, key, shipped):
    data = tmp_path / "binarised"
    data.mkdir()
    manifest(tmp_path, settings=said)
    found = data_differences(shipped("iwslt14_deen_mae7"), data, lines)
    assert (key in found) if key else not found, found


@pytest.mark.parametrize("text", ["{", "[]", '{"settings": 3}', '{"splits": {"train": 3}, "recipe": []}'])
def test_a_damaged_manifest_is_no_proof(tmp_path, text, shipped):
    (tmp_path / "manifest.json").write_text(text)
    assert data_differences(shipped("iwslt14_deen_mae7"), tmp_path, MULTI30K)


def test_words_of_a_masked_lms_text_and_a_part_of_the_pairs(tmp_path, shipped):
    for words, recipe, same in ((103227021, "103", True), (103227020, "103", False), (103227021, "2", False)):
        splits = {"train": {"words": words - 1801350, "lines": 1801350}}
        manifest(tmp_path, recipe=f"wikitext{recipe}_gpt2bpe", splits=splits)
        found = data_differences(shipped("wikitext103_mlm_transformer"), tmp_path, {"train": 1801350})
        assert bool(found) != same
    (tmp_path / "manifest.json").unlink()
    tenth = shipped("iwslt14_ende_mae7_scratch", "data.train_fraction=0.1")
    assert not data_differences(tenth, tmp_path, {"train": 16024, "valid": 7283})


def test_it_is_said_before_the_training(make_lines, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ["recipe", "iwslt14_deen_mae7", "--dry-run", "--data"]
    for lines, word in (
        (MULTI30K, "WARNING: this run does not stand for mae, table 3"),
        (IWSLT, "\nstands for"),
    ):
        data = make_lines(tmp_path / f"{lines['train']}", lines)
        manifest(data, settings={"recipe": "iwslt14_de_en"} if lines is IWSLT else {"recipe": "multi30k"})
        assert main([*line, str(data)]) == 0
        assert word in capsys.readouterr().out
