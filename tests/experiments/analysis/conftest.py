"""Checkpoints of small models that nobody trained, with gates far from uniform."""

import dataclasses
import json

import pytest
import torch
import yaml

import moa_fairseq
from moa_fairseq.cli import main
from moa_fairseq.experiments.recipes.loading import build
from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.experiments.scoring.trained_model import load_trained
from moa_fairseq.plugin.forward_context import collect_routings

assert moa_fairseq.__version__


@pytest.fixture(scope="session")
def mae(toy_data, save_model, tmp_path_factory):
    """A mixture of attentive experts for translation of `toy_data`; read-only."""
    return save_model(toy_data, tmp_path_factory.mktemp("mae") / "mae.pt")


@pytest.fixture(scope="session")
def uniform_mae(toy_data, save_model, tmp_path_factory):
    """The same with uniform gates."""
    return save_model(
        toy_data, tmp_path_factory.mktemp("uniform") / "mae.pt", "--mae-gate", "uniform"
    )


@pytest.fixture
def analyze(tmp_path):
    """analyze(kind, model, data, *flags) → the numbers that the command writes."""

    def run(kind, model, data, *flags):
        out = [] if kind == "expert-tokens" else ["--output", tmp_path / "analysis.png"]
        words = f"analyze {kind} {model} --data {data} --cpu --json {tmp_path}/analysis.json".split()
        assert main([*map(str, [*words, *out, *flags])]) == 0
        return json.loads((tmp_path / "analysis.json").read_text())

    return run


@pytest.fixture
def each_sentence():
    """each_sentence(checkpoint, data) yields (net_input, decisions) of each valid sentence by itself."""

    def run(checkpoint, data):
        model, task = load_trained(checkpoint, data)
        model.eval()
        task.load_dataset("valid")
        dataset = task.dataset("valid")
        for number in range(len(dataset)):
            net_input = dataset.collater([dataset[number]])["net_input"]
            with torch.no_grad(), collect_routings() as decisions:
                model(**net_input)
            yield net_input, decisions

    return run


@pytest.fixture
def make_run(toy_data, tmp_path):
    """make_run(checkpoint, **sections) → a run folder whose recipe ends with that model."""

    def make(checkpoint, **sections):
        folder = tmp_path / "run"
        mapping = {
            "experiment": "small",
            "summary": "a small run",
            "data": {"recipe": "binarised", "source": "en", "target": "de"},
            "model": {"arch": "mae_transformer_tiny"},
            "train": {
                "max_tokens": 400,
                "criterion": "label_smoothed_cross_entropy",
                "max_epoch": 1,
            },
            "generate": {
                "subsets": ["test"],
                "beam": 2,
                "max_tokens": 400,
                "flags": {"max-len-b": 12},
            },
            "score": {"headline": "multi_bleu"},
            **sections,
        }
        recipe = build(Recipe, mapping, "test", "")
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(dataclasses.asdict(recipe)))
        prepared = {"folder": str(toy_data), "sentences": {"valid": 20}, "fingerprint": "f"}
        (folder / "state.json").write_text(
            json.dumps({"prepare": prepared, "train": {"done": "d"}})
        )
        (folder / "checkpoints" / "checkpoint_best.pt").write_bytes(checkpoint.read_bytes())
        return folder

    return make
