"""--initialization admin: ω of every residual sum by the first batch, and what is left of it afterwards."""

import math

import pytest
import torch
import whole_models

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.admin import Shortcut, profile, unprofiled
from moa_fairseq.plugin.forward_context import collect_routings, forward_context

ARCH = "dense_transformer_tiny"
ADMIN = ("--initialization", "admin")
SMALL = ("--encoder-layers", 2, "--decoder-layers", 2, "--share-all-embeddings")


def build(*flags):
    return whole_models.build(ARCH, *ADMIN, *SMALL, *flags).double().train()


def omegas(model):
    return [
        shortcut.omega.item() for shortcut in model.modules() if isinstance(shortcut, Shortcut)
    ]


def by_hand(model, inputs):
    """Post-norm layers written out: ω_1 = 1, ω_{i+1}² = Var[x_i·ω_i] + Var[f_i], of real tokens."""
    found = []
    source = inputs["src_tokens"]
    target = inputs["prev_output_tokens"]
    real_source, real_target = (tokens.ne(whole_models.PAD).t() for tokens in (source, target))
    future = torch.full((target.size(1),) * 2, -math.inf, dtype=torch.float64).triu(1)

    def summed(x, branch, norm, real, variance):
        found.append(math.sqrt(variance))
        variance = (x * found[-1])[real].var(correction=0) + branch[real].var(correction=0)
        return norm(x * found[-1] + branch), variance.item()

    def feed_forward(layer, x):
        return layer.fc2(torch.relu(layer.fc1(x)))

    def stack(encoder_or_decoder, tokens, real, memory=None):
        embedded = encoder_or_decoder.embed_scale * encoder_or_decoder.embed_tokens(tokens)
        x = (embedded + encoder_or_decoder.embed_positions(tokens)).transpose(0, 1)
        if memory is None:
            x = x * real[..., None]
        variance = 1.0
        hidden = {"key_padding_mask": ~real.t()}
        for layer in encoder_or_decoder.layers:
            mask = None if memory is None else future
            with forward_context(padding=~real.t()):
                branch = layer.self_attn(x, x, x, attn_mask=mask, **hidden)[0]
                x, variance = summed(x, branch, layer.self_attn_layer_norm, real, variance)
                if memory is not None:
                    keys = {"key_padding_mask": ~real_source.t(), "static_kv": True}
                    branch = layer.encoder_attn(x, memory, memory, **keys)[0]
                    x, variance = summed(
                        x, branch, layer.encoder_attn_layer_norm, real, variance
                    )
            x, variance = summed(
                x, feed_forward(layer, x), layer.final_layer_norm, real, variance
            )
        return x

    with torch.no_grad():
        stack(model.decoder, target, real_target, stack(model.encoder, source, real_source))
    return found


def test_the_first_batch_sets_every_omega():
    model = build("--dropout", 0)
    inputs = whole_models.batch(ARCH)
    expected = by_hand(model, inputs)
    assert len(expected) == 2 * 2 + 2 * 3 and expected[0] == expected[4] == 1.0
    assert unprofiled(model) and model.eval()(**inputs) is not None and unprofiled(model)
    model.train()(**inputs)
    assert omegas(model) == pytest.approx(expected, rel=1e-12)
    assert min(expected[1:4]) > 1.05  # far from what a model without Admin has
    whole_models.assert_incremental_equals_full(model.eval(), ARCH)


def test_a_saved_model_keeps_its_omegas_and_draws_the_same_dropout():
    model = build("--dropout", 0.2)
    inputs = whole_models.batch(ARCH)
    torch.manual_seed(5)
    first = model(**inputs)[0]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert sum(name.endswith("shortcuts.0.omega") for name in state) == 4
    again = build("--dropout", 0.2)
    again.load_state_dict(state)
    torch.manual_seed(5)
    torch.testing.assert_close(again(**inputs)[0], first, rtol=0, atol=0)
    again(**{**inputs, "prev_output_tokens": inputs["prev_output_tokens"].flip(0)})
    assert omegas(again) == omegas(model) and not unprofiled(again)


def test_a_pass_that_fails_leaves_no_omega_and_is_made_again():
    """The trainer skips a batch that is too large for the memory, and goes on with the next."""
    model = build("--dropout", 0)
    whole = build("--dropout", 0)
    inputs = whole_models.batch(ARCH)

    def fail(*_):
        raise RuntimeError("out of memory")

    hook = model.decoder.layers[1].fc1.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(**inputs)
    assert set(omegas(model)) == {1.0}
    hook.remove()
    model(**inputs)
    whole(**inputs)
    assert omegas(model) == omegas(whole)


def test_the_first_update_collects_its_own_routings_alone():
    model = build("--sigma-moe-num-experts", 4)
    inputs = whole_models.batch(ARCH)
    counts = []
    for _ in range(2):
        with collect_routings() as routings:
            model(**inputs)
        counts.append(len(routings))
    assert counts == [4, 4] and not unprofiled(model)


def test_workers_count_together_and_training_moves_omega():
    alone = build("--dropout", 0)
    together = build("--dropout", 0)
    inputs = whole_models.batch(ARCH)
    alone(**inputs)
    together._begun = True
    # Two of the same
    profile(together, lambda: together(**inputs), lambda moments: moments.mul_(2))
    assert omegas(together) == pytest.approx(omegas(alone), rel=1e-12)
    alone(**inputs)[0].square().mean().backward()
    shortcuts = [module for module in alone.modules() if isinstance(module, Shortcut)]
    assert all(shortcut.change.grad.abs().max() > 0 for shortcut in shortcuts)


@pytest.mark.parametrize(
    ("arch", "flags", "named"),
    [
        (ARCH, ("--decoder-normalize-before",), "--decoder-normalize-before"),
        (ARCH, ("--encoder-layerdrop", 0.1), "--encoder-layerdrop"),
        ("moa_transformer_tiny", (), "--arch moa_transformer_tiny"),
        ("dense_roberta_tiny", (), "--arch dense_roberta_tiny"),
        (
            "dense_transformer_lm_base",
            (),
            "--arch dense_transformer_lm_base",
        ),  # pre-norm by itself
    ],
)
def test_other_models_are_refused(arch, flags, named):
    with pytest.raises(UserError, match=named):
        whole_models.build(arch, *ADMIN, *flags)
