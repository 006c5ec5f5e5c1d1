"""Attention maps of one sentence: whole rows of weights, gates where a token chose, and a picture."""

import json

import pytest
import torch
from matplotlib.image import imread

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.attention_maps import draw_heads, measure_attention
from moa_fairseq.experiments.scoring.trained_model import load_trained
from moa_fairseq.layers import Attention


@pytest.fixture(scope="module")
def loaded(toy_checkpoint, toy_data):
    return load_trained(toy_checkpoint, toy_data)


def test_every_module_shows_rows_that_add_up_and_the_gates_of_chosen_experts(loaded):
    model, task = loaded
    maps = measure_attention(model, task, "valid", 1, torch.device("cpu"))
    names = [name for name, module in model.named_modules() if isinstance(module, Attention)]
    assert {each.name for each in maps} == set(names) and {each.layer for each in maps} == {1}
    item = task.dataset("valid")[1]
    source = [task.source_dictionary[index] for index in item["source"].tolist()]
    for each in maps:
        heads, queries, keys = each.weights.shape
        assert (len(each.queries), len(each.keys)) == (queries, keys)
        torch.testing.assert_close(each.weights.sum(2), torch.ones(heads, queries))
        assert (each.gates["queries"] > 0).sum(0).tolist() == [
            heads
        ] * queries  # MoA: a slot for each choice
        if each.kind != "decoder self-attention":
            assert each.keys == source
        else:
            future = torch.ones(queries, keys).triu(1).bool()
            assert (each.weights[:, future] == 0).all()
            assert each.queries[0] == "</s>" and each.queries == each.keys


def test_a_map_is_what_the_module_computes(loaded):
    model, task = loaded
    attention = model.encoder.layers[0].self_attn
    seen = []
    hook = attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    first = measure_attention(model, task, "valid", 0, torch.device("cpu"))[0]
    hook.remove()
    with torch.no_grad():
        weights = attention(**{**seen[0], "need_head_weights": True})[1]
    torch.testing.assert_close(first.weights, weights[:, 0])


@pytest.mark.thorough(keep="shared1")
@pytest.mark.parametrize("shared", [(), ("--switchhead-shared-selection",)])
def test_both_sides_of_switchhead_show_their_experts(save_model, toy_data, tmp_path, shared):
    sizes = ("--encoder-layers", "1", "--decoder-layers", "1", "--num-experts", "3")
    more = (*sizes, "--experts-per-token", "2", *shared)
    path = save_model(
        toy_data, tmp_path / "model.pt", *more, arch="switchhead_transformer_tiny"
    )
    maps = measure_attention(*load_trained(path, toy_data), "valid", 1, torch.device("cpu"))
    assert len(maps) == 3
    for each in maps:
        for side, tokens in (("queries", each.queries), ("keys", each.keys)):
            assert each.gates[side].shape == (each.groups * 3, len(tokens))
            assert (each.gates[side] > 0).sum(0).tolist() == [each.groups * 2] * len(tokens)
    draw_heads(maps).savefig(tmp_path / "heads.png")


def command_of(checkpoint, data):
    return f"analyze attention-maps {checkpoint} --data {data} --cpu".split()


@pytest.mark.thorough
def test_pictures_and_numbers_of_the_command(toy_checkpoint, toy_data, tmp_path, capsys):
    command = command_of(toy_checkpoint, toy_data)
    for more in ([], ["--layer", "1", "--sentence", "3"]):
        picture = tmp_path / f"{len(more)}.png"
        numbers = tmp_path / f"{len(more)}.json"
        assert main([*command, *more, "--output", str(picture), "--json", str(numbers)]) == 0
        assert imread(picture).std() > 0.01
        modules = json.loads(numbers.read_text())["modules"]
        assert len(modules) == 3
    assert "decoder.layers.0.encoder_attn: 4 maps of" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--sentence", "100000"], "has sentences 0 to"),
        (["--layer", "9"], "layers 1 to 1"),
        (["--subset", "no"], "no"),
    ],
)
def test_what_is_not_there_is_named(toy_checkpoint, toy_data, tmp_path, flags, message, capsys):
    command = command_of(toy_checkpoint, toy_data)
    with pytest.raises((UserError, SystemExit)):
        raise SystemExit(main([*command, *flags, "--output", str(tmp_path / "a.png")]))
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()
