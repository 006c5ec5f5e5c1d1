"""SwitchHead in fairseq's models: printed parameters and costs, translation, a masked LM with sigma-MoE."""

import pytest
import torch
from whole_models import build

from moa_fairseq.attention.collector import collect_decisions
from moa_fairseq.evaluation.complexity import complexity
from moa_fairseq.evaluation.skeleton import build_skeleton

# arch → (parameters in millions as printed, symbols of the text, tokens of a chunk)
PRINTED = {
    "switchhead_lm_47m": (47, 8000, 256),
    "transformer_xl_lm_47m": (47, 8000, 256),
    "moa_lm_47m": (47, 8000, 256),
    "switchall_lm_47m": (47, 8000, 256),
    "switchhead_lm_262m": (262, 8000, 512),
    "switchhead_lm_262m_h4": (262, 8000, 512),
    "transformer_xl_lm_262m": (262, 8000, 512),
    "moa_lm_262m": (262, 8000, 512),
    "switchall_lm_259m": (259, 8000, 512),
    "switchhead_lm_enwik8": (41, 208, 512),
    "transformer_xl_lm_enwik8": (41, 208, 512),
    "switchhead_rope_lm_45m": (45, 8000, 512),
    "transformer_rope_lm_45m": (45, 8000, 512),
    "switchhead_rope_lm_243m": (243, 8000, 1024),
    "transformer_rope_lm_244m": (244, 8000, 1024),
}
HEADS = "--switchhead-heads {} --expert-dim {}"
MILLION, BILLION = 1e6, 1e9
# SwitchHead Tables 1-3 and 7: arch, flags → MACs and stored numbers of one attention layer, as printed
COSTS = [
    ("switchhead_lm_47m", "", "170.4M", "0.8M"),
    ("switchhead_lm_47m", "--experts-per-token 3", "203M", "0.8M"),
    ("switchall_lm_47m", "", "170M", "0.8M"),
    ("switchall_lm_47m", "--experts-per-token 3", "202M", "0.8M"),
    ("transformer_xl_lm_47m", "", "453.4M", "3.5M"),
    ("transformer_xl_lm_47m", HEADS.format(2, 205), "453M", "1.4M"),
    ("moa_lm_47m", "--experts-per-token 2", "140.1M", "0.7M"),
    ("moa_lm_47m", "", "223.5M", "1.3M"),
    ("moa_lm_47m", "--experts-per-token 6", "306.8M", "1.9M"),
    ("moa_lm_47m", "--experts-per-token 8", "390.2M", "2.6M"),
    ("switchhead_lm_262m", "", "2.0G", "2.9M"),
    ("switchhead_lm_262m_h4", "", "2.4G", "5.6M"),
    ("switchall_lm_259m", "", "2.4G", "5.6M"),
    ("transformer_xl_lm_262m", "", "5.4G", "21.0M"),
    ("transformer_xl_lm_262m", HEADS.format(4, 256), "5.4G", "8.4M"),
    ("transformer_xl_lm_262m", HEADS.format(2, 512), "5.4G", "6.3M"),
    ("moa_lm_262m", "--experts-per-token 2", "1.1G", "2.7M"),
    ("moa_lm_262m", "--experts-per-token 4", "1.7G", "5.1M"),
    ("moa_lm_262m", "", "2.9G", "9.9M"),
    ("moa_lm_262m", "--experts-per-token 12", "4.1G", "14.7M"),
    ("switchhead_lm_enwik8", "", "709M", "2.8M"),
    ("transformer_xl_lm_enwik8", "", "1.6G", "10M"),
    ("transformer_xl_lm_enwik8", HEADS.format(2, 256), "1.6G", "4.2M"),
    ("switchhead_rope_lm_45m", "", "285.6M", "1.3M"),
    ("transformer_rope_lm_45m", "", "560.9M", "6.1M"),
    ("transformer_rope_lm_45m", HEADS.format(2, 205), "560.9M", "1.9M"),
    ("transformer_rope_lm_244m", "", "6.4G", "37.7M"),
    ("transformer_rope_lm_244m", HEADS.format(2, 512), "6.4G", "8.4M"),
]


@pytest.mark.parametrize("arch", PRINTED)
def test_the_papers_parameters(arch):
    printed, vocab, length = PRINTED[arch]
    cost = complexity(arch, vocab, length, length)
    assert abs(cost.total_parameters / MILLION - printed) <= max(0.01 * printed, 0.51)  # 45M is 44.50M
    assert cost.not_counted == [] and cost.parameters["other"] == 0


def near(number, printed):
    """Within one unit of the last printed digit (some of the prints are cut off, not rounded) or 1 %."""
    digits, unit = printed[:-1], {"M": MILLION, "G": BILLION}[printed[-1]]
    last = 10.0 ** -len(digits.partition(".")[2])
    return abs(number / unit - float(digits)) <= max(0.01 * float(digits), 1.001 * last)


@pytest.mark.parametrize(("arch", "flags", "macs", "floats"), COSTS)
def test_the_papers_macs_and_memory(arch, flags, macs, floats):
    _, vocab, length = PRINTED[arch]
    layer = complexity(arch, vocab, length, length, model_flags=flags.split()).layer
    assert near(layer["macs"], macs) and near(layer["floats"], floats)


def test_settings_without_a_formula_print_none():
    flags = ["--switchhead-experts", "vkqo"]
    assert complexity("switchhead_lm_47m", 100, 8, 8, model_flags=flags).layer is None
    assert complexity("moa_transformer_tiny").layer is None
    assert complexity("moa_lm_47m", 100, 8, 8, model_flags=["--positions", "rope"]).layer is None


def test_parts_of_switchall_add_up():
    model = build_skeleton("switchall_lm_tiny", 100)
    cost = complexity("switchall_lm_tiny", 100, 7, 7)
    layers, C, H, D, E, k, T = 4, 160, 2, 30, 5, 2, 7
    assert cost.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert cost.macs["feed_forward"] == layers * T * 2 * C * 4 * 40
    assert cost.macs["router"] == layers * (T * C * (16 + H * E) + 2 * T * C * H * E)
    projections = C * H * D * (T + 2 * T + k * (2 * T + T))  # queries, keys; values, output
    distances = T + 2 * T - 1
    assert cost.macs["decoder_self_attention"] == layers * (projections + distances * C * H * D)
    assert cost.macs["attention_matmul"] == layers * H * D * T * (2 * 2 * T + distances)


def test_translation_architectures_match_the_dense_parameters():
    for arch, dense in (("base", "transformer"), ("tiny", "mae_transformer_tiny")):
        model = build_skeleton(f"switchhead_transformer_{arch}", 1000)
        other = build_skeleton(dense, 1000)
        attention, dense_attention = (
            sum(p.numel() for n, p in found.named_parameters() if "attn." in n and "gate" not in n)
            for found in (model, other)
        )
        assert attention == pytest.approx(dense_attention, rel=0.02)


def test_cross_attention_decides_about_source_and_target_and_ignores_padding():
    flags = ("--encoder-layers", 1, "--decoder-layers", 1, "--switchhead-experts", "vkqo")
    model = build("switchhead_transformer_tiny", *flags).eval()
    source = torch.randint(4, 30, (2, 6))
    source[1, 4:] = 1
    target = torch.randint(4, 30, (2, 5))
    with collect_decisions() as decisions:
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
    assert named["decoder.layers.0.encoder_attn.keys"].padding_mask.sum() == 2
    assert len(named["decoder.layers.0.encoder_attn"].gate) == 10
    shorter, _ = model(source[1:, :4], torch.tensor([4]), target[1:])
    torch.testing.assert_close(shorter[0], out[1], rtol=1e-4, atol=1e-5)


def test_masked_language_model_with_sigma_moe_keeps_its_initialisation(monkeypatch):
    model = build_skeleton("moa_roberta_tiny", 60, model_flags=["--sigma-moe-num-experts", "4"])
    mixture = model.encoder.sentence_encoder.layers[0].fc1
    assert type(mixture).__name__ == "SigmaMoE" and mixture.name == "encoder.sentence_encoder.layers.0.fc1"
    calls = []
    monkeypatch.setattr(type(mixture), "restore_initialization", lambda self: calls.append(self))
    build_skeleton("moa_roberta_tiny", 60, model_flags=["--sigma-moe-num-experts", "4"])
    assert len(calls) == 4  # RoBERTa draws every linear layer anew, the router's too
