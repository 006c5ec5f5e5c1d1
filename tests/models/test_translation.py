"""The architectures: what they replace, what they are made of, what they refuse."""

import argparse

import pytest
import torch
from fairseq.data import Dictionary
from whole_models import build

from moa_fairseq.attention.collector import collect_decisions
from moa_fairseq.attention.moa import MixtureOfAttention
from moa_fairseq.criterions.with_routing import (
    LabelSmoothedCrossEntropyWithRouting,
    LabelSmoothedCrossEntropyWithRoutingConfig,
)
from moa_fairseq.errors import UserError
from moa_fairseq.transformer.logged_values import mean_values

ARCH = "moa_transformer_tiny"


def sample(batch=3, src=6, tgt=5, padded=True):
    g = torch.Generator().manual_seed(0)
    source = torch.randint(4, 40, (batch, src), generator=g)
    previous = torch.randint(4, 40, (batch, tgt), generator=g)
    target = torch.randint(4, 40, (batch, tgt), generator=g)
    if padded:
        source[0, :2] = 1
        previous[1, 3:] = 1
        target[1, 3:] = 1
    lengths = source.ne(1).sum(1)
    net_input = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": previous}
    return {"net_input": net_input, "target": target, "ntokens": int(target.ne(1).sum())}


def criterion(**settings):
    task = argparse.Namespace(target_dictionary=Dictionary())
    cfg = LabelSmoothedCrossEntropyWithRoutingConfig(sentence_avg=False, label_smoothing=0.1, **settings)
    return LabelSmoothedCrossEntropyWithRouting.build_criterion(cfg, task)


def test_every_attention_of_the_base_model_is_a_mixture():
    with torch.device("meta"):
        model = build("moa_transformer_base")
    mixtures = [m for m in model.modules() if isinstance(m, MixtureOfAttention)]
    assert len(mixtures) == 18
    assert not any(type(m).__name__ == "MultiheadAttention" for m in model.modules())
    assert {m.name for m in mixtures} >= {"encoder.layers.5.self_attn", "decoder.layers.0.encoder_attn"}
    assert all(not name.endswith("bias") for m in mixtures for name, _ in m.named_parameters())


# MoA Tables 1 and 3: row → (K, E, D)
SIZES = {
    "base": (8, 8, 128),
    "big": (16, 32, 256),
    "ablation_a": (8, 8, 256),
    "ablation_b": (8, 16, 256),
    "ablation_c": (8, 32, 64),
    "ablation_d": (8, 32, 128),
    "ablation_e": (8, 32, 256),
    "ablation_f": (4, 32, 256),
}


@pytest.mark.parametrize("arch", SIZES)
def test_architectures_have_the_papers_k_e_d(arch):
    with torch.device("meta"):
        model = build(f"moa_transformer_{arch}", "--encoder-layers", 1, "--decoder-layers", 1)
    attention = model.encoder.layers[0].self_attn
    assert (attention.experts_per_token, attention.num_experts, attention.expert_dim) == SIZES[arch]
    assert attention.router.renormalize == "detached" and attention.router.noise_projection is None
    assert model.encoder.layers[0].fc1.weight.shape == (2048, 512)


def test_flags_override_the_architecture():
    model = build(
        ARCH,
        *("--num-experts", 5, "--experts-per-token", 2, "--expert-dim", 16, "--expert-bias"),
        *("--routing-noise", "--router-renormalize", "none", "--expert-backend", "reference"),
    )
    attention = model.decoder.layers[1].encoder_attn
    assert (attention.num_experts, attention.experts_per_token, attention.expert_dim) == (5, 2, 16)
    assert attention.q_experts.bias is not None and attention.k_proj.bias is not None
    assert attention.router.renormalize == "none" and attention.router.noise_projection is not None
    assert attention.q_experts.backend == "reference"


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--num-experts", 2), "--experts-per-token 4 must lie between 1 and --num-experts 2"),
        (("--expert-dim", 0), "--expert-dim must be a positive number"),
        (("--quant-noise-pq", 0.1), "--quant-noise-pq has no meaning"),
        (("--offload-activations",), "--checkpoint-activations works"),
        (("--cross-self-attention", "--positions", "rope"), "--positions rope is for self-attention"),
    ],
)
def test_impossible_flags_are_refused_by_name(flags, message):
    with pytest.raises(UserError, match=message):
        build(ARCH, *flags)


def test_shared_embeddings_need_a_joined_dictionary():
    with pytest.raises(UserError, match="--joined-dictionary"):
        build(ARCH, "--share-all-embeddings", target="v")


def test_padding_never_reaches_the_statistics_or_the_real_tokens():
    torch.manual_seed(0)
    model = build(ARCH).eval()
    batch = sample()
    with collect_decisions() as decisions:
        logits, _ = model(**batch["net_input"])
    assert len(decisions) == 12
    for name, decision in decisions:
        tokens = batch["net_input"]["src_tokens" if name.startswith("encoder") else "prev_output_tokens"]
        assert torch.equal(decision.padding_mask, tokens.eq(1).reshape(-1)), name
    shorter = {
        "src_tokens": batch["net_input"]["src_tokens"][:1, 2:],
        "src_lengths": torch.tensor([4]),
        "prev_output_tokens": batch["net_input"]["prev_output_tokens"][:1],
    }
    alone, _ = model(**shorter)
    torch.testing.assert_close(logits[:1], alone, rtol=1e-4, atol=1e-4)


def test_every_parameter_gets_a_gradient_even_of_experts_without_tokens():
    torch.manual_seed(0)
    model = build(ARCH, "--num-experts", 16, "--experts-per-token", 1).train()
    loss, _, log = criterion()(model, sample(batch=1, src=2, tgt=2, padded=False))
    loss.backward()
    assert mean_values("router/", [log])[0]["dead_experts"] > 0
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_activation_checkpointing_changes_neither_loss_nor_gradients_nor_the_count():
    results = []
    for flags in ((), ("--checkpoint-activations",)):
        torch.manual_seed(0)
        model = build(ARCH, "--dropout", 0, *flags).train()
        with collect_decisions() as decisions:
            loss, _, _ = criterion()(model, sample())
            loss.backward()
        results.append((loss.item(), [p.grad for p in model.parameters()], len(decisions)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for plain, checkpointed in zip(results[0][1], results[1][1]):
        torch.testing.assert_close(plain, checkpointed, rtol=1e-4, atol=1e-5)
