"""Transformer-XL's positions against a loop over all pairs, and a context that is carried along."""

import math
from functools import partial

import pytest
import torch
from equations import drawn
from time_first import MixtureOfAttention, SwitchHeadAttention

from moa_fairseq.layers.positions import HalfRotaryPositions, RelativePositions, RotaryPositions
from moa_fairseq.plugin.forward_context import forward_context

C = 10
D = 4


def positions(groups, seed=0):
    torch.manual_seed(seed)
    return drawn(RelativePositions(C, groups, D), 1.0)


def sinusoid(distance):
    speed = [10000.0 ** (-2 * j / C) for j in range(C // 2)]
    return torch.tensor(
        [math.sin(distance * s) for s in speed] + [math.cos(distance * s) for s in speed],
        dtype=torch.float64,
    )


def loop(found, q, k, first_query):
    """Dai et al., section 3.3: terms (a) to (d) of every pair, over the root of D. float64."""
    batch, heads, tgt_len, _ = q.shape
    groups = found.key_heads
    q = q.double()
    k = k.double()
    w, u, v = (
        p.double() for p in (found.projection.weight, found.content_bias, found.position_bias)
    )
    scores = torch.empty(batch, heads, tgt_len, k.size(2), dtype=torch.float64)
    for i in range(tgt_len):
        for j in range(k.size(2)):
            r = (w @ sinusoid(first_query + i - j)).view(groups, D)
            for h in range(heads):
                g = h % groups
                query = q[:, h, i]
                content = ((query + u[g]) * k[:, g, j]).sum(-1)
                scores[:, h, i, j] = (content + ((query + v[g]) * r[g]).sum(-1)) / math.sqrt(D)
    return scores


@pytest.mark.parametrize(
    ("tgt_len", "keys", "heads", "groups"),
    [(5, 5, 2, 2), (3, 8, 2, 2), (1, 6, 4, 2), (1, 1, 1, 1), (2, 2, 3, 1), (4, 9, 6, 3)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scores_and_gradients_equal_a_loop_over_all_pairs(tgt_len, keys, heads, groups, dtype):
    found = positions(groups).to(dtype)
    g = torch.Generator().manual_seed(keys)
    q = torch.randn(2, heads, tgt_len, D, generator=g, dtype=dtype, requires_grad=True)
    k = torch.randn(2, groups, keys, D, generator=g, dtype=dtype, requires_grad=True)
    first = keys - tgt_len
    bias = found.bias(q, keys, first)
    assert bias.shape == (2, heads, tgt_len, keys)
    rotated, same = found.rotate(q, k, first)
    assert same is k
    of_head = [h % groups for h in range(heads)]
    scores = rotated @ k[:, of_head].transpose(-1, -2) / math.sqrt(D) + bias
    exact = loop(found, q, k, first)
    close = (
        dict(rtol=1e-3, atol=1e-4) if dtype == torch.float32 else dict(rtol=1e-11, atol=1e-11)
    )
    torch.testing.assert_close(scores, exact.to(dtype), **close)
    inputs = [q, k, *found.parameters()]
    upstream = torch.randn(scores.shape, generator=g, dtype=dtype)
    for grad, exact_grad in zip(
        torch.autograd.grad(scores, inputs, upstream),
        torch.autograd.grad(exact, inputs, upstream.double()),
    ):
        torch.testing.assert_close(grad, exact_grad.to(dtype), **close)


def test_half_precision_keeps_the_distances():
    """The sinusoids of far distances are made before they are rounded."""
    found = positions(2).to(torch.bfloat16)
    q = torch.randn(1, 2, 3, D).to(torch.bfloat16)
    exact = positions(2)
    with torch.no_grad():
        for mine, other in zip(exact.parameters(), found.parameters()):
            mine.copy_(other)
    near = exact.bias(q.float(), 3000, 2997)
    torch.testing.assert_close(found.bias(q, 3000, 2997).float(), near, rtol=0.05, atol=0.1)


SWITCHHEAD = partial(SwitchHeadAttention, C, switchhead_heads=2, expert_dim=D)
EXPERTS = dict(num_experts=3, experts_per_token=2)
MOA = partial(MixtureOfAttention, C, num_experts=4, experts_per_token=2, expert_dim=D)
ATTENTIONS = {
    "dense": partial(SWITCHHEAD, switchhead_experts="none"),
    "SwitchHead": partial(SWITCHHEAD, **EXPERTS),
    "SwitchHead, shared selection": partial(
        SWITCHHEAD, **EXPERTS, switchhead_experts="vkqo", switchhead_shared_selection=True
    ),
    "MoA": MOA,
    "MoA, two heads per expert": partial(MOA, heads_per_expert=2),
    "MoA, window": partial(MOA, window=3),
}


@pytest.fixture(params=ATTENTIONS, ids=str)
def attention(request):
    def build(positions):
        torch.manual_seed(3)
        return drawn(
            ATTENTIONS[request.param](self_attention=True, positions=positions), 0.5
        ).eval()

    return build


def causal(length):
    return torch.triu(torch.full((length, length), -math.inf), 1)


@pytest.mark.parametrize("positions", ["xl", "rope", "rope-half"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_carried_context_equals_one_long_pass(attention, positions, need_weights):
    module = attention(positions)
    x = torch.randn(9, 2, C)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 7:] = True
    full, _ = module(
        *[x] * 3, attn_mask=causal(9), key_padding_mask=padding, need_weights=need_weights
    )
    now = x[5:]
    with forward_context(carried=x[:5]):
        out, weights = module(
            *[now] * 3,
            attn_mask=causal(4),
            key_padding_mask=padding[:, 5:],
            need_weights=need_weights,
        )
    torch.testing.assert_close(out[:2], full[5:7], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[:, 0], full[5:, 0], rtol=1e-4, atol=1e-5)
    assert weights is None or weights.shape == (2, 4, 9)


def test_projections_learn_from_the_context(attention):
    module = attention("xl")
    before = torch.randn(3, 1, C, requires_grad=True)
    now = torch.randn(2, 1, C)
    with forward_context(carried=before):
        out, _ = module(*[now] * 3, attn_mask=causal(2))
    assert torch.autograd.grad(out.sum(), before)[0].abs().sum() > 0


def test_half_a_head_may_be_turned():
    """The first 4 of 11 numbers as RoPE of size 4, the others as they are."""
    q = torch.randn(2, 3, 5, 11)
    k = torch.randn(2, 1, 5, 11)
    got = HalfRotaryPositions(11).rotate(q, k, 7)
    whole = RotaryPositions(4).rotate(q[..., :4], k[..., :4], 7)
    for mine, turned, given in zip(got, whole, (q, k)):
        assert torch.equal(mine[..., :4], turned) and torch.equal(mine[..., 4:], given[..., 4:])


def test_costs_count_the_distances():
    module = ATTENTIONS["dense"](self_attention=True, positions="xl")
    plain = ATTENTIONS["dense"](self_attention=True)
    with_xl = module.macs(5, 8)
    without = plain.macs(5, 8)
    assert (
        with_xl["projections"] - without["projections"] == 12 * C * 2 * D
    )  # 5 + 8 − 1 distances
    assert with_xl["scores"] - without["scores"] == 2 * 5 * 12 * D
    assert without == {
        "router": 0,
        "projections": (2 * 5 + 2 * 8) * C * 2 * D,
        "scores": 2 * 5 * 8 * 2 * D,
    }


def test_sinusoids_made_in_inference_mode_do_not_reach_training():
    """They are kept for all layers, and autograd refuses tensors of that mode."""
    found = positions(1)
    q = torch.randn(1, 1, 3, D)
    with torch.inference_mode():
        found.bias(q, 41, 38)
    found.bias(q, 41, 38).sum().backward()
    assert found.projection.weight.grad.abs().sum() > 0
