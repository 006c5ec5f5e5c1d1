"""Counting decisions: padding, several batches, a whole model, and what has no load."""

import math

import pytest
import torch

from moa_fairseq.cli import main
from moa_fairseq.experiments.analysis.expert_load import summary
from moa_fairseq.experiments.analysis.routed_model import router_uses
from moa_fairseq.layers.routing import Routing


def decision(expert_index, padding=None, num_experts=4):
    index = torch.tensor(expert_index)
    probs = torch.full((len(index), num_experts), 1 / num_experts)
    gate = torch.arange(1, index.numel() + 1.0).view(index.shape)
    mask = None if padding is None else torch.tensor(padding)
    return Routing(index, gate, probs, probs.log(), probs.size(1), padding=mask)


def test_counts_add_up_over_batches_and_leave_padding_out():
    first = [("a", decision([[0, 1], [0, 2]])), ("b", decision([[3, 2]]))]
    second = [
        ("a", decision([[0, 1], [3, 3]], padding=[False, True])),
        ("b", decision([[3, 1]])),
    ]
    a, b = router_uses([first, second])
    assert (a.name, a.instances, a.counts.tolist()) == ("a", 3, [3, 2, 1, 0])
    assert a.gate_mass.tolist() == [1 + 3 + 1, 2 + 2, 4, 0]
    assert (b.name, b.instances, b.counts.tolist()) == ("b", 2, [0, 1, 1, 2])


def test_summary_of_an_even_and_of_a_collapsed_router():
    even, collapsed = router_uses(
        [[("even", decision([[0, 1], [2, 3]])), ("collapsed", decision([[1], [1]]))]]
    )
    found = summary(even)
    assert found["entropy"] == pytest.approx(math.log(4)) and found[
        "evenness"
    ] == pytest.approx(1)
    assert (found["max_load"], found["min_load"], found["dead_experts"]) == (0.25, 0.25, 0)
    found = summary(collapsed)
    assert (found["entropy"], found["max_load"], found["dead_experts"]) == (0, 1, 3)
    assert sum(found["gate_share"]) == pytest.approx(1)


@pytest.mark.thorough(keep="[50")
@pytest.mark.parametrize("max_tokens", [10, 50, 4000])
def test_every_token_of_the_subset_is_counted_once(
    save_model, toy_data, analyze, each_sentence, tmp_path, capsys, max_tokens
):
    model = save_model(toy_data, tmp_path / "moa.pt", arch="moa_transformer_tiny")
    report = analyze("expert-load", model, toy_data, "--max-tokens", max_tokens)
    assert (tmp_path / "analysis.png").read_bytes().startswith(b"\x89PNG") and report[
        "subset"
    ] == "valid"
    assert "4 of 8" in capsys.readouterr().out
    expected = {}
    for _, decisions in each_sentence(model, toy_data):
        for name, found in decisions:
            expected[name] = expected.get(name, 0) + found.expert_counts
    assert [row["name"] for row in report["modules"]] == list(expected)
    lines = (toy_data.parent / "valid.en").read_text().splitlines()
    for row in report["modules"]:
        assert row["tokens"] == sum(
            len(line.split()) + 1 for line in lines
        )  # + end of sentence
        load = expected[row["name"]] / expected[row["name"]].sum()
        # Rounding may turn a near-tie
        assert row["load"] == pytest.approx(load.tolist(), abs=0.003)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["CHECKPOINT", "--data", "DATA", "--subset", "no"], "--subset no"),
        (["CHECKPOINT", "--data", "DATA/.."], "cannot be loaded"),
        (["CHECKPOINT", "--data", "DATA/none"], "--data"),
        (["DATA/none.pt", "--data", "DATA"], "none.pt does not exist"),
        (["DATA/dict.en.txt", "--data", "DATA"], "dict.en.txt cannot be read"),
        (["CHECKPOINT", "--data", "DATA", "--max-tokens", "1"], "at most 1 tokens"),
        (["CHECKPOINT", "--data", "DATA", "--max-tokens", "0"], "--max-tokens 0"),
        (["CHECKPOINT", "--data", "DATA", "--output", "load.pdf"], "must end in .png"),
        (["DENSE", "--data", "DATA"], "TransformerModel has no mixture"),
    ],
)
def test_bad_input_ends_with_one_message(
    toy_checkpoint, toy_data, save_model, tmp_path, capsys, arguments, says
):
    output = tmp_path / "load.png"
    places = {"CHECKPOINT": toy_checkpoint, "DATA": toy_data}
    if "DENSE" in arguments:
        places["DENSE"] = save_model(toy_data, tmp_path / "dense.pt", arch="transformer_tiny")
    for name, path in places.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    assert main(["analyze", "expert-load", "--output", str(output), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not output.exists()
