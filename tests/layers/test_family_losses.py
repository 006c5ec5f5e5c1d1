"""Which losses belong to which family, with which coefficients, and what another family's routing gets."""

from functools import partial

import pytest
import torch
from torch import nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers import (
    DenseAttention,
    GroupedQueryExperts,
    LatentAttention,
    MixtureOfAttention,
    MixtureOfAttentiveExperts,
    MixtureOfHeads,
    NativeMixtureOfHeads,
    SwitchHeadAttention,
    load_balance_loss,
    losses_for,
    z_loss,
)
from moa_fairseq.layers.losses import (
    BALANCE_LOSSES,
    OF_ANY_FAMILY,
    entropy_loss,
    head_balance_loss,
)
from moa_fairseq.layers.sigma_moe import SigmaMoE, SigmaMoESettings

C = 12
B = 2
T = 6
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_dim": 5}
MOH = partial(MixtureOfHeads, C, 4, moh_shared_heads=1, experts_per_token=2)
SIGMA = SigmaMoESettings(
    sigma_moe_num_experts=4, sigma_moe_experts_per_token=2, sigma_moe_expert_dim=3
)
BUILD = {
    "MoA": partial(MixtureOfAttention, C, **EXPERTS),
    "GQE": partial(GroupedQueryExperts, C, gqe_groups=2, **EXPERTS),
    "NAMOH": partial(NativeMixtureOfHeads, C, **EXPERTS),
    "MoH": MOH,
    "MoH, released": partial(MOH, moh_scaling="released"),
    "MoH, norms": partial(MOH, moh_router="query-norm"),
    "SwitchHead": partial(SwitchHeadAttention, C, switchhead_heads=2, **EXPERTS),
    "MAE": partial(MixtureOfAttentiveExperts, C, 4),
    "dense": partial(DenseAttention, C, 4),
    "latent": partial(LatentAttention, C, 4),
    "sigma-MoE": partial(SigmaMoE, C, SIGMA),
}


def passed(name, layers=1):
    torch.manual_seed(0)
    model = nn.ModuleList(BUILD[name]() for _ in range(layers)).double()
    x = torch.randn(B, T, C, dtype=torch.float64)
    return model, [routing for layer in model for routing in layer(x, with_routing=True)[1]]


def by_hand(name, routings):
    """The papers' formulas, token by token, of routed experts or heads."""
    total = 0.0
    for routing in routings:
        routed = slice(routing.shared, None)
        probs = routing.probs[:, routed]
        logits = routing.logits[:, routed]
        count = (
            torch.zeros_like(probs)
            .scatter_(1, routing.expert_ids[:, routed] - routing.shared, 1.0)
            .sum(0)
        )
        if name in ("MoA", "GQE", "NAMOH"):
            groups = count.view(routing.groups, -1), probs.sum(0).view(routing.groups, -1)
            f, p = (each / each.sum(1, keepdim=True) for each in groups)
            total += 0.01 * f.size(1) * (f * p).sum(1).mean()
        if name == "MoA":
            total += 0.001 * torch.logsumexp(logits, 1).square().mean()
        if name.startswith("MoH"):
            loss = (count / (B * T) * probs.mean(0)).sum()
            total += 0.01 * loss * (probs.size(1) / len(routings) if "released" in name else 1)
        if name == "sigma-MoE":
            mean = torch.softmax(logits, 1).mean(0)
            total += 0.001 * (mean * mean.log()).sum()
    return torch.as_tensor(total, dtype=torch.float64)


@pytest.mark.parametrize("name", BUILD)
def test_the_papers_losses_with_their_coefficients(name):
    model, routings = passed(name, layers=3)
    loss = losses_for(model)(routings)
    torch.testing.assert_close(loss.double(), by_hand(name, routings))
    one, of_one = passed(name)
    torch.testing.assert_close(losses_for(one[0])(of_one).double(), by_hand(name, of_one))
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        assert any(grad is not None and grad.any() for grad in grads)


def test_the_mean_of_moh_is_over_layers_of_all_sizes():
    model, routings = passed("MoH, released", layers=2)
    larger = MixtureOfHeads(
        C, 6, moh_shared_heads=2, experts_per_token=4, moh_scaling="released"
    )
    x = torch.randn(B, T, C, dtype=torch.float64)
    routings += larger.double()(x, with_routing=True)[1]
    loss = losses_for(nn.ModuleList([*model, larger]))(routings)
    torch.testing.assert_close(loss.double(), by_hand("MoH, released", routings))


def test_families_side_by_side():
    names = ["MoA", "MoH", "SwitchHead", "sigma-MoE", "dense"]
    parts = [passed(name) for name in names]
    losses = losses_for(nn.ModuleList(model for model, _ in parts))
    together = losses([routing for _, routings in parts for routing in routings])
    torch.testing.assert_close(
        together.double(),
        sum(by_hand(name, routings) for name, (_, routings) in zip(names, parts)),
    )
    assert set(losses.terms) == {"MoA", "MoH", "SwitchHead", "sigma-MoE"} and "z_loss" in repr(
        losses
    )
    with pytest.raises(ValueError, match=r"GQE.*MoA, MoH"):
        losses(passed("GQE")[1])


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (load_balance_loss, "MoH"),
        (load_balance_loss, "SwitchHead"),
        (load_balance_loss, "MAE"),
        (head_balance_loss, "MoA"),
        (entropy_loss, "NAMOH"),
        (z_loss, "sigma-MoE"),
    ],
)
def test_a_loss_refuses_the_routing_of_another_family(loss, name):
    _, (routing, *_) = passed(name)
    with pytest.raises(ValueError, match=rf"{loss.__name__} .*{name}.*losses_for"):
        loss(routing)
    assert OF_ANY_FAMILY[loss.__name__](routing).isfinite()
    assert all(each(routing).isfinite() for each in BALANCE_LOSSES.values())


def test_models_without_losses_of_one_meaning_are_refused():
    with pytest.raises(UserError, match="Linear"):
        losses_for(nn.Linear(2, 2))
    with pytest.raises(UserError, match="moh_scaling"):
        losses_for(nn.ModuleList([MOH(), MOH(moh_scaling="released")]))


def test_routings_of_another_shape_are_refused():
    model, routings = passed("MoA")
    losses = losses_for(model)
    assert losses(routings) > 0
    with pytest.raises(TypeError, match=r"tuple .*flat list"):
        losses([tuple(routings)])
    for one in (tuple(routings), routings):
        with pytest.raises(TypeError, match=f"load_balance_loss .*{type(one).__name__}"):
            load_balance_loss(one)
    with pytest.raises(ValueError, match="with_routing=True"):
        losses([])
    assert losses_for(passed("dense")[0])([]) == 0


@pytest.mark.parametrize(
    "layer",
    [
        partial(DenseAttention, C, 4),
        partial(
            SwitchHeadAttention, C, switchhead_heads=2, expert_dim=5, switchhead_experts="none"
        ),
    ],
)
def test_a_layer_without_losses_may_have_no_routings(layer):
    layer = layer(self_attention=True)
    _, routings = layer(torch.randn(B, T, C), with_routing=True)
    assert routings == () and losses_for(layer)(routings) == 0
