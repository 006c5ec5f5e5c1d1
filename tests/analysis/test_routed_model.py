"""What a run folder stands for."""

import pytest

from moa_fairseq.analysis.command import checkpoint_and_data
from moa_fairseq.analysis.routed_model import by_kind
from moa_fairseq.errors import UserError
from moa_fairseq.running.make import put_mark


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_best.pt").touch()
    (tmp_path / "binarised").mkdir()
    put_mark(tmp_path, "prepare", inputs={}, facts={"folder": str(tmp_path / "binarised")})
    return tmp_path


def test_a_run_folder_stands_for_its_average_else_its_best_checkpoint(run_folder):
    best = run_folder / "checkpoints" / "checkpoint_best.pt"
    assert checkpoint_and_data(run_folder, None) == (best, run_folder / "binarised")
    (run_folder / "average.pt").touch()
    other = run_folder / "other"
    assert checkpoint_and_data(run_folder, other) == (run_folder / "average.pt", other)


def test_what_is_missing_is_named(run_folder, tmp_path_factory):
    with pytest.raises(UserError, match="--data must name"):
        checkpoint_and_data(run_folder / "average.pt", None)
    with pytest.raises(UserError, match=r"neither average\.pt nor"):
        checkpoint_and_data(tmp_path_factory.mktemp("empty"), None)


def test_the_two_sides_of_an_attention_are_two_kinds():
    names = (
        "decoder.layers.0.encoder_attn.keys",
        "decoder.layers.0.encoder_attn",
        "x.keys",
        "encoder.layers.1.mlp",
    )
    kinds = by_kind([{"name": name} for name in names])
    assert {kind: [item["name"] for item in group] for kind, group in kinds.items()} == {
        "decoder cross-attention": [names[1]],
        "decoder cross-attention, keys": [names[0]],
        "other": [names[3]],
        "other, keys": [names[2]],
    }
