"""Counting decisions: padding, several batches, and a model trained by fairseq's own commands."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq import tasks
from omegaconf import OmegaConf

import moa_fairseq
from moa_fairseq.analysis.expert_load import summary
from moa_fairseq.analysis.routed_model import router_uses
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.cli import main
from moa_fairseq.fairseq_compat import load_checkpoint

USER_DIR = Path(moa_fairseq.__file__).parent


def decision(expert_index, padding=None, num_experts=4):
    index = torch.tensor(expert_index)
    probs = torch.full((len(index), num_experts), 1 / num_experts)
    gate = torch.arange(1, index.numel() + 1.0).view(index.shape)
    mask = None if padding is None else torch.tensor(padding)
    return RoutingDecision(index, gate, probs, probs.log(), probs.size(1), padding_mask=mask)


def test_counts_add_up_over_batches_and_leave_padding_out():
    first = [("a", decision([[0, 1], [0, 2]])), ("b", decision([[3, 2]]))]
    second = [("a", decision([[0, 1], [3, 3]], padding=[False, True])), ("b", decision([[3, 1]]))]
    a, b = router_uses([first, second])
    assert (a.name, a.instances, a.counts.tolist()) == ("a", 3, [3, 2, 1, 0])
    assert a.gate_mass.tolist() == [1 + 3 + 1, 2 + 2, 4, 0]
    assert (b.name, b.instances, b.counts.tolist()) == ("b", 2, [0, 1, 1, 2])


def test_summary_of_an_even_and_of_a_collapsed_router():
    even, collapsed = router_uses(
        [[("even", decision([[0, 1], [2, 3]])), ("collapsed", decision([[1], [1]]))]]
    )
    found = summary(even)
    assert found["entropy"] == pytest.approx(math.log(4)) and found["evenness"] == pytest.approx(1)
    assert (found["max_load"], found["min_load"], found["dead_experts"]) == (0.25, 0.25, 0)
    found = summary(collapsed)
    assert (found["entropy"], found["max_load"], found["dead_experts"]) == (0, 1, 3)
    assert sum(found["gate_share"]) == pytest.approx(1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder with a tiny MoA and a dense model, trained on a copy task for two short epochs."""
    folder = tmp_path_factory.mktemp("run")
    generator = torch.Generator().manual_seed(1)
    for name, number in (("train", 40), ("valid", 12)):
        words = torch.randint(9, (number, 8), generator=generator).tolist()
        lengths = torch.randint(1, 9, (number,), generator=generator).tolist()
        text = "".join(" ".join(f"w{word}" for word in line[:n]) + "\n" for line, n in zip(words, lengths))
        for language in ("en", "de"):
            (folder / f"{name}.{language}").write_text(text)
    data = folder / "data-bin"
    prefixes = ["--trainpref", folder / "train", "--validpref", folder / "valid", "--destdir", data]
    _command("fairseq_cli.preprocess", "-s", "en", "-t", "de", *prefixes, "--joined-dictionary")
    common = ["--share-all-embeddings", "--encoder-layers", 2, "--decoder-layers", 2, "--max-tokens", 60]
    common += ["--optimizer", "adam", "--lr", 1e-3, "--cpu", "--log-format", "json", "--log-interval", 1]
    moa = ["--arch", "moa_transformer_tiny", "--criterion", "label_smoothed_cross_entropy_with_routing"]
    outputs = ["--save-dir", folder / "checkpoints", "--log-file", folder / "train.jsonl"]
    _command("fairseq_cli.train", data, *common, *moa, "--max-epoch", 2, *outputs)
    return folder


def _command(module, *arguments):
    user_dir = ["--user-dir", USER_DIR] if module.endswith("train") else []
    argv = [sys.executable, "-m", module, *map(str, [*arguments, *user_dir])]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def average(trained):
    path = trained / "average.pt"
    inputs = ["--inputs", str(trained / "checkpoints"), "--num-epoch-checkpoints", "2"]
    assert main(["average", *inputs, "--output", str(path)]) == 0
    return path


def valid_tokens(trained, language="en"):
    lines = (trained / f"valid.{language}").read_text().splitlines()
    return sum(len(line.split()) + 1 for line in lines)  # + end of sentence


def test_every_token_of_the_subset_is_counted_once(trained, average, analyze, tmp_path, capsys):
    report = analyze("expert-load", average, trained / "data-bin", "--max-tokens", 50)
    assert (tmp_path / "analysis.png").read_bytes().startswith(b"\x89PNG") and report["subset"] == "valid"
    assert "4 of 8" in capsys.readouterr().out
    assert [row["name"] for row in report["modules"]] == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.encoder_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.encoder_attn",
    ]
    tokens = valid_tokens(trained)
    for row in report["modules"]:
        assert row["tokens"] == tokens and sum(row["load"]) == pytest.approx(1)
    for max_tokens in (10, 4000):  # rounding may turn a near-tie; the load stays
        rows = analyze("expert-load", average, trained / "data-bin", "--max-tokens", max_tokens)["modules"]
        for one, other in zip(report["modules"], rows):
            moved = sum(abs(a - b) for a, b in zip(one["load"], other["load"]))
            assert moved * 4 * tokens <= 2.001  # K = 4


def test_learning_curve_of_the_run(trained, tmp_path, capsys):
    picture = tmp_path / "curve.png"
    assert main(["analyze", "learning-curve", str(trained), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "best valid ppl" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["RUN/average.pt", "--data", "RUN/data-bin", "--subset", "test"], "--subset test"),
        (["RUN/average.pt", "--data", "RUN/checkpoints"], "average.pt cannot be loaded"),
        (["RUN/average.pt", "--data", "RUN/none"], "--data"),
        (["RUN/none.pt", "--data", "RUN/data-bin"], "none.pt does not exist"),
        (["RUN/train.en", "--data", "RUN/data-bin"], "train.en cannot be read"),
        (["RUN/average.pt", "--data", "RUN/data-bin", "--max-tokens", "1"], "at most 1 tokens"),
        (["RUN/average.pt", "--data", "RUN/data-bin", "--max-tokens", "0"], "--max-tokens 0"),
        (["RUN/average.pt", "--data", "RUN/data-bin", "--output", "load.pdf"], "must end in .png"),
    ],
)
def test_bad_input_ends_with_one_message(trained, average, tmp_path, capsys, arguments, says):
    output = tmp_path / "load.png"
    arguments = [argument.replace("RUN", str(trained)) for argument in arguments]
    assert main(["analyze", "expert-load", "--output", str(output), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not output.exists()


def test_a_dense_model_has_no_load(trained, tmp_path, capsys):
    """A checkpoint of the same training, but for the architecture."""
    state = load_checkpoint(trained / "checkpoints" / "checkpoint1.pt")
    state["cfg"]["model"].arch = state["cfg"]["model"]._name = "transformer_tiny"
    task = tasks.setup_task(OmegaConf.create(state["cfg"]["task"]))
    state["model"] = task.build_model(state["cfg"]["model"]).state_dict()
    torch.save(state, tmp_path / "dense.pt")
    flags = ["--data", str(trained / "data-bin"), "--output", str(tmp_path / "x.png")]
    assert main(["analyze", "expert-load", str(tmp_path / "dense.pt"), *flags]) == 2
    assert "TransformerModel has no mixture" in capsys.readouterr().err
