"""Recipes of masked language models: what they may say, and all their stages for real."""

import json

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.results import Comparison
from moa_fairseq.evaluation.results_markdown import render
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.runner import Options, planned_commands, run_recipe

CPU = Hardware()


@pytest.fixture
def masked(write_config):
    """masked(**changes of sections) → path of a small recipe."""

    def make(**changes):
        mapping = {
            "experiment": "masked",
            "summary": "a small masked language model",
            "data": {"recipe": "wikitext2_gpt2bpe"},
            "model": {
                "arch": "moa_roberta_tiny",
                **{"num_experts": 4, "experts_per_token": 2, "expert_dim": 8},
                "flags": {"encoder-layers": 1, "encoder-embed-dim": 16, "encoder-ffn-embed-dim": 16},
            },
            "train": {
                **{"task": "masked_lm", "criterion": "masked_lm_with_routing", "max_tokens": 240},
                **{"max_epoch": 2, "keep_last_epochs": 2, "log_interval": 1},
                "flags": {"tokens-per-sample": 24, "optimizer": "adam", "lr": 0.01, "num-workers": 0},
            },
            "average": {"epochs": 2},
            "score": {"headline": "masked_lm_ppl", "subsets": ["test", "valid"], "flags": {"maskings": 2}},
        }
        for section, values in changes.items():
            kept = mapping.get(section) if isinstance(values, dict) else None
            mapping[section] = {**(kept or {}), **values} if isinstance(values, dict) else values
        return write_config(mapping)

    return make


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"source": "en"}}, ["data.source", "no meaning"]),
        ({"data": {"bpe": 100}}, ["data.bpe", "no meaning"]),
        ({"data": {"recipe": "multi30k"}}, ["data.recipe", "'multi30k'", "masked_lm"]),
        ({"generate": {"subsets": ["test"], "beam": 2}}, ["generate", "no meaning"]),
        ({"score": {"headline": "multi_bleu"}}, ["score.headline", "no score"]),
        ({"score": {"subsets": []}}, ["score.subsets", "at least one"]),
        ({"score": {"flags": {"subset": "test"}}}, ["score.flags.subset", "score.subsets"]),
        ({"train": {"task": "translation"}}, ["data.recipe", "translation"]),
    ],
)
def test_contradictions_are_refused_by_name(masked, changes, words):
    with pytest.raises(UserError) as error:
        load_recipe(masked(**changes))
    for word in words:
        assert word in str(error.value)


def test_a_translation_still_needs_its_languages(small, write_config):
    del small["data"]["source"]
    with pytest.raises(UserError, match=r"data\.source: is missing"):
        load_recipe(write_config(small))
    small["data"]["source"], small["score"]["subsets"] = "en", ["test"]
    with pytest.raises(UserError, match=r"score\.subsets: say generate\.subsets"):
        load_recipe(write_config(small))


def test_the_dry_run_shows_all_stages(masked, tmp_path):
    plan = planned_commands(load_recipe(masked()), CPU, Options(data=tmp_path))
    preprocess, train, average, *scores = plan
    assert preprocess[:2] == ["fairseq-preprocess", "--only-source"] and "--source-lang" not in train
    assert train[train.index("--task") + 1] == "masked_lm" and average[1] == "average"
    assert [line[line.index("--subset") + 1] for line in scores] == ["test", "valid"]
    assert all(line[:2] == ["moa-fairseq", "score"] and "--cpu" in line for line in scores)
    embedded = planned_commands(load_recipe(masked(data={"recipe": "embedded_gpt2bpe"})), CPU, Options())
    assert embedded[0][:2] == ["moa-fairseq", "corpus"]


def test_generating_says_that_there_is_nothing_to_do(masked, toy_wiki_data, tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    options = Options(stage="generate", data=toy_wiki_data, save_dir=tmp_path / "run")
    assert run_recipe(load_recipe(masked()), CPU, options) is None
    assert any("no generate section" in line for line in said)
    options = Options(stage="score", data=toy_wiki_data, save_dir=tmp_path / "run")
    with pytest.raises(UserError, match="run --stage average first"):
        run_recipe(load_recipe(masked()), CPU, options)


@pytest.mark.slow
def test_all_stages(masked, toy_wiki_data, tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    recipe, run = load_recipe(masked(score={"subsets": ["test"]})), tmp_path / "run"
    options = Options(data=toy_wiki_data, save_dir=run, record=tmp_path / "recorded.json")
    result = json.loads(run_recipe(recipe, CPU, options).read_text())
    metrics = result["metrics"]
    assert 1 < metrics["masked_lm_ppl"] < 300 and metrics["masked_lm_ppl_sd"] >= 0
    assert metrics["masked_lm_word_ppl"] > metrics["masked_lm_ppl"]
    assert (result["subset"], result["checkpoints_averaged"], result["generation"]) == ("test", 2, None)
    assert result["evaluation"]["maskings"] == 2 and result["parameters"] > 1000
    assert (
        json.loads((run / "score-test.json").read_text())["masked_lm_ppl"]["score"]
        == metrics["masked_lm_ppl"]
    )
    assert said[-2].startswith(f"{run / 'result.json'}: masked_lm_ppl")
    recorded = json.loads((tmp_path / "recorded.json").read_text())
    text = render(Comparison([], [{"name": "recorded", **recorded}]))
    assert f"| {metrics['masked_lm_ppl']:.2f} | {metrics['masked_lm_word_ppl']:.2f} |" in text
    assert "maskings 2" in text

    said.clear()
    run_recipe(recipe, CPU, Options(data=toy_wiki_data, save_dir=run))
    assert sum("done before" in line for line in said) == 3 and not any(line.startswith("$") for line in said)
