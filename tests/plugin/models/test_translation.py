"""The architectures: what they replace, what they are made of, what they refuse."""

import argparse

import pytest
import torch
from fairseq.data import Dictionary
from whole_models import PAD, assert_incremental_equals_full, batch, build

from moa_fairseq.errors import UserError
from moa_fairseq.layers.moa import MixtureOfAttention
from moa_fairseq.plugin.criterions.with_routing import (
    LabelSmoothedCrossEntropyWithRouting,
    LabelSmoothedCrossEntropyWithRoutingConfig,
)
from moa_fairseq.plugin.forward_context import collect_routings
from moa_fairseq.plugin.logged_values import mean_values

ARCH = "moa_transformer_tiny"


def test_every_attention_of_the_base_model_is_a_mixture():
    with torch.device("meta"):
        model = build("moa_transformer_base")
    mixtures = [m for m in model.modules() if isinstance(m, MixtureOfAttention)]
    assert len(mixtures) == 18
    assert not any(type(m).__name__ == "MultiheadAttention" for m in model.modules())
    assert {m.name for m in mixtures} >= {
        "encoder.layers.5.self_attn",
        "decoder.layers.0.encoder_attn",
    }
    assert all(not name.endswith("bias") for m in mixtures for name, _ in m.named_parameters())
    assert all(
        m.router.renormalize == "detached" and m.router.noise_projection is None
        for m in mixtures
    )
    assert model.encoder.layers[0].fc1.weight.shape == (2048, 512)


def test_flags_override_the_architecture():
    model = build(
        ARCH,
        *("--num-experts", 5, "--experts-per-token", 2, "--expert-dim", 16, "--expert-bias"),
        *("--routing-noise", "--router-renormalize", "none", "--expert-backend", "reference"),
    )
    attention = model.decoder.layers[1].encoder_attn
    assert (attention.num_experts, attention.experts_per_token, attention.expert_dim) == (
        5,
        2,
        16,
    )
    assert attention.q_experts.bias is not None and attention.k_proj.bias is not None
    assert (
        attention.router.renormalize == "none" and attention.router.noise_projection is not None
    )
    assert attention.q_experts.backend == "reference"


DENSE = "dense_transformer_tiny"


@pytest.mark.parametrize(
    "arch, flags, message",
    [
        (ARCH, ("--quant-noise-pq", 0.1), "--quant-noise-pq"),
        (ARCH, ("--offload-activations",), "--checkpoint-activations works"),
        (
            ARCH,
            ("--cross-self-attention", "--positions", "rope"),
            "--positions rope is for self-attention",
        ),
        ("moa_roberta_tiny", ("--mha-heads-to-keep", 2), "--mha-heads-to-keep"),
        ("mae_transformer_tiny", ("--mae-dropped-heads", 9), "--mae-dropped-heads 9"),
        (DENSE, ("--dropped-heads", 4), "--dropped-heads 4 .* 0 and 3"),
        (DENSE, ("--attention-head-dim", 0), "--attention-head-dim .*0"),
        (DENSE, ("--encoder-attention-heads", 3), "3 attention heads.*--attention-head-dim"),
        (
            "switchall_lm_tiny",
            ("--gated-feed-forward",),
            "--gated-feed-forward and --sigma-moe-num-experts",
        ),
        (DENSE, ("--window", 0), "--window 0"),
        (DENSE, ("--rope-base", 5e5), "--rope-base 500000.0 .*--positions rope"),
        (
            ARCH,
            ("--query-key-norm", "all-heads"),
            "--query-key-norm all-heads .*--query-key-norm head",
        ),
        ("dense_roberta_tiny", ("--window", 3), "--window 3"),
        (DENSE, ("--attention-branch-scale", 0), "--attention-branch-scale .*0"),
        (DENSE, ("--attention-output-scale", "inf"), "--attention-output-scale .*inf"),
    ],
)
def test_impossible_flags_are_refused_by_name(arch, flags, message):
    with pytest.raises(UserError, match=message):
        build(arch, *flags)


def test_each_attention_gets_the_settings_that_its_role_has_a_meaning_for():
    """A window is for the decoder's self-attention, rotary settings for every self-attention."""
    flags = ("--positions", "rope", "--rope-base", 50, "--rotary-dim", 4, "--window", 3)
    model = build(ARCH, *flags, "--query-key-norm", "rotated").eval()
    encoder = model.encoder.layers[0]
    decoder = model.decoder.layers[0]
    attentions = (encoder.self_attn, decoder.self_attn, decoder.encoder_attn)
    assert [attention.window for attention in attentions] == [None, 3, None]
    assert [attention.query_key_norm.after_rotation for attention in attentions] == [
        True,
        True,
        False,
    ]
    assert decoder.encoder_attn.positions is None
    for attention in attentions[:2]:
        assert (attention.positions.base, attention.positions.rotary_dim) == (50, 4)
    with torch.no_grad():
        assert_incremental_equals_full(model, ARCH)


def test_shared_embeddings_need_a_joined_dictionary():
    with pytest.raises(UserError, match="--joined-dictionary"):
        build(ARCH, "--share-all-embeddings", target="v")


def test_padding_never_reaches_the_statistics_or_the_real_tokens():
    model = build(ARCH).eval()
    inputs = batch(ARCH)
    with collect_routings() as decisions:
        logits, _ = model(**inputs)
    assert len(decisions) == 12
    for name, decision in decisions:
        tokens = inputs["src_tokens" if name.startswith("encoder") else "prev_output_tokens"]
        assert torch.equal(decision.padding, tokens.eq(PAD).reshape(-1)), name
    alone, _ = model(
        inputs["src_tokens"][:1, 2:], torch.tensor([3]), inputs["prev_output_tokens"][:1]
    )
    torch.testing.assert_close(logits[:1], alone, rtol=1e-4, atol=1e-4)


def test_every_parameter_gets_a_gradient_even_of_experts_without_tokens():
    config = LabelSmoothedCrossEntropyWithRoutingConfig(sentence_avg=False, label_smoothing=0.1)
    task = argparse.Namespace(target_dictionary=Dictionary())
    criterion = LabelSmoothedCrossEntropyWithRouting.build_criterion(config, task)
    model = build(ARCH, "--num-experts", 16, "--experts-per-token", 1).train()
    inputs = batch(ARCH, (2,))
    sample = {"net_input": inputs, "target": inputs["prev_output_tokens"], "ntokens": 2}
    loss, _, log = criterion(model, sample)
    loss.backward()
    assert mean_values("router/", [log])[0]["dead_experts"] > 0
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
