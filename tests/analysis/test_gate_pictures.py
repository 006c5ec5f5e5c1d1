"""What stands in the picture of the gates."""

import pytest
import torch

from moa_fairseq.analysis.gates import GateUse, draw_gates


def use(name, entropy, counts=None):
    counts = None if counts is None else torch.tensor(counts)
    size = 4 if counts is None else counts.numel()
    return GateUse(name, size, False, instances=1, total_entropy=entropy, counts=counts)


def test_entropies_per_layer_and_one_map_per_kind():
    uses = [use("encoder.layers.0.self_attn", 1.0, [1, 3, 0, 0])]
    uses += [
        use("encoder.layers.1.self_attn", 1.2, [1, 1, 1, 1]),
        use("decoder.layers.0.self_attn", 0.4, [4, 0, 0, 0]),
    ]
    figure = draw_gates(uses, "title")
    entropies, encoder, decoder, _ = figure.axes
    assert list(entropies.get_lines()[0].get_ydata()) == [1.0, 1.2]
    assert list(entropies.get_lines()[1].get_ydata()) == [0.4]
    assert entropies.get_lines()[2].get_ydata()[0] == pytest.approx(1.386, abs=1e-3)
    assert encoder.get_images()[0].get_array().tolist() == [[0.25, 0.75, 0, 0], [0.25] * 4]
    assert decoder.get_title() == "decoder self-attention"
    assert {image.get_clim() for panel in (encoder, decoder) for image in panel.get_images()} == {(0.0, 1.0)}
    assert [text.get_text() for text in encoder.texts[:3]] == ["25", "75", "0"]


def test_uniform_gates_have_no_map_and_many_experts_no_numbers():
    assert len(draw_gates([use("encoder.layers.0.self_attn", 1.386)]).axes) == 1
    many = draw_gates([use("encoder.layers.0.self_attn", 3.0, [1] * 28)])
    assert not many.axes[1].texts
