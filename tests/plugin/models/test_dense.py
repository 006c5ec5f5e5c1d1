"""Dense models with the controls of a study, against fairseq's own models and float64 loops."""

import argparse

import pytest
import torch
from whole_models import PAD, batch, build, settings

from moa_fairseq.experiments.scoring.complexity import complexity
from moa_fairseq.layers import Attention
from moa_fairseq.plugin.families import set_defaults

TINY = ["--encoder-layers", "4", "--decoder-layers", "4", "--encoder-embed-dim", "128"]
TINY += [
    "--encoder-ffn-embed-dim",
    "256",
    "--decoder-ffn-embed-dim",
    "256",
    "--decoder-embed-dim",
    "128",
]
TINY += ["--encoder-attention-heads", "4", "--decoder-attention-heads", "4"]


SMALL_LM = ["--decoder-layers", 2, "--decoder-embed-dim", 32, "--decoder-attention-heads", 4]
SMALL_LM += ["--decoder-ffn-embed-dim", 64, "--activation-fn", "gelu"]
NORMS = ["--encoder-normalize-before", "--decoder-normalize-before"]


@pytest.mark.parametrize(
    "arch, fairseqs, flags, size",
    [
        ("dense_transformer_tiny", "transformer", [], TINY),
        ("dense_transformer_tiny", "transformer", NORMS, TINY),
        ("dense_roberta_tiny", "roberta_tiny", [], []),
        ("dense_transformer_lm_base", "transformer_lm_gpt", SMALL_LM, []),
    ],
)
def test_it_is_fairseqs_model_by_its_weights(arch, fairseqs, flags, size):
    ours = build(arch, *flags)
    theirs = build(fairseqs, *size, *flags)
    ours.load_state_dict(theirs.state_dict())
    inputs = batch(fairseqs)
    real = inputs.get("prev_output_tokens", inputs["src_tokens"]).ne(PAD)
    outputs = [model.eval()(**inputs)[0][real] for model in (ours, theirs)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_cross_self_attention_leaves_out_the_sources_padding(padded):
    flags = ["--cross-self-attention", "--no-cross-attention"]
    ours = build("dense_transformer_tiny", *flags)
    theirs = build("transformer", *TINY, *flags)
    ours.load_state_dict(theirs.state_dict())
    inputs = batch("transformer", (7, 4 if padded else 7, 7))
    assert (
        inputs["src_tokens"].eq(PAD).any()
        and inputs["prev_output_tokens"].eq(PAD).any() == padded
    )
    real = inputs["prev_output_tokens"].ne(PAD)
    outputs = [model.double().eval()(**inputs)[0][real] for model in (ours, theirs)]
    torch.testing.assert_close(*outputs, rtol=1e-11, atol=1e-11)


def test_a_decoder_without_cross_attention_has_none():
    model = build("moa_transformer_tiny", "--no-cross-attention")
    assert {layer.encoder_attn for layer in model.decoder.layers} == {None}


@pytest.mark.parametrize(
    ("arch", "fairseqs"),
    [
        ("dense_transformer_base", "transformer"),
        ("dense_transformer_big", "transformer_vaswani_wmt_en_de_big"),
        ("dense_transformer_lm_wiki103", "transformer_lm_wiki103"),
    ],
)
def test_sizes_are_those_of_fairseqs_architecture(arch, fairseqs):
    ours, theirs = (vars(settings(each)) for each in (arch, fairseqs))
    names = [name for name in theirs if name.endswith(("_dim", "_layers", "_heads", "dropout"))]
    assert len(names) > 5
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


def test_gated_feed_forwards_and_rms_norms():
    flags = (*SMALL_LM, "--gated-feed-forward", "--rms-norm")
    model = build("dense_transformer_lm_base", *flags).double().eval()
    assert not any(
        "layer_norm" in name and name.endswith("bias") for name, _ in model.named_parameters()
    )
    layer = model.decoder.layers[0]
    x = torch.randn(5, 2, 32, dtype=torch.float64)
    for norm in (layer.self_attn_layer_norm, layer.final_layer_norm, model.decoder.layer_norm):
        torch.nn.init.normal_(norm.weight)
        exact = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
        torch.testing.assert_close(norm(x), exact)
    w1, w3 = layer.fc1.weight.split(64)
    seen = []
    layer.fc2.register_forward_hook(
        lambda module, inputs, output: seen.append((inputs[0], output))
    )
    layer.final_layer_norm.register_forward_hook(
        lambda module, inputs, output: seen.append(output)
    )
    model(**batch("transformer_lm_gpt"))
    normed, (inner, out) = seen
    gate = normed @ w1.t()
    value = normed @ w3.t()
    torch.testing.assert_close(inner, gate * torch.sigmoid(gate) * value)
    torch.testing.assert_close(out, inner @ layer.fc2.weight.t())


def attentions_of(model):
    return [module for module in model.modules() if isinstance(module, Attention)]


def branch_of(attention):
    module = attention.out_experts if hasattr(attention, "out_experts") else attention.out_proj
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize(
    "arch, attentions",
    [
        ("dense_transformer_tiny", 12),
        ("moa_transformer_tiny", 12),
        ("moh_transformer_tiny", 12),
        ("switchhead_transformer_tiny", 12),
        ("dense_roberta_tiny", 4),
        ("moa_roberta_tiny", 4),
        ("switchhead_roberta_listops", 6),
        ("transformer_xl_lm_tiny", 4),
        ("moa_lm_tiny", 4),
        ("latent_transformer_lm_base", 6),
    ],
)
def test_the_branch_of_every_attention_starts_smaller_and_nothing_else_does(arch, attentions):
    plain = build(arch)
    small = build(arch, "--attention-branch-scale", 0.25)
    scaled = set()
    for one, other in zip(attentions_of(plain), attentions_of(small)):
        for before, after in zip(branch_of(one), branch_of(other)):
            torch.testing.assert_close(after, before / 4, rtol=0, atol=0)
        output = "out_experts" if hasattr(one, "out_experts") else "out_proj"
        scaled |= {
            f"{one.name}.{output}.{name}" for name, _ in getattr(one, output).named_parameters()
        }
    assert len({name.rsplit(".", 2)[0] for name in scaled}) == attentions
    rest = [
        {k: v for k, v in m.state_dict().items() if k not in scaled} for m in (plain, small)
    ]
    torch.testing.assert_close(*rest, rtol=0, atol=0)
    small.load_state_dict(plain.state_dict())  # a checkpoint's values stay as they are
    torch.testing.assert_close(small.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_equal_macs_and_equal_parameters_are_settings_of_one_architecture():
    moa = complexity("moa_transformer_tiny")
    macs = complexity("dense_transformer_tiny", model_flags=["--attention-head-dim", "31"])
    same = complexity("dense_transformer_tiny", model_flags=["--attention-head-dim", "54"])
    assert macs.total_macs == pytest.approx(moa.total_macs, rel=0.01)
    assert same.total_parameters == pytest.approx(moa.total_parameters, rel=0.01)


def test_a_post_norm_language_model_stays_one_and_its_context_is_not_normalised():
    """fairseq's architectures of language models switch pre-norm on; a setting that says no is kept."""
    args = settings("transformer_xl_lm_tiny")
    args.decoder_normalize_before = False
    model = build("transformer_xl_lm_tiny", args=args).eval()
    assert not any(layer.normalize_before for layer in model.decoder.layers)
    for name, parameter in model.named_parameters():
        if name.endswith("layer_norm.weight"):
            torch.nn.init.normal_(parameter)  # a norm too many shows
    tokens = torch.randint(4, 40, (2, 9))
    whole, _ = model(tokens)
    model.decoder.carry_context(3)
    parts = [model(tokens[:, 3 * i : 3 * i + 3], chunk=i)[0] for i in range(3)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_a_default_stands_in_for_what_is_missing_or_null():
    args = argparse.Namespace(dropout=None, layers=0)
    set_defaults(args, {"dropout": 0.1, "layers": 6, "heads": 8})
    assert vars(args) == {"dropout": 0.1, "layers": 0, "heads": 8}
