"""Entropies and shares against literal sums over instances; batches, padding, uniform gates, the command."""

import argparse
import math

import pytest
import torch

from moa_fairseq.cli import main
from moa_fairseq.experiments.analysis import gates
from moa_fairseq.experiments.analysis.gates import draw_gates, mean_entropies, summary
from moa_fairseq.experiments.analysis.routed_model import router_uses
from moa_fairseq.experiments.records import provenance
from moa_fairseq.files import checksum
from moa_fairseq.layers import MixtureOfAttentiveExperts
from moa_fairseq.layers.routing import Routing

MODULES = [
    "encoder.layers.0.self_attn",
    "encoder.layers.1.self_attn",
    "decoder.layers.0.self_attn",
    "decoder.layers.0.encoder_attn",
    "decoder.layers.1.self_attn",
    "decoder.layers.1.encoder_attn",
]


def test_entropy_and_shares_of_known_gates():
    probs = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.25, 0.75], [0.2, 0.2, 0.6]])
    padding = torch.tensor([False, False, False, True])
    index = torch.arange(3).expand(4, -1)
    one = Routing(index, probs, probs, probs, probs.size(1), padding=padding)
    two = Routing(index[:1], probs[3:], probs[3:], probs[3:], probs.size(1))
    (use,) = router_uses([[("a", one)], [("a", two)]])
    of_rows = [math.log(2), 0.0, -0.25 * math.log(0.25) - 0.75 * math.log(0.75)]
    of_rows.append(-0.4 * math.log(0.2) - 0.6 * math.log(0.6))
    found = summary(use, learned=True)
    assert found["instances"] == 4 and found["entropy"] == pytest.approx(
        sum(of_rows) / 4, rel=1e-6
    )
    assert found["shares"] == [0.5, 0.0, 0.5] and summary(use, learned=False)["shares"] is None


def literal_counts(sentences):
    """One instance at a time, with a loop over the experts."""
    found = {}
    for _, decisions in sentences:
        for name, decision in decisions:
            entry = found.setdefault(name, {"instances": 0, "entropy": 0.0, "counts": [0] * 8})
            for row in decision.probs.tolist():
                entry["instances"] += 1
                entry["entropy"] -= sum(g * math.log(g) for g in row if g > 0)
                entry["counts"][row.index(max(row))] += 1
    return found


def check_against_the_loop(rows, literal):
    assert [row["name"] for row in rows] == list(literal)
    for row in rows:
        expected = literal[row["name"]]
        assert row["instances"] == expected["instances"]
        assert row["entropy"] == pytest.approx(expected["entropy"] / row["instances"], rel=1e-4)
        assert row["shares"] == pytest.approx(
            [count / row["instances"] for count in expected["counts"]]
        )
        # Gates that prefer nobody would show nothing
        assert row["entropy"] < 0.95 * row["uniform_entropy"]


@pytest.mark.parametrize("max_tokens", [12, 4000])
def test_batches_with_padding_count_as_a_loop_over_single_sentences(
    mae, toy_data, analyze, each_sentence, max_tokens
):
    rows = analyze("gates", mae, toy_data, "--max-tokens", max_tokens)["modules"]
    assert [row["name"] for row in rows] == MODULES
    check_against_the_loop(rows, literal_counts(each_sentence(mae, toy_data)))
    lines = (toy_data.parent / "valid.en").read_text().splitlines()
    assert [row["instances"] for row in rows[:2]] == [len(lines)] * 2
    assert {row["instances"] for row in rows[2:]} == {
        sum(len(line.split()) + 1 for line in lines)
    }
    assert [row["instance"] for row in rows] == ["sequence"] * 2 + ["position"] * 4


@pytest.mark.thorough
def test_a_language_model_has_gates_for_each_position(
    text_data, save_model, tmp_path, analyze, each_sentence
):
    path = save_model(
        text_data, tmp_path / "lm.pt", task="language_modeling", arch="mae_transformer_lm_base"
    )
    rows = analyze("gates", path, text_data, "--max-tokens", 30)["modules"]
    assert [row["name"] for row in rows] == [
        "decoder.layers.0.self_attn",
        "decoder.layers.1.self_attn",
    ]
    check_against_the_loop(rows, literal_counts(each_sentence(path, text_data)))


def test_uniform_gates_have_the_greatest_entropy_and_no_favourites(
    uniform_mae, toy_data, analyze, capsys
):
    rows = analyze("gates", uniform_mae, toy_data)["modules"]
    assert [row["entropy"] for row in rows] == pytest.approx([math.log(8)] * 6)
    assert all(row["shares"] is None for row in rows)
    assert "attributed to none" in capsys.readouterr().out


@pytest.mark.thorough
def test_untrained_gates_are_those_of_a_fresh_model_on_the_same_inputs(
    mae, toy_data, analyze, capsys
):
    """Far from uniform before; almost uniform with the weights that a new gate begins with."""
    trained = analyze("gates", mae, toy_data)["modules"]
    fresh, again, other = (
        analyze("gates", mae, toy_data, "--untrained", seed) for seed in (1, 1, 2)
    )
    assert "anew with seed 1" in capsys.readouterr().out and fresh["untrained_seed"] == 1
    assert fresh["modules"] == again["modules"] != other["modules"]
    for one, initial in zip(trained, fresh["modules"]):
        assert initial["instances"] == one["instances"]
        highest = one["uniform_entropy"]
        assert one["entropy"] < 0.9 * highest < 0.95 * highest < initial["entropy"]


@pytest.mark.parametrize("seed, drawn", [(None, False), (0, True), (3, True)])
def test_the_seed_zero_draws_gates_anew_too(monkeypatch, seed, drawn):
    class Measured(Exception):
        pass

    def measure(*_):
        raise Measured

    monkeypatch.setattr(gates, "forward_passes", measure)
    mixture = MixtureOfAttentiveExperts(8, 4, self_attention=True)
    before = mixture.gate.fc2.weight.clone()
    args = argparse.Namespace(untrained=seed, subset="valid", max_tokens=1, cpu=True)
    with pytest.raises(Measured):
        gates.analyze(args, mixture, None)
    assert torch.equal(mixture.gate.fc2.weight, before) != drawn


def test_means_are_over_the_modules_of_a_kind():
    names = [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.layers.0.encoder_attn",
    ]
    rows = [
        {"name": n, "entropy": e, "uniform_entropy": 2.0}
        for n, e in zip(names, (1.0, 2.0, 0.5))
    ]
    means = mean_entropies(rows)
    assert list(means) == ["encoder self-attention", "decoder cross-attention", "all"]
    assert means["encoder self-attention"]["entropy"] == 1.5
    assert means["all"] == {
        "entropy": pytest.approx(3.5 / 3),
        "uniform_entropy": 2.0,
        "modules": 3,
    }


def test_command_writes_picture_and_numbers(
    mae, toy_data, make_run, analyze, tmp_path, capsys, monkeypatch
):
    """The numbers say of which model and text they are, and what made them."""
    monkeypatch.setattr(provenance, "commit", lambda: "abc")
    report = analyze("gates", make_run(mae), toy_data)
    printed = capsys.readouterr().out
    assert (tmp_path / "analysis.png").read_bytes().startswith(b"\x89PNG")
    assert report["subset"] == "valid" and [row["name"] for row in report["modules"]] == MODULES
    assert f"{report['means']['all']['entropy']:.4f}" in printed and "20 sequences" in printed
    facts = (report["made_by"]["commit"], report["checkpoint_sha256"], report["data"])
    assert facts == ("abc", checksum(mae), str(toy_data))


def test_a_model_without_such_gates_is_told_so(toy_checkpoint, toy_data, tmp_path, capsys):
    flags = f"--data {toy_data} --output {tmp_path}/x.png --cpu".split()
    assert main(["analyze", "gates", str(toy_checkpoint), *flags]) == 2
    assert "expert-load" in capsys.readouterr().err


def row(name, entropy, counts=None):
    size = len(counts or [0] * 4)
    shares = counts and [count / sum(counts) for count in counts]
    return {
        "name": name,
        "entropy": entropy,
        "uniform_entropy": math.log(size),
        "shares": shares,
    }


def test_entropies_per_layer_and_one_map_per_kind():
    rows = [row("encoder.layers.0.self_attn", 1.0, [1, 3, 0, 0])]
    rows += [row("encoder.layers.1.self_attn", 1.2, [1, 1, 1, 1])]
    rows += [row("decoder.layers.0.self_attn", 0.4, [4, 0, 0, 0])]
    entropies, encoder, decoder, _ = draw_gates(rows, "title").axes
    assert list(entropies.get_lines()[0].get_ydata()) == [1.0, 1.2]
    assert list(entropies.get_lines()[1].get_ydata()) == [0.4]
    assert entropies.get_lines()[2].get_ydata()[0] == pytest.approx(1.386, abs=1e-3)
    assert encoder.get_images()[0].get_array().tolist() == [[0.25, 0.75, 0, 0], [0.25] * 4]
    assert decoder.get_title() == "decoder self-attention"
    assert {
        image.get_clim() for panel in (encoder, decoder) for image in panel.get_images()
    } == {(0.0, 1.0)}
    assert [text.get_text() for text in encoder.texts[:3]] == ["25", "75", "0"]


def test_uniform_gates_have_no_map_and_many_experts_no_numbers():
    assert len(draw_gates([row("encoder.layers.0.self_attn", 1.386)]).axes) == 1
    many = draw_gates([row("encoder.layers.0.self_attn", 3.0, [1] * 28)])
    assert not many.axes[1].texts
