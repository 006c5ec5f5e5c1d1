"""Routers whose choice or gates are not learned, beside test_equations.py: fairness, saving, refusals."""

import copy

import equations
import pytest
import torch
from time_first import MixtureOfAttention

from moa_fairseq.errors import UserError
from moa_fairseq.layers.expert_draw import scramble
from moa_fairseq.layers.moa import MoASettings
from moa_fairseq.layers.routers import TopKRouter
from moa_fairseq.plugin.forward_context import collect_routings, forward_context

C = 12
E = 5
K = 2
IDS = torch.tensor([[7, 4, 7, 9], [4, 8, 11, 7]])


def moa(dtype=torch.float64, **settings):
    torch.manual_seed(0)
    sizes = {"num_experts": E, "experts_per_token": K, "expert_dim": 4, **settings}
    return equations.drawn(MixtureOfAttention(C, **sizes, self_attention=True)).to(dtype)


def rows():
    return torch.randn(4, 2, C, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("per_token", [K, E])
def test_uniform_gates_are_one_kth_and_the_router_has_no_gradient(per_token):
    module = moa(router_gates="uniform", experts_per_token=per_token)
    x = rows()
    with collect_routings() as decisions:
        module(x, x, x)[0].sum().backward()
    decision = decisions[0][1]
    assert torch.equal(
        decision.gates, torch.full((8, per_token), 1 / per_token, dtype=torch.float64)
    )
    assert not decision.gates.requires_grad and decision.probs.requires_grad
    assert module.router.projection.weight.grad is None


def test_even_gates_are_those_of_equal_logits_for_other_settings_too():
    x = torch.randn(6, C)

    def build(**settings):
        return TopKRouter(C, MoASettings(E, K, router_gates="uniform", **settings))

    assert torch.equal(build(router_renormalize="none")(x).gates, torch.full((6, K), 1 / E))
    assert torch.equal(build(router_activation="sigmoid")(x).gates, torch.full((6, K), 1 / K))
    as_they_are = build(router_activation="sigmoid", router_renormalize="none")
    # Σ(0), however many experts there are
    assert torch.equal(as_they_are(x).gates, torch.full((6, K), 0.5))
    padding = torch.arange(6) > 3
    assert build()(x, padding).gates.sum(1).tolist() == [1, 1, 1, 1, 0, 0]


def test_a_frozen_router_stays_random():
    module = moa(router_choice="frozen")
    x = rows()
    out, _ = module(x, x, x)
    before = module.router.projection.weight.clone()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    out.sum().backward()
    optimizer.step()
    assert module.router.projection.weight.grad is None
    assert torch.equal(module.router.projection.weight, before)
    assert "router.projection.weight" in module.state_dict()
    assert not torch.equal(module.q_experts.weight, moa().q_experts.weight)


def test_all_sets_of_experts_are_equally_likely_and_modules_differ():
    one, other = (
        TopKRouter(C, MoASettings(E, K, router_choice="hash")).token_hash for _ in range(2)
    )
    ids = torch.arange(20_000).view(100, 200)
    first = one(ids)
    second = other(ids)
    assert (first[:, 0] != first[:, 1]).all()
    pairs = torch.bincount(first[:, 0] * E + first[:, 1], minlength=E * E).view(E, E)
    off_diagonal = pairs[~torch.eye(E, dtype=torch.bool)]
    assert (off_diagonal - 1000).abs().max() < 5 * 1000**0.5  # 20 ordered pairs, 1,000 each
    same = (first[:, 0] == second[:, 0]).double().mean()
    assert abs(float(same) - 1 / E) < 0.02


def test_a_hash_is_saved_and_copied_with_its_module():
    module = moa(router_choice="hash")
    fresh = moa(router_choice="hash")
    fresh.router.reset_parameters()
    x = rows()
    fresh.load_state_dict(module.state_dict())
    with forward_context(token_ids=IDS):
        expected = module(x, x, x)[0]
        assert torch.equal(fresh(x, x, x)[0], expected)
        assert torch.equal(copy.deepcopy(module)(x, x, x)[0], expected)
    assert module.half().router.token_hash.salt.dtype == torch.int64
    assert torch.equal(scramble(torch.tensor([5])), torch.tensor([equations.splitmix(5)]))


def test_a_hash_needs_the_ids():
    module = moa(router_choice="hash")
    x = rows()
    with pytest.raises(UserError, match="router_choice hash"):
        module(x, x, x)
    with (
        forward_context(token_ids=IDS[:, :0].new_zeros(3, 4)),
        pytest.raises(UserError, match="router_choice hash"),
    ):
        module(x, x, x)
