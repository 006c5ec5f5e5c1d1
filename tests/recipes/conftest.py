"""A small valid recipe, as a mapping and as a file, for the tests to bend."""

import copy

import pytest
import yaml

SMALL = {
    "experiment": "small",
    "summary": "a small recipe",
    "data": {"recipe": "parallel", "source": "en", "target": "de", "bpe": 50},
    "model": {
        "arch": "transformer",
        "share_all_embeddings": True,
        "flags": {
            "encoder-layers": 1,
            "decoder-layers": 1,
            "encoder-embed-dim": 16,
            "decoder-embed-dim": 16,
            "encoder-ffn-embed-dim": 16,
            "decoder-ffn-embed-dim": 16,
            "encoder-attention-heads": 2,
            "decoder-attention-heads": 2,
            "dropout": 0.0,
        },
    },
    "train": {
        "effective_batch_tokens": 400,
        "max_tokens": 400,
        "max_epoch": 3,
        "keep_last_epochs": 3,
        "log_interval": 1,
        "criterion": "label_smoothed_cross_entropy",
        "flags": {"label-smoothing": 0.1, "optimizer": "adam", "lr": 0.01, "num-workers": 0},
    },
    "average": {"epochs": 2},
    "generate": {"subsets": ["test"], "beam": 2, "max_tokens": 400},
    "score": {"headline": "multi_bleu"},
}


@pytest.fixture
def small():
    """The mapping, free to be changed."""
    return copy.deepcopy(SMALL)


@pytest.fixture
def write_config(tmp_path):
    """write_config(mapping) → path of <experiment>.yaml."""

    def write(mapping, name=None):
        path = tmp_path / "configs" / f"{name or mapping['experiment']}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(mapping, sort_keys=False), encoding="utf-8")
        return path

    return write
