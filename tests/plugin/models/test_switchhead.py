"""SwitchHead in fairseq's models: costs by hand, translation, a masked LM with sigma-MoE.

test_compare.py holds parameters and costs against every row of the paper.
"""

import pytest
import torch
from whole_models import build

from moa_fairseq.experiments.scoring.complexity import complexity
from moa_fairseq.experiments.scoring.meta_model import build_meta_model
from moa_fairseq.layers.sigma_moe import SigmaMoE
from moa_fairseq.plugin.forward_context import collect_routings


def test_settings_without_a_formula_print_none():
    flags = ["--switchhead-experts", "vkqo"]
    assert (
        complexity("switchhead_lm_47m", 100, 8, 8, model_flags=flags).switchhead_layer is None
    )
    assert complexity("moa_transformer_tiny").switchhead_layer is None
    assert (
        complexity(
            "moa_lm_47m", 100, 8, 8, model_flags=["--positions", "rope"]
        ).switchhead_layer
        is None
    )


def test_parts_of_switchall_add_up():
    model = build_meta_model("switchall_lm_tiny", 100)
    cost = complexity("switchall_lm_tiny", 100, 7, 7)
    layers = 4
    C = 160
    H = 2
    D = 30
    E = 5
    k = 2
    T = 7
    assert cost.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    for arch in (
        "switchall_lm_tiny",
        "switchhead_rope_lm_45m",
        "transformer_xl_lm_tiny",
        "moa_lm_tiny",
    ):
        other = complexity(arch, 100, 7, 7)
        assert other.not_counted == [] and other.parameters["other"] == 0
    assert cost.macs["feed_forward"] == layers * T * 2 * C * 4 * 40
    assert cost.macs["router"] == layers * (T * C * (16 + H * E) + 2 * T * C * H * E)
    projections = C * H * D * (T + 2 * T + k * (2 * T + T))  # queries, keys; values, output
    distances = T + 2 * T - 1
    assert cost.macs["decoder_self_attention"] == layers * (projections + distances * C * H * D)
    assert cost.macs["attention_matmul"] == layers * H * D * T * (2 * 2 * T + distances)


def test_translation_architectures_match_the_dense_parameters():
    for arch, dense in (("base", "transformer"), ("tiny", "mae_transformer_tiny")):
        model = build_meta_model(f"switchhead_transformer_{arch}", 1000)
        other = build_meta_model(dense, 1000)
        attention, dense_attention = (
            sum(
                p.numel()
                for n, p in found.named_parameters()
                if "attn." in n and "gate" not in n
            )
            for found in (model, other)
        )
        assert attention == pytest.approx(dense_attention, rel=0.02)


def test_cross_attention_decides_about_source_and_target_and_ignores_padding():
    flags = ("--encoder-layers", 1, "--decoder-layers", 1, "--switchhead-experts", "vkqo")
    model = build("switchhead_transformer_tiny", *flags).eval()
    source = torch.randint(4, 30, (2, 6))
    source[1, 4:] = 1
    target = torch.randint(4, 30, (2, 5))
    with collect_routings() as decisions:
        out, _ = model(source, torch.tensor([6, 4]), target)
    named = dict(decisions)
    assert list(named) == [
        "encoder.layers.0.self_attn",
        "encoder.layers.0.self_attn.keys",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.self_attn.keys",
        "decoder.layers.0.encoder_attn",
        "decoder.layers.0.encoder_attn.keys",
    ]
    assert named["decoder.layers.0.encoder_attn.keys"].padding.sum() == 2
    assert len(named["decoder.layers.0.encoder_attn"].gates) == 10
    shorter, _ = model(source[1:, :4], torch.tensor([4]), target[1:])
    torch.testing.assert_close(shorter[0], out[1], rtol=1e-4, atol=1e-5)


def test_masked_language_model_with_sigma_moe_keeps_its_initialisation(monkeypatch):
    model = build_meta_model(
        "moa_roberta_tiny", 60, model_flags=["--sigma-moe-num-experts", "4"]
    )
    mixture = model.encoder.sentence_encoder.layers[0].fc1
    assert (
        isinstance(mixture, SigmaMoE)
        and mixture.name == "encoder.sentence_encoder.layers.0.fc1"
    )
    calls = []
    monkeypatch.setattr(
        type(mixture), "restore_initialization", lambda self: calls.append(self)
    )
    build_meta_model("moa_roberta_tiny", 60, model_flags=["--sigma-moe-num-experts", "4"])
    assert len(calls) == 4  # RoBERTa draws every linear layer anew, the router's too
