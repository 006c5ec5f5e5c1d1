"""MixtureOfAttention: weights, padding, products, biased choice. test_equations.py has its equations."""

from types import SimpleNamespace

import equations
import torch
import torch.nn.functional as F
from time_first import MixtureOfAttention

from moa_fairseq.layers import moa
from moa_fairseq.layers.routers import TopKRouter
from moa_fairseq.layers.running_statistics import (
    running_statistics_of,
    update_running_statistics,
)
from moa_fairseq.plugin.forward_context import collect_routings, forward_context

C = 24
E = 6
K = 3
D = 8


def build(seed=0, dtype=torch.float32, kind=MixtureOfAttention, **settings):
    torch.manual_seed(seed)
    sizes = {
        "num_experts": E,
        "experts_per_token": K,
        "expert_dim": D,
        "expert_bias": True,
        **settings,
    }
    return equations.drawn(kind(C, **sizes), 0.3).to(dtype).eval()


def test_weights_are_those_of_the_chosen_experts():
    module = build(self_attention=True, dtype=torch.float64)
    x = torch.randn(5, 2, C, dtype=torch.float64)
    with collect_routings() as decisions:
        out, mean = module(x, x, x, need_weights=True)
    _, per_head = module(x, x, x, need_head_weights=True)
    no_weights, nothing = module(x, x, x, need_weights=False)
    y = x.transpose(0, 1)
    _, exact = equations.moa_with_weights(module, y, y, None, None, None)
    index = decisions[0][1].expert_ids.view(2, 5, K).transpose(1, 2)  # [B, K, T]
    chosen = exact.gather(1, index.unsqueeze(-1).expand(-1, -1, -1, 5))  # [B, K, T, S]
    assert per_head.shape == (K, 2, 5, 5) and mean.shape == (2, 5, 5) and nothing is None
    torch.testing.assert_close(per_head.transpose(0, 1).double(), chosen)
    torch.testing.assert_close(mean, per_head.mean(0))
    torch.testing.assert_close(out, no_weights)


def test_ambient_query_padding_reaches_a_cross_attention():
    module = build(encoder_decoder_attention=True)
    query = torch.randn(3, 2, C)
    memory = torch.randn(4, 2, C)
    padding = torch.tensor([[False, False, True], [False] * 3])
    with collect_routings() as decisions, forward_context(padding=padding):
        out, _ = module(query, memory, memory)
    assert torch.equal(decisions[0][1].padding, padding.reshape(-1))
    assert (out[2, 0] == 0).all() and (out[2, 1] != 0).any()


def test_keys_and_values_in_one_product_are_those_of_two(monkeypatch):
    module = build(self_attention=True, dtype=torch.float64)
    x = torch.randn(5, 2, C, dtype=torch.float64, requires_grad=True)
    outcomes = []
    linear = F.linear
    widths = []
    monkeypatch.setattr(
        F, "linear", lambda x, *matrix: (widths.append(len(matrix[0])), linear(x, *matrix))[1]
    )
    for least, expected in ((10, 1), (11, 0)):
        monkeypatch.setattr(moa, "_ROWS_OF_ONE_PRODUCT", least)
        widths.clear()
        out, _ = module(x, x, x, need_weights=False)
        assert widths.count(2 * module.expert_dim) == expected
        outcomes.append(
            [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]
        )
    for one, two in zip(*outcomes):
        torch.testing.assert_close(one, two)


def test_values_of_their_own_are_in_no_product_with_keys(monkeypatch):
    monkeypatch.setattr(moa, "_ROWS_OF_ONE_PRODUCT", 1)
    module = build()
    key, value = torch.randn(2, 4, 2, C)
    expected = module.v_proj(value).transpose(0, 1).view(2, 1, 4, -1)
    _, found = module.keys_values(
        SimpleNamespace(memory=key.transpose(0, 1), values=value.transpose(0, 1))
    )
    torch.testing.assert_close(found, expected)


def test_keys_and_values_of_cross_attention_are_one_input(monkeypatch):
    """`keys_values` then makes one product of them, where that pays."""
    module = build(encoder_decoder_attention=True)
    seen = []
    project = module.keys_values
    monkeypatch.setattr(
        module,
        "keys_values",
        lambda call: (seen.append(call.memory is call.values), project(call))[1],
    )
    module(torch.randn(3, 2, C), torch.randn(5, 2, C), torch.randn(5, 2, C))
    assert seen == [True]


def test_a_selection_bias_evens_out_loads_without_a_gradient():
    torch.manual_seed(0)
    settings = moa.MoASettings(num_experts=6, experts_per_token=2, routing_bias_rate=0.002)
    router = TopKRouter(8, settings)
    with torch.no_grad():
        router.projection.weight.copy_(torch.randn(6, 8) * 0.3)
        router.projection.weight[0] += 1.0  # expert 0 is everybody's first
    x = torch.randn(600, 8) + 0.5
    first = router(x)
    assert running_statistics_of(router) == [router] and router.has_pending
    before = [parameter.clone() for parameter in router.parameters()]
    for _ in range(600):
        decision = router(x)
        update_running_statistics(running_statistics_of(router))
    spread = [float(d.expert_counts.max() / d.expert_counts.mean()) for d in (first, decision)]
    assert spread[0] > 2.0 and spread[1] < 1.4
    assert all(torch.equal(one, other) for one, other in zip(before, router.parameters()))
    # the bias chooses, and weighs nothing
    chosen = decision.probs.gather(1, decision.expert_ids)
    torch.testing.assert_close(decision.gates, chosen / chosen.sum(-1, keepdim=True))
    # an update by the rule, expert by expert
    bias = router.selection_bias.clone()
    loads = torch.tensor([3.0, 1, 2, 2, 4, 0])
    router.update(loads)
    step = 0.002 * torch.tensor([-1.0, 1, 0, 0, -1, 1])
    torch.testing.assert_close(router.selection_bias, bias + step)
    router.eval()(x)
    assert not router.has_pending or router.pending.eq(0).all()
