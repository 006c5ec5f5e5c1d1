"""How SwitchHead's language models, and those beside them, start; what older weights compute."""

import math

import pytest
import torch
import whole_models

from moa_fairseq.experiments.scoring.meta_model import build_meta_model
from moa_fairseq.layers.routers import TopKRouter
from moa_fairseq.layers.sigma_moe import SigmaMoE
from moa_fairseq.layers.sigmoid_router import SigmoidTopKRouter

TINY = ["--decoder-layers", "2", "--decoder-embed-dim", "96", "--decoder-ffn-embed-dim", "384"]
HEADS = {
    "switchhead_lm_47m": (2, 76),
    "switchhead_rope_lm_45m": (2, 64),
    "transformer_xl_lm_47m": (10, 41),
}
HEADS.update(
    {"transformer_rope_lm_45m": (10, 41), "moa_lm_47m": (4, 88), "switchall_lm_47m": (2, 76)}
)
TOKENS = torch.arange(4, 204).view(4, 50)


def build(arch, *flags, args=None):
    return whole_models.build(arch, *flags, args=args, symbols=204, seed=1)


def first_input(model):
    """What enters the first layer."""
    seen = []
    hook = model.decoder.layers[0].register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    model.eval()(TOKENS)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("arch", HEADS)
def test_every_matrix_starts_by_its_fan_in_and_the_number_of_layers(arch):
    """SwitchHead's authors: √(2/n) / √fan-in, whatever the attention; embeddings enter at 1/√C."""
    model = build(
        arch, *TINY, "--decoder-layers", "3"
    )  # of two layers √(2/n) and 2/n are both 1
    width, (heads, dim) = 96, HEADS[arch]
    scale = math.sqrt(2 / 3)
    fan_in = {
        "out_proj": heads * dim,
        "out_experts": heads * dim,
        "fc2": 384,
        "fc1.down": 16 * 128,
    }
    checked = 0
    for name, weight in model.decoder.layers.named_parameters():
        if "layer_norm" in name:
            continue
        if weight.dim() == 1 or name.endswith("_bias"):
            assert (weight == 0).all(), name
            continue
        inputs = next(
            (number for part, number in fan_in.items() if f"{part}.weight" in name), width
        )
        assert weight.std().item() == pytest.approx(scale / math.sqrt(inputs), rel=0.05), name
        checked += 1
    assert checked >= 2 * 6
    for module in model.modules():
        if isinstance(module, (TopKRouter, SigmoidTopKRouter)):
            lengths = module.projection.weight.norm(dim=1)
            torch.testing.assert_close(lengths, torch.full_like(lengths, scale))
    entering = first_input(model).pow(2).mean().sqrt().item()
    assert entering == pytest.approx(1 / math.sqrt(width), rel=0.05)
    output = model.decoder.output_projection.weight
    assert output.std().item() == pytest.approx(1 / math.sqrt(3 * width), rel=0.05)


LM = ("--decoder-layers", 2, "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64)
LM += ("--decoder-attention-heads", 4, "--positions", "sinusoidal")
LM += ("--activation-fn", "relu", "--share-decoder-input-output-embed")


OTHERS = [
    "moa_lm_tiny",
    "switchhead_lm_tiny",
    "moh_transformer_lm_base",
    "mae_transformer_lm_base",
]
OTHERS += ["gqe_lm_base", "namoh_lm_base", "latent_transformer_lm_base"]


@pytest.mark.parametrize(
    "arch, start",
    [
        *[(arch, start) for arch in OTHERS for start in ("own", "depth-scaled")],
        *[
            (f"{family}_transformer_tiny", None)
            for family in ("moa", "mae", "moh", "switchhead")
        ],
    ],
)
def test_models_of_one_seed_start_alike_outside_their_attention(arch, start):
    dense = "dense_transformer_tiny"
    flags = ()
    few = ()
    if start is not None:
        dense = "dense_transformer_lm_base"
        flags = (*LM, "--initialization", start)
        few = ("--experts-per-token", 1) if arch.startswith("moh") else ()
    one, other = (
        whole_models.build(*words).state_dict()
        for words in ((dense, *flags), (arch, *flags, *few))
    )
    shared = {name for name in one if "_attn." not in name}
    assert shared <= other.keys() and any("fc2" in name for name in shared)
    for name in shared:
        torch.testing.assert_close(other[name], one[name], rtol=0, atol=0)


@pytest.mark.parametrize("start", ["own", "depth-scaled"])
def test_gates_of_heads_start_even(start):
    model = build(
        "dense_transformer_lm_base", *LM, "--initialization", start, "--head-gate", "element"
    )
    gates = [value for name, value in model.named_parameters() if "head_gate" in name]
    assert len(gates) == 2 and not any(gate.any() for gate in gates)


def test_a_flag_gives_each_module_its_own_start():
    model = build("moa_lm_47m", *TINY, "--initialization", "own")
    assert model.decoder.layers[0].fc1.bias.std() > 0.01
    keys = model.decoder.layers[0].self_attn.k_proj.weight  # Xavier with a gain of 1/√2
    assert keys.std().item() == pytest.approx(1 / math.sqrt(96 + 88), rel=0.05)


@pytest.mark.parametrize(
    ("arch", "dropout"),
    [
        ("switchall_lm_tiny", 0.1),
        ("switchall_lm_47m", 0.1),
        ("switchall_lm_259m", 0.2),
        ("switchhead_lm_262m", 0.2),
        ("moa_lm_47m", 0.1),
    ],
)
def test_embeddings_residuals_and_output_have_the_authors_dropout(arch, dropout):
    decoder = build_meta_model(arch, 100).decoder
    assert decoder.dropout_module.p == decoder.output_dropout_module.p == dropout
    for layer in decoder.layers:
        assert layer.dropout_module.p == dropout
        inner = getattr(layer.activation_dropout_module, "p", None)
        assert inner == (None if isinstance(layer.fc1, SigmaMoE) else dropout)


def test_only_the_259m_switchall_drops_experts_of_its_attention():
    for arch, dropout in (
        ("switchall_lm_259m", 0.1),
        ("switchhead_lm_262m", 0.0),
        ("switchall_lm_47m", 0.0),
    ):
        for layer in build_meta_model(arch, 100).decoder.layers:
            routers = (layer.self_attn.router, layer.self_attn.source_router)
            assert [router.expert_dropout for router in routers] == [dropout, dropout]


def test_output_dropout_drops_what_the_vocabulary_sees():
    model = build("switchhead_lm_tiny", "--dropout", "0", "--output-dropout", "0.5")
    seen = []
    model.decoder.output_projection.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    model.train()(TOKENS)
    model.eval()(TOKENS)
    assert (seen[0] == 0).double().mean().item() == pytest.approx(0.5, abs=0.02)
    assert (seen[1] == 0).sum() == 0


def old_settings():
    """The settings that a checkpoint stored before there was an --initialization."""
    args = whole_models.settings("switchhead_lm_tiny")
    del args.initialization, args.output_dropout
    args.no_scale_embedding = False
    return args


def test_weights_from_before_there_was_a_choice_compute_as_they_did():
    old = build("switchhead_lm_tiny", args=old_settings())
    weights = old.state_dict()
    assert weights["decoder.version"].item() == 3
    entering = first_input(old)
    torch.testing.assert_close(entering.pow(2).mean().sqrt().item(), 1.0, rtol=0.05, atol=0)
    expected = old.eval()(TOKENS)[0]
    for args in (old_settings(), None):  # evaluation; training that goes on
        new = build("switchhead_lm_tiny", args=args)
        new.load_state_dict(weights, strict=True)
        torch.testing.assert_close(new.eval()(TOKENS)[0], expected)
    # And once more, from what the continued training saves.
    again = build("switchhead_lm_tiny")
    again.load_state_dict(new.state_dict(), strict=True)
    torch.testing.assert_close(again.eval()(TOKENS)[0], expected)


def test_weights_of_now_keep_their_scale():
    first, second = (build("switchhead_lm_tiny") for _ in range(2))
    second.load_state_dict(first.state_dict(), strict=True)
    assert second.decoder.embed_scale == 1
    torch.testing.assert_close(first_input(second), first_input(first))


def test_switchheads_own_start_is_the_papers_in_roberta_too():
    """BERT's initialisation draws every nn.Linear anew; the attention's is restored in all of its parts."""
    model = build("switchhead_roberta_listops", "--initialization", "own")
    for layer in model.encoder.sentence_encoder.layers:
        attention = layer.self_attn
        for projection, fan_in in (
            ("q_proj", 128),
            ("k_proj", 128),
            ("v_proj", 128),
            ("out_proj", 56),
        ):
            weight = getattr(attention, projection).weight
            assert weight.std().item() == pytest.approx(1 / math.sqrt(fan_in), rel=0.05), (
                projection
            )
        assert layer.fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)  # BERT's


def test_robertas_attention_starts_by_its_depth_where_it_should():
    layers = build(
        "switchhead_roberta_listops", "--initialization", "depth-scaled"
    ).encoder.sentence_encoder.layers
    assert len(layers) > 2
    for layer in layers:
        for projection, fan_in in (
            ("q_proj", 128),
            ("k_proj", 128),
            ("v_proj", 128),
            ("out_proj", 56),
        ):
            expected = math.sqrt(2 / len(layers)) / math.sqrt(fan_in)
            weight = getattr(layer.self_attn, projection).weight
            assert weight.std().item() == pytest.approx(expected, rel=0.05), projection


def test_listops_models_have_the_papers_activation():
    model = build("switchhead_roberta_listops")
    assert {layer.activation_fn for layer in model.encoder.sentence_encoder.layers} == {
        torch.relu
    } or all(
        layer.activation_fn is torch.nn.functional.relu
        for layer in model.encoder.sentence_encoder.layers
    )
