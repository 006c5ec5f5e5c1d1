"""Mixtures of attentive experts: equal to the paper's sums, to dense attention, and step by step."""

import itertools
import math

import equations
import pytest
import torch
from fairseq.modules import MultiheadAttention
from time_first import MixtureOfAttentiveExperts

from moa_fairseq.layers.expert_draw import ExpertDraw, random_expert
from moa_fairseq.plugin.forward_context import collect_routings, forward_context

C = 24
H = 8
FUTURE = torch.full((6, 6), -math.inf, dtype=torch.float64).triu(1)
PADDING = torch.arange(6) >= torch.tensor([[6], [4], [6]])  # [B, T]


def build(seed=0, **settings):
    torch.manual_seed(seed)
    module = MixtureOfAttentiveExperts(
        C, H, **{"self_attention": True, "gate_hidden_dim": 16, **settings}
    )
    for gate in (module.gate,) if module.gate is not None else ():
        torch.nn.init.normal_(gate.fc2.weight, std=2.0)  # an untrained gate is nearly uniform
        gate.norm.running_mean.normal_(std=0.1)
        gate.norm.running_var.uniform_(0.5, 2.0)
    return module.double().eval()


def inputs(length=6, batch=3, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(length, batch, C, generator=g, dtype=torch.float64, requires_grad=True)


def dense_with_the_weights_of(module):
    dense = MultiheadAttention(C, H, self_attention=True).double().eval()
    weights = {k: v for k, v in module.state_dict().items() if not k.startswith("gate.")}
    dense.load_state_dict(weights)  # strict: same names, same shapes
    return dense


def literal_mixture(module, x, gate, dropped_heads, attn_mask=None, padding=None):
    """Σ_i g_i f_i with every expert built: Eq. 4-6 of the paper, word for word. gate [T or 1, B, E]."""
    y = x.transpose(0, 1)
    one = torch.eye(H, dtype=x.dtype)
    H_j = [
        equations.dense(module, y, y, attn_mask, padding, None, one[None, j : j + 1])
        for j in range(H)
    ]
    H_j = [head.transpose(0, 1) - module.out_proj.bias for head in H_j]
    total = 0.0
    for i, subset in enumerate(itertools.combinations(range(H), dropped_heads)):
        expert = H / (H - dropped_heads) * (-sum(H_j[j] for j in subset) + sum(H_j))
        total = total + gate[..., i : i + 1] * expert
    return total + module.out_proj.bias


def gate_of(module, x, **call):
    with collect_routings() as decisions:
        out, _ = module(x, x, x, need_weights=False, **call)
    return out, decisions[0][1]


@pytest.mark.parametrize("dropped", [1, 2, 3])
def test_uniform_gate_is_fairseqs_dense_attention_with_gradients(dropped):
    module = build(mae_gate="uniform", mae_dropped_heads=dropped)
    dense = dense_with_the_weights_of(module)
    results = []
    for attention in (module, dense):
        x = inputs()
        out, weights = attention(x, x, x, key_padding_mask=PADDING)
        # of padding nothing is promised
        out = out.transpose(0, 1)[~PADDING]
        weights = weights[~PADDING]
        upstream = torch.randn(
            out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype
        )
        out.backward(upstream)
        results.append(
            [
                out,
                weights.double(),
                x.grad,
                *(p.grad for _, p in sorted(attention.named_parameters())),
            ]
        )
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    # forced to be uniform, a learned gate gives the same
    learned = build(mae_dropped_heads=dropped)
    learned.load_state_dict(module.state_dict(), strict=False)
    torch.nn.init.zeros_(learned.gate.fc2.weight)
    torch.nn.init.zeros_(learned.gate.fc2.bias)
    x = inputs()
    again, _ = learned(x, x, x, key_padding_mask=PADDING)
    torch.testing.assert_close(again.transpose(0, 1)[~PADDING], results[1][0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropped, experts", [(1, 8), (2, 28)])
def test_equals_the_literal_sum_over_experts_with_gradients(dropped, experts, causal):
    module = build(mae_dropped_heads=dropped, causal=causal)
    mask = FUTURE if causal else None
    upstream = torch.randn(
        16, C, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    results = []
    for literal in (False, True):
        x = inputs()
        out, decision = gate_of(module, x, attn_mask=mask, key_padding_mask=PADDING)
        assert decision.num_experts == experts
        if literal:
            gate = decision.probs.view(3, -1, experts).transpose(0, 1)
            assert gate.std(-1).min() > 0.005  # far from uniform, or the test shows nothing
            out = literal_mixture(module, x, gate, dropped, mask, PADDING)
        out = out.transpose(0, 1)[~PADDING]
        module.zero_grad()
        out.backward(upstream)
        results.append([out, x.grad, *(p.grad for p in module.parameters())])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dropped", [1, 2])
def test_a_drawn_expert_is_f_i_and_leaves_the_gate_without_gradient(dropped):
    module = build(mae_dropped_heads=dropped, dropout=0.0).train()
    x = inputs()
    with forward_context(draw=ExpertDraw(torch.tensor([5, 6, 7]), seed=1, update=3)):
        out, decision = gate_of(module, x)
    one_hot = torch.nn.functional.one_hot(
        decision.expert_ids[:, 0], decision.num_experts
    ).double()
    torch.testing.assert_close(out, literal_mixture(module, x, one_hot[None], dropped))
    out.square().sum().backward()
    assert all(p.grad is None for p in module.gate.parameters())
    assert module.gate.norm.pending.any()  # observed
    # evaluation mixes, whatever is drawn around it
    module.eval()
    mixed, _ = gate_of(module, x)
    with forward_context(draw=ExpertDraw(torch.tensor([5, 6, 7]), 1, 3)):
        torch.testing.assert_close(gate_of(module, x)[0], mixed)
    assert not torch.allclose(mixed, out)


def test_draws_are_equal_in_every_process():
    """A restart, or another worker, must draw these experts again."""
    draw = ExpertDraw(torch.arange(6), seed=1, update=1)
    experts = draw.choose("encoder.layers.0.self_attn", torch.full((6, 8), 1 / 8))
    assert experts.tolist() == [1, 0, 7, 0, 4, 3]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("draw", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("norm", ["earlier", "batch"])
def test_a_future_token_changes_nothing_before_it(training, draw, window, norm):
    module = build(causal=True, gate_window=window, gate_dropout=0.0, gate_norm=norm).train(
        training
    )
    outs = []
    for change in (0.0, 10.0):
        x = inputs().detach()
        x[4:, 1] += change
        with (
            forward_context(draw=ExpertDraw(torch.arange(3), 1, 1))
            if draw
            else forward_context(padding=None)
        ):
            outs.append(gate_of(module, x, attn_mask=FUTURE)[0].detach())
        module.gate.norm.pending.zero_()
    assert torch.equal(outs[0][:4], outs[1][:4])
    assert torch.equal(outs[0][:, [0, 2]], outs[1][:, [0, 2]])  # nor in other sentences
    assert not torch.allclose(outs[0][4:, 1], outs[1][4:, 1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropped", [1, 2])
@pytest.mark.parametrize("how", ["top-expert", "random-expert"])
def test_one_expert_in_evaluation_is_the_sum_with_a_one_hot_gate(how, dropped, causal):
    module = build(
        mae_dropped_heads=dropped,
        causal=causal,
        mae_evaluate_with=how,
        mae_evaluate_seed=4,
        gate_dropout=0.0,
    )
    module.name = "encoder.layers.1.self_attn"
    mixing = build(mae_dropped_heads=dropped, causal=causal, gate_dropout=0.0)
    mask = FUTURE if causal else None
    x = inputs().detach()
    call = dict(attn_mask=mask, key_padding_mask=PADDING)
    out, decision = gate_of(module, x, **call)
    mixed, mixture = gate_of(mixing, x, **call)
    assert torch.equal(decision.probs, mixture.probs)
    gate = torch.zeros_like(mixture.probs)
    for row, probs in enumerate(mixture.probs.tolist()):
        best = max(range(len(probs)), key=probs.__getitem__)
        gate[
            row, best if how == "top-expert" else random_expert(module.name, 4, len(probs))
        ] = 1.0
    gate_by_row = gate.view(3, -1, gate.size(-1)).transpose(0, 1)
    expected = literal_mixture(module, x, gate_by_row, dropped, mask, PADDING)
    torch.testing.assert_close(
        out.transpose(0, 1)[~PADDING], expected.transpose(0, 1)[~PADDING]
    )
    assert not torch.allclose(out, mixed, atol=1e-3)
    assert torch.equal(decision.expert_ids[:, 0], gate.argmax(-1))
    torch.testing.assert_close(
        gate_of(module.train(), x, **call)[0], gate_of(mixing.train(), x, **call)[0]
    )


def test_random_experts_differ_between_modules_and_seeds_and_are_fair():
    names = [
        f"decoder.layers.{layer}.{kind}_attn"
        for layer in range(40)
        for kind in ("self", "encoder")
    ]
    draws = [[random_expert(name, seed, 8) for name in names] for seed in range(40)]
    counts = torch.tensor(draws).flatten().bincount(minlength=8).double()
    expected = len(names) * 40 / 8
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001
    assert len({tuple(draw) for draw in draws}) == 40


def test_the_cost_of_a_gate():
    """It sees a mean of each query, or one of the sequence; how many keys there are costs it nothing."""
    of_a_row = 16 * (C + H)
    assert build(causal=True).macs(7, 11)["router"] == 7 * of_a_row
    assert build().macs(7, 11)["router"] == of_a_row
    assert build(mae_gate="uniform").macs(7, 11)["router"] == 0
