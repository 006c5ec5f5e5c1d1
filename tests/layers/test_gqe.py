"""GroupedQueryExperts as MoA, and its refusals. test_equations.py has its equations."""

import equations
import pytest
import torch
from time_first import GroupedQueryExperts, MixtureOfAttention

from moa_fairseq.errors import UserError
from moa_fairseq.layers.losses import load_balance_loss
from moa_fairseq.plugin.forward_context import collect_routings

C = 24
D = 6
G = 3
M = 4
K = 2


def build(**settings):
    torch.manual_seed(0)
    sizes = {
        "gqe_groups": G,
        "num_experts": M,
        "experts_per_token": K,
        "expert_dim": D,
        **settings,
    }
    return GroupedQueryExperts(C, **sizes).eval()


def padded(batch=3, length=7):
    x = torch.randn(length, batch, C)
    return x, torch.arange(length) >= torch.tensor([length, 4, 0])[:, None]


@pytest.mark.parametrize(("kdim", "positions"), [(None, None), (None, "rope"), (20, None)])
@pytest.mark.parametrize(
    ("renormalize", "per_token"),
    [("detached", 4), ("full", 8), ("none", 1)],
)
def test_one_group_without_a_shared_head_is_moa_bit_by_bit(
    renormalize, per_token, kdim, positions
):
    """4K8E48D: the same seed gives the same weights and outputs, and gradients but for the order of sums."""
    sizes = {"num_experts": 8, "experts_per_token": per_token, "expert_dim": 48}
    sizes.update(router_renormalize=renormalize, expert_bias=True)
    gqe = {"gqe_groups": 1, "gqe_shared_heads": 0, "gqe_output": "experts", **sizes}
    role = {"self_attention": True} if kdim is None else {"encoder_decoder_attention": True}
    role.update(dropout=0.2, kdim=kdim, vdim=kdim, positions=positions)
    results = []
    gradients = []
    macs = []
    for build_one, settings in ((GroupedQueryExperts, gqe), (MixtureOfAttention, sizes)):
        torch.manual_seed(5)
        module = build_one(C, **settings, **role)
        x, padding = padded()
        key = x if kdim is None else torch.randn(7, 3, kdim)
        leaves = [x.requires_grad_(), *module.parameters()]
        out, _ = module(x, key, key, key_padding_mask=padding, need_weights=False)
        results.append([out, *module.state_dict().values()])
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
        macs.append(module.macs(9, 7))
    assert macs[0] == macs[1]
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(ours, moas) for ours, moas in zip(*results))
    for ours, moas in zip(*gradients):
        torch.testing.assert_close(ours, moas)


@pytest.mark.parametrize(("renormalize", "total"), [("full", 1), ("detached", 1), ("none", G)])
def test_gates_of_all_heads_of_all_groups_are_renormalised(renormalize, total):
    """K = M selects nothing, but a token's gates still have one sum over the groups."""
    module = build(gqe_shared_heads=0, experts_per_token=M, router_renormalize=renormalize)
    with collect_routings() as routings:
        x, _ = padded()
        module(x, x, x)
    gates = routings[0][1].gates
    torch.testing.assert_close(gates.sum(-1), torch.full((len(gates),), float(total)))


def test_keys_and_values_of_two_widths():
    module = build(kdim=10, vdim=14, encoder_decoder_attention=False)
    query = torch.randn(5, 2, C)
    key = torch.randn(4, 2, 10)
    value = torch.randn(4, 2, 14)
    out, weights = module(query, key, value)
    assert out.shape == (5, 2, C) and weights.shape == (2, 5, 4)


def test_weights_stand_head_by_head_as_documented():
    module = build(self_attention=True).double()
    x = torch.randn(5, 2, C, dtype=torch.float64)
    out, weights = module(x, x, x, need_head_weights=True)
    same, none = module(x, x, x, need_weights=False)
    torch.testing.assert_close(out, same)
    assert weights.shape == (1 + G * K, 2, 5, 5) and none is None
    y = x.transpose(0, 1)
    _, index = equations.gqe_gates(module, y)
    keys = module.k_proj(y).unflatten(-1, (G, D)).transpose(1, 2)
    for group in range(G):
        number = (
            1 + group * M + index[:, :, group, 1]
        )  # of the second most probable head, [B, T]
        q = torch.einsum("btc,btdc->btd", y, module.q_experts.weight[number])
        expected = torch.softmax(q @ keys[:, group].transpose(1, 2) / D**0.5, -1)
        torch.testing.assert_close(
            weights[1 + G + group].double(), expected, rtol=1e-5, atol=1e-6
        )


def test_loads_count_each_group_and_leave_the_shared_head_out():
    module, (x, padding) = build(self_attention=True), padded()
    with collect_routings() as decisions:
        module(x, x, x, key_padding_mask=padding)
    decision = decisions[0][1]
    real = int((~padding).sum())
    assert decision.expert_counts.unflatten(0, (G, M)).sum(-1).tolist() == [real * K] * G
    load = decision.expert_counts.unflatten(0, (G, M)) / (real * K)
    probs = decision.probs[~padding.reshape(-1), 1:].unflatten(1, (G, M)).mean(0)
    torch.testing.assert_close(load_balance_loss(decision), M * (load * probs).sum(-1).mean())
    assert decision.gates[padding.reshape(-1)].abs().sum() == 0
    gates = decision.gates[~padding.reshape(-1)]
    # The shared head's and the others'
    torch.testing.assert_close(gates.sum(1), torch.full((real,), 2.0))


@pytest.mark.parametrize("output", ["paper", "weighted", "experts"])
def test_one_gate_that_is_always_one_is_not_trained(output):
    """One group, k = 1: p/p has no gradient. The remedy has the same values, and one."""
    sizes = {"gqe_groups": 1, "experts_per_token": 1, "gqe_output": output}
    constant = build(**sizes)
    remedy = build(**sizes, router_renormalize="detached")
    remedy.load_state_dict(constant.state_dict())
    x, _ = padded()
    # In evaluation nothing is refused
    torch.testing.assert_close(constant(x, x, x)[0], remedy(x, x, x)[0])
    with pytest.raises(UserError, match="router_renormalize detached"):
        constant.train()(x, x, x)
    remedy.train()(x, x, x)[0].square().sum().backward()
    assert remedy.router.projection.weight.grad.abs().sum() > 1e-2
    build(**{**sizes, "gqe_output": "hard"}).train()(x, x, x)  # has no gates at all


def test_its_cost():
    """Width 24, D 6: queries of 7 heads, 3 heads of keys and values, 8 slots; M·G rows of the router."""
    module = build(self_attention=True)
    bare = build(gqe_shared_heads=0, gqe_output="hard")
    macs = module.macs(10, 10)
    assert macs == {
        "router": 10 * C * 12,
        "projections": 10 * C * D * (7 + 6 + 8),
        "scores": 200 * 7 * D,
    }
    assert bare.macs(10, 10)["projections"] == 10 * C * D * (6 + 6 + 6)


@pytest.mark.parametrize(
    "settings, flag",
    [
        ({"gqe_groups": 0}, "gqe_groups is 0"),
        ({"gqe_shared_heads": 2}, "gqe_shared_heads 2"),
        ({"experts_per_token": 5}, "experts_per_token 5"),
        ({"expert_dim": 0}, "expert_dim"),
        ({"gqe_output": "soft"}, "gqe_output"),
        ({"self_attention": True, "positions": "xl"}, "positions='xl'"),
    ],
)
def test_impossible_settings_are_refused(settings, flag):
    with pytest.raises(UserError, match=flag):
        build(**settings)
