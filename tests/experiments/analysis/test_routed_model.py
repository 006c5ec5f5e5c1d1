"""What a run folder stands for."""

import pytest

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.command import KINDS, checkpoint_and_data
from moa_fairseq.experiments.analysis.routed_model import by_kind
from moa_fairseq.experiments.make import write_step_record


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_best.pt").touch()
    (tmp_path / "binarised").mkdir()
    write_step_record(
        tmp_path, "prepare", inputs={}, facts={"folder": str(tmp_path / "binarised")}
    )
    return tmp_path


def test_a_run_folder_stands_for_its_average_else_its_best_checkpoint(run_folder):
    best = run_folder / "checkpoints" / "checkpoint_best.pt"
    assert checkpoint_and_data(run_folder, None) == (best, run_folder / "binarised")
    (run_folder / "average.pt").touch()
    other = run_folder / "other"
    assert checkpoint_and_data(run_folder, other) == (run_folder / "average.pt", other)


def test_a_save_dir_and_a_file_do_not_tell_their_data(run_folder, tmp_path_factory):
    best = run_folder / "checkpoints" / "checkpoint_best.pt"
    assert checkpoint_and_data(best.parent) == (best, None) == checkpoint_and_data(best)
    with pytest.raises(UserError, match="checkpoint_best"):
        checkpoint_and_data(tmp_path_factory.mktemp("empty"), None)


@pytest.mark.thorough(keep="expert-load")
@pytest.mark.parametrize("kind", [kind.NAME for kind in KINDS])
def test_each_analysis_of_what_plain_fairseq_train_left(
    kind, plain_training, tmp_path, monkeypatch, capsys
):
    """A folder with checkpoints/ and nothing else; its data is `bin`, as fairseq-train was given it."""
    folder, elsewhere = plain_training
    output = [] if kind == "expert-tokens" else ["--output", str(tmp_path / "picture.png")]
    monkeypatch.chdir(folder.parent)
    words = ["analyze", kind, "run", *output]
    if kind == "learning-curve":
        assert main(words) == 2
        message = capsys.readouterr().err
        assert "--log-format json" in message and "--log-file" in message
        return
    if kind == "induction-heads":
        assert main([*words, "--cpu"]) == 2
        assert "causal language models" in capsys.readouterr().err
        return
    assert main([*words, "--cpu"]) == 0
    assert "encoder.layers.0.self_attn" in capsys.readouterr().out
    monkeypatch.chdir(elsewhere)
    words[2] = str(folder)
    assert main([*words, "--cpu"]) == 2
    message = capsys.readouterr().err
    assert "bin" in message and "--data" in message and message.count("\n") == 1
    assert main([*words, "--cpu", "--data", str(folder.parent / "bin")]) == 0


@pytest.fixture(scope="module")
def plain_training(fairseq, toy_data, tmp_path_factory):
    """The folder around a --save-dir of fairseq-train, beside its data, and an empty folder."""
    place = tmp_path_factory.mktemp("plain")
    (place / "bin").symlink_to(toy_data)
    words = ("--max-update", 2, "--mae-dropped-heads", 1)
    fairseq.train("bin", "run/checkpoints", *words, arch="mae_transformer_tiny", cwd=place)
    return place / "run", tmp_path_factory.mktemp("elsewhere")


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
