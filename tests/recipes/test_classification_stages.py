"""Recipes of classifiers: what they may say, and all their stages for real."""

import json

import pytest

from moa_fairseq.cli import main
from moa_fairseq.data_prep import catalogue
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.batch import with_floor
from moa_fairseq.recipes.corpus_size import measured_size
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.runner import Options, planned_commands, run_recipe

CPU = Hardware()


@pytest.fixture
def classifier(write_config):
    """classifier(**changes of sections) → path of a small recipe."""

    def make(**changes):
        mapping = {
            "experiment": "classifier",
            "summary": "a small classifier",
            "data": {"recipe": "listops"},
            "model": {
                "arch": "switchhead_roberta_listops",
                **{"num_experts": 2, "experts_per_token": 1, "expert_dim": 4},
                "flags": {"encoder-layers": 1, "encoder-embed-dim": 16, "encoder-ffn-embed-dim": 16},
            },
            "train": {
                **{"task": "sentence_prediction_by_length", "max_tokens": 800, "max_epoch": 2},
                **{"criterion": "sentence_prediction_with_routing", "log_interval": 1},
                "flags": {
                    "num-classes": 10,
                    "init-token": 0,
                    "optimizer": "adam",
                    "lr": 0.01,
                    "num-workers": 0,
                },
            },
            "score": {"headline": "accuracy", "subsets": ["test"]},
        }
        mapping["train"]["flags"].update(
            {"best-checkpoint-metric": "accuracy", "maximize-best-checkpoint-metric": True}
        )
        for section, values in changes.items():
            kept = mapping.get(section) if isinstance(values, dict) else None
            mapping[section] = {**(kept or {}), **values} if isinstance(values, dict) else values
        return write_config(mapping)

    return make


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"source": "en"}}, ["data.source", "no meaning for a classifier"]),
        ({"data": {"recipe": "multi30k"}}, ["data.recipe", "'multi30k'", "sentence_prediction"]),
        ({"generate": {"subsets": ["test"], "beam": 2}}, ["generate", "no meaning"]),
        ({"score": {"headline": "lm_ppl"}}, ["score.headline", "no score"]),
        ({"score": {"subsets": []}}, ["score.subsets", "at least one"]),
        ({"score": {"flags": {"classifier": "x.pt"}}}, ["score.flags.classifier"]),
        ({"train": {"task": "masked_lm"}}, ["data.recipe", "masked_lm"]),
    ],
)
def test_contradictions_are_refused_by_name(classifier, changes, words):
    with pytest.raises(UserError) as error:
        load_recipe(classifier(**changes))
    for word in words:
        assert word in str(error.value)


def test_the_dry_run_shows_all_stages(classifier):
    plan = planned_commands(load_recipe(classifier()), CPU, Options())
    inputs, labels, train, score = plan
    assert inputs[-1].endswith("binarised/input0") and labels[-1].endswith("binarised/label")
    assert train[train.index("--task") + 1] == "sentence_prediction_by_length"
    assert score[:3] == ["moa-fairseq", "score", "--classifier"] and "--cpu" in score


@pytest.mark.slow
def test_all_stages(classifier, tmp_path, monkeypatch, capsys, said):
    """Drawn data, a trained SwitchHead, its accuracy as a whole and by depth; a second run finds all done."""
    monkeypatch.chdir(tmp_path)
    sizes = {"train": 150, "valid": 20, "test": 35}
    listops = catalogue.datasets()["listops"]
    monkeypatch.setitem(listops.generated, "sizes", sizes)
    recipe, run = load_recipe(classifier()), tmp_path / "run"
    path = run_recipe(recipe, CPU, Options(save_dir=run))
    result = json.loads(path.read_text())
    scores = json.loads((run / "score-test.json").read_text())["accuracy"]
    assert result["metrics"] == {"accuracy": scores["score"]} and scores["sentences"] == 35
    assert sorted(scores["by"]["dependency"]) == ["2", "3", "4", "5", "6"]
    for values in scores["by"].values():
        right = [found["score"] * found["sentences"] / 100 for found in values.values()]
        assert sum(right) == pytest.approx(scores["score"] * 35 / 100)
    assert result["evaluation"]["accuracy_by_dependency"] == {
        value: round(found["score"], 2) for value, found in scores["by"]["dependency"].items()
    }
    record = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    assert any("train_load_entropy" in line for line in record)
    assert any("valid accuracy" in line for line in capsys.readouterr().out.splitlines())

    # fairseq's own validation of the same model says the same
    valid = json.loads(_score_json(run / "checkpoints" / "checkpoint_best.pt", tmp_path, "valid", capsys))[
        "accuracy"
    ]
    best = max(line["valid_best_accuracy"] for line in record if "valid_best_accuracy" in line)
    assert valid["score"] == pytest.approx(float(best), abs=0.051)

    said.clear()
    run_recipe(recipe, CPU, Options(save_dir=run))
    assert sum("done before" in line for line in said) == 2 and not any(line.startswith("$") for line in said)

    data = next((tmp_path / "data").glob("listops-*")) / "binarised"
    given = Options(save_dir=tmp_path / "other", data=data, stage="prepare")
    run_recipe(recipe, CPU, given)
    assert any("binarised already" in line for line in said)
    size = measured_size(recipe, data, 800)
    assert (size.sentences, size.vocabulary) == (150, 4 + 15 + 1)
    eights = load_recipe(classifier(train={"flags": {"batch-size": 8}}))
    assert measured_size(eights, data, 800).batches == 19  # the last of six
    lengths = [len(line.split()) + 2 for line in (data.parent / "text/input0/train").read_text().splitlines()]
    assert with_floor(recipe, data).train.min_tokens == max(lengths)  # <s> and </s> among them
    config, written = str(tmp_path / "configs" / "classifier.yaml"), tmp_path / "hydra"
    assert main(["recipe", config, "--data", str(data.parent), "--hydra", str(written)]) == 0
    assert "sentence_prediction_by_length" in (written / "classifier.yaml").read_text("utf-8")
    with pytest.raises(UserError, match="name the folder `binarised`"):
        run_recipe(recipe, CPU, Options(save_dir=tmp_path / "third", data=data.parent))


def _score_json(model, data, subset, capsys):
    capsys.readouterr()
    assert main(["score", "--classifier", str(model), "--subset", subset, "--cpu", "--json"]) == 0
    return capsys.readouterr().out
