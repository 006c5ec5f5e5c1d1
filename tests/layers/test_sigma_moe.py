"""sigma-MoE against a dense sum over all experts, its entropy regulariser, and its place in a layer."""

import math

import pytest
import torch

from moa_fairseq.errors import UserError
from moa_fairseq.layers.losses import BALANCE_LOSSES
from moa_fairseq.layers.sigma_moe import SigmaMoE, SigmaMoESettings
from moa_fairseq.layers.sigmoid_router import SigmoidTopKRouter
from moa_fairseq.plugin.fairseq_call import FairseqSigmaMoE
from moa_fairseq.plugin.forward_context import collect_routings, forward_context

C = 12
E = 6
K = 3
D = 5


def build(backend="grouped", kind=SigmaMoE, **sizes):
    torch.manual_seed(0)
    sizes = {"num_experts": E, "experts_per_token": K, "expert_dim": D, **sizes}
    settings = SigmaMoESettings(**{f"sigma_moe_{name}": size for name, size in sizes.items()})
    module = kind(C, settings, expert_backend=backend)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module


def exact(module, x, padding=None):
    p = {name: parameter.double() for name, parameter in module.named_parameters()}
    s = torch.sigmoid(x.double() @ p["router.projection.weight"].t())
    s = s * torch.zeros_like(s).scatter(-1, s.topk(module.experts_per_token, -1).indices, 1.0)
    if padding is not None:
        s = s * ~padding.t().unsqueeze(-1)
    inner = torch.relu(torch.einsum("tbc,edc->tbed", x.double(), p["up.weight"]))
    return torch.einsum("tbe,tbed,edc->tbc", s, inner, p["down.weight"])


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((7, 3), {}),
        ((1, 1), {}),
        ((5, 2), {"experts_per_token": 1}),
        ((5, 2), {"experts_per_token": E}),
        ((5, 2), {"num_experts": 1, "experts_per_token": 1}),
        ((2, 1), {"num_experts": 40}),
    ],
)
def test_output_and_every_gradient_equal_the_dense_sum(shape, sizes, backend):
    module = build(backend, **sizes)
    x = torch.randn(*shape, C, requires_grad=True)
    upstream = torch.randn(*shape, C)
    inputs = [x, *module.parameters()]
    out = module(x)
    expected = exact(module, x)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(out, inputs, upstream)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, inputs, upstream.double())):
        torch.testing.assert_close(grad, wanted.to(grad.dtype), rtol=1e-3, atol=1e-4)


def test_padding_gives_zeros_and_counts_for_nothing():
    # [T, B, C]
    module = build()
    x = torch.randn(4, 2, C)
    padding = torch.tensor([[False] * 4, [False, True, True, True]])
    expected = exact(module, x, padding)
    out, (routing,) = module(x.transpose(0, 1), padding, with_routing=True)
    with forward_context(padding=padding), collect_routings() as named:
        in_fairseq = build(kind=FairseqSigmaMoE)(x)
    ((_, recorded),) = named
    for found, of in ((out.transpose(0, 1), routing), (in_fairseq, recorded)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        assert of.auxiliary and of.expert_counts.sum() == 5 * K


def test_the_entropy_regulariser_by_hand():
    """−H of the mean softmax over real tokens, with its gradient; even routing is its minimum, −log E."""
    router = SigmoidTopKRouter(C, E, K)
    x = torch.randn(9, C)
    padding = torch.tensor([False] * 7 + [True] * 2)
    loss = BALANCE_LOSSES["entropy"](router(x, padding))
    weight = router.projection.weight
    mean = torch.softmax(x[:7].double() @ weight.double().t(), -1).mean(0)
    expected = (mean * mean.log()).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, weight)
    torch.testing.assert_close(grad, wanted.float(), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        weight.zero_()
    assert BALANCE_LOSSES["entropy"](router(x)).item() == pytest.approx(-math.log(E), rel=1e-5)


def test_all_padding_has_a_finite_regulariser():
    routing = SigmoidTopKRouter(C, E, K)(torch.randn(3, C), torch.ones(3, dtype=torch.bool))
    assert BALANCE_LOSSES["entropy"](routing).item() == 0.0


def test_costs():
    assert build().macs(7) == {"router": 7 * C * E, "projections": 7 * 2 * K * D * C}
    with pytest.raises(UserError, match="sigma_moe_experts_per_token 7"):
        build(experts_per_token=7)
    with pytest.raises(UserError, match=r"sigma_moe_num_experts .*-1"):
        build(num_experts=-1)
    with pytest.raises(UserError, match="sigma_moe_expert_dim"):
        build(expert_dim=0)
