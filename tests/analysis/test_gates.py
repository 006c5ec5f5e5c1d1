"""Entropies and shares against literal sums over instances; batches, padding, uniform gates, the command."""

import json
import math

import pytest
import torch

from moa_fairseq.analysis.gates import GateUse, mean_entropies, measure_gates
from moa_fairseq.attention.collector import collect_decisions
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.trained_model import load_trained

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
    use = GateUse("a", 3, False, counts=torch.zeros(3, dtype=torch.int64))
    use.add(RoutingDecision(index, probs, probs, probs, probs.size(1), padding_mask=padding))
    use.add(RoutingDecision(index[:1], probs[3:], probs[3:], probs[3:], probs.size(1)))
    of_rows = [math.log(2), 0.0, -0.25 * math.log(0.25) - 0.75 * math.log(0.75)]
    of_rows.append(-0.4 * math.log(0.2) - 0.6 * math.log(0.6))
    assert use.instances == 4 and use.entropy == pytest.approx(sum(of_rows) / 4, rel=1e-6)
    assert use.shares == [0.5, 0.0, 0.5]


def literal_counts(checkpoint, data):
    """One sentence at a time, one instance at a time, with a loop over the experts."""
    model, task = load_trained(checkpoint, data)
    model.eval()
    task.load_dataset("valid")
    found = {}
    for number in range(len(task.dataset("valid"))):
        dataset = task.dataset("valid")
        sample = dataset.collater([dataset[number]])
        with torch.no_grad(), collect_decisions() as decisions:
            model(**sample["net_input"])
        for name, decision in decisions:
            entry = found.setdefault(name, {"instances": 0, "entropy": 0.0, "counts": [0] * 8})
            for row in decision.probs.tolist():
                entry["instances"] += 1
                entry["entropy"] -= sum(g * math.log(g) for g in row if g > 0)
                entry["counts"][row.index(max(row))] += 1
    return found


def check_against_the_loop(uses, literal):
    assert [use.name for use in uses] == list(literal)
    for use in uses:
        expected = literal[use.name]
        assert use.instances == expected["instances"]
        assert use.entropy == pytest.approx(expected["entropy"] / use.instances, rel=1e-4)
        assert use.counts.tolist() == expected["counts"]
        assert use.entropy < 0.95 * use.uniform_entropy  # gates that prefer nobody would show nothing
        assert sum(use.shares) == pytest.approx(1)


@pytest.mark.parametrize("max_tokens", [12, 4000])
def test_batches_with_padding_count_as_a_loop_over_single_sentences(mae, toy_data, max_tokens):
    uses = measure_gates(mae, toy_data, max_tokens=max_tokens, cpu=True)
    assert [use.name for use in uses] == MODULES
    check_against_the_loop(uses, literal_counts(mae, toy_data))
    lines = (toy_data.parent / "valid.en").read_text().splitlines()
    assert [use.instances for use in uses[:2]] == [len(lines)] * 2
    assert {use.instances for use in uses[2:]} == {sum(len(line.split()) + 1 for line in lines)}
    assert [use.per_position for use in uses] == [False] * 2 + [True] * 4


def test_a_language_model_has_gates_for_each_position(text_data, save_model, tmp_path):
    path = save_model(text_data, tmp_path / "lm.pt", task="language_modeling", arch="mae_transformer_lm_base")
    uses = measure_gates(path, text_data, max_tokens=30, cpu=True)
    assert [use.name for use in uses] == ["decoder.layers.0.self_attn", "decoder.layers.1.self_attn"]
    check_against_the_loop(uses, literal_counts(path, text_data))


def test_uniform_gates_have_the_greatest_entropy_and_no_favourites(uniform_mae, toy_data, tmp_path, capsys):
    uses = measure_gates(uniform_mae, toy_data, cpu=True)
    assert [use.entropy for use in uses] == pytest.approx([math.log(8)] * 6)
    assert all(use.shares is None for use in uses)
    flags = ["--data", str(toy_data), "--output", str(tmp_path / "gates.png"), "--cpu"]
    assert main(["analyze", "gates", str(uniform_mae), *flags]) == 0
    assert "instances are attributed to none" in capsys.readouterr().out
    assert (tmp_path / "gates.png").read_bytes().startswith(b"\x89PNG")


def test_untrained_gates_are_those_of_a_fresh_model_on_the_same_inputs(mae, toy_data, tmp_path, capsys):
    """Far from uniform before; almost uniform with the weights that a new gate begins with."""
    trained = measure_gates(mae, toy_data, cpu=True)
    fresh, again, other = (measure_gates(mae, toy_data, cpu=True, untrained=seed) for seed in (1, 1, 2))
    assert [use.entropy for use in fresh] == [use.entropy for use in again] != [use.entropy for use in other]
    assert [use.instances for use in fresh] == [use.instances for use in trained]
    for one, initial in zip(trained, fresh):
        assert one.entropy < 0.9 * one.uniform_entropy < 0.95 * one.uniform_entropy < initial.entropy
    flags = ["--data", str(toy_data), "--output", str(tmp_path / "gates.png"), "--cpu", "--untrained", "1"]
    assert main(["analyze", "gates", str(mae), *flags, "--json", str(tmp_path / "gates.json")]) == 0
    assert "gates' weights were drawn anew with seed 1" in capsys.readouterr().out
    report = json.loads((tmp_path / "gates.json").read_text())
    assert report["untrained_seed"] == 1
    assert report["modules"][0]["entropy"] == pytest.approx(fresh[0].entropy)


def test_means_are_over_the_modules_of_a_kind():
    def use(name, entropy):
        return GateUse(name, 8, False, instances=2, total_entropy=2 * entropy)

    uses = [use("encoder.layers.0.self_attn", 1.0), use("encoder.layers.1.self_attn", 2.0)]
    uses += [use("decoder.layers.0.encoder_attn", 0.5)]
    means = mean_entropies(uses)
    assert list(means) == ["encoder self-attention", "decoder cross-attention", "all"]
    assert means["encoder self-attention"]["entropy"] == 1.5
    assert means["all"]["entropy"] == pytest.approx(3.5 / 3)
    assert means["all"]["uniform_entropy"] == pytest.approx(math.log(8))


def test_command_writes_picture_and_numbers(mae, toy_data, make_run, tmp_path, capsys):
    picture, numbers = tmp_path / "gates.png", tmp_path / "gates.json"
    run = make_run(mae)
    assert (
        main(["analyze", "gates", str(run), "--output", str(picture), "--json", str(numbers), "--cpu"]) == 0
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(numbers.read_text())
    printed = capsys.readouterr().out
    assert report["subset"] == "valid" and [row["name"] for row in report["modules"]] == MODULES
    assert f"{report['means']['all']['entropy']:9.4f}" in printed and "20 sequences" in printed
    assert main(["analyze", "gates", str(run), "--output", "gates.pdf"]) == 2
    assert "must end in .png" in capsys.readouterr().err


def test_a_model_without_such_gates_is_told_so(toy_checkpoint, toy_data):
    with pytest.raises(UserError, match=r"no gates of MAE.*expert-load"):
        measure_gates(toy_checkpoint, toy_data, cpu=True)
