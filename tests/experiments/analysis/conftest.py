"""Checkpoints of small models that nobody trained, with gates far from uniform."""

import dataclasses
import json

import pytest
import torch
import yaml
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

import moa_fairseq
from moa_fairseq.cli import main
from moa_fairseq.experiments.recipes.loading import build
from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.experiments.scoring.trained_model import load_trained
from moa_fairseq.layers.sequence_gate import gates_of
from moa_fairseq.plugin.forward_context import collect_routings

assert moa_fairseq.__version__
SMALL = {
    "translation": [
        *("--source-lang", "en", "--target-lang", "de", "--share-all-embeddings"),
        *("--encoder-layers", 2, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16),
        *("--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16),
    ],
    "language_modeling": [
        *("--tokens-per-sample", 12, "--sample-break-mode", "complete", "--decoder-layers", 2),
        *("--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16, "--gate-window", 4),
    ],
}


@pytest.fixture(scope="session")
def save_model():
    """save_model(data, path, *flags, task=, arch=) writes a checkpoint as fairseq-train would."""

    def save(data, path, *flags, task="translation", arch="mae_transformer_tiny", gate_scale=40.0):
        torch.manual_seed(11)
        words = [data, "--task", task, "--arch", arch, "--cpu", *SMALL[task], *flags]
        args = options.parse_args_and_arch(options.get_training_parser(task), [str(word) for word in words])
        cfg = convert_namespace_to_omegaconf(args)
        model = tasks.setup_task(cfg.task).build_model(cfg.model)
        for gate in gates_of(model):
            torch.nn.init.normal_(gate.fc1.weight, std=gate_scale / 10)
            torch.nn.init.normal_(gate.fc2.weight, std=1.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        cfg = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
        history = {"criterion_name": "X", "optimizer_name": "X", "lr_scheduler_state": {}, "num_updates": 1}
        state = {"args": None, "cfg": cfg, "model": model.state_dict(), "optimizer_history": [history]}
        torch.save({**state, "extra_state": {"train_iterator": {"epoch": 1}}}, path)
        return path

    return save


@pytest.fixture(scope="session")
def mae(toy_data, save_model, tmp_path_factory):
    """A mixture of attentive experts for translation of `toy_data`; read-only."""
    return save_model(toy_data, tmp_path_factory.mktemp("mae") / "mae.pt")


@pytest.fixture(scope="session")
def uniform_mae(toy_data, save_model, tmp_path_factory):
    """The same with uniform gates."""
    return save_model(toy_data, tmp_path_factory.mktemp("uniform") / "mae.pt", "--mae-gate", "uniform")


@pytest.fixture(scope="session")
def text_data(tmp_path_factory, toy_data, preprocess):
    """The source side of `toy_data`, binarised for language models."""
    folder = tmp_path_factory.mktemp("text") / "bin"
    texts = {f"{split}pref": str(toy_data.parent / f"{split}.en") for split in ("train", "valid")}
    preprocess({"only-source": True, "destdir": str(folder), **texts})
    return folder


@pytest.fixture
def analyze(tmp_path):
    """analyze(kind, model, data, *flags) → the numbers that the command writes."""

    def run(kind, model, data, *flags):
        out = [] if kind == "expert-tokens" else ["--output", tmp_path / "analysis.png"]
        words = ["analyze", kind, model, "--data", data, "--cpu", "--json", tmp_path / "analysis.json"]
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
            "train": {"max_tokens": 400, "criterion": "label_smoothed_cross_entropy", "max_epoch": 1},
            "generate": {"subsets": ["test"], "beam": 2, "max_tokens": 400, "flags": {"max-len-b": 12}},
            "score": {"headline": "multi_bleu"},
            **sections,
        }
        recipe = build(Recipe, mapping, "test", "")
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(dataclasses.asdict(recipe)))
        prepared = {"folder": str(toy_data), "sentences": {"valid": 20}, "fingerprint": "f"}
        (folder / "state.json").write_text(json.dumps({"prepare": prepared, "train": {"done": "d"}}))
        (folder / "checkpoints" / "checkpoint_best.pt").write_bytes(checkpoint.read_bytes())
        return folder

    return make
