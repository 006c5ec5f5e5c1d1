import math
from dataclasses import replace

import pytest
import torch

from moa_fairseq.attention.losses import BALANCE_LOSSES, load_balance_loss, mutual_information_loss, z_loss
from moa_fairseq.attention.routers import ACTIVATIONS, TopKRouter
from moa_fairseq.attention.routing import RoutingDecision


def decide(logits, per_token, padding=None):
    probs = torch.softmax(logits, -1)
    gate, index = probs.topk(per_token, -1)
    return RoutingDecision(index, gate, probs, logits, probs.size(1), padding_mask=padding)


def test_z_loss_survives_large_logits():
    assert torch.isfinite(z_loss(decide(torch.full((2, 3), 1e4), 1)))


def test_padding_is_ignored_whatever_it_contains():
    g = torch.Generator().manual_seed(2)
    real = torch.randn(6, 4, generator=g)
    padding = torch.tensor([False] * 6 + [True] * 3)
    for content in (torch.randn(3, 4, generator=g), torch.full((3, 4), math.inf)):
        logits = torch.cat([real, content]).requires_grad_()
        plain = decide(real, 2)
        probs = torch.cat([plain.probs, torch.full((3, 4), 0.25)])
        padded = replace(decide(logits, 2, padding), probs=probs)
        torch.testing.assert_close(load_balance_loss(padded), load_balance_loss(plain))
        torch.testing.assert_close(z_loss(padded), z_loss(plain))
        assert torch.equal(padded.expert_counts, plain.expert_counts)
        z_loss(padded).backward()
        assert torch.isfinite(logits.grad).all() and (logits.grad[6:] == 0).all()


@pytest.mark.parametrize("name", [name for name in BALANCE_LOSSES if name != "none"])
def test_no_balance_loss_sees_padded_rows_that_are_not_a_number(name):
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 4, generator=g)
    padding = torch.tensor([False] * 6 + [True] * 3)
    plain, padded = decide(logits[:6], 2), decide(logits, 2, padding)
    spoilt = (x.masked_fill(padding.unsqueeze(1), math.nan) for x in (logits, padded.probs))
    padded = replace(padded, **dict(zip(("logits", "probs"), spoilt)))
    padded.probs.requires_grad_()
    plain.probs.requires_grad_()
    loss = BALANCE_LOSSES[name]
    torch.testing.assert_close(loss(padded), loss(plain))
    if name != "entropy":  # a function of the logits
        loss(padded).backward()
        loss(plain).backward()
        torch.testing.assert_close(padded.probs.grad[:6], plain.probs.grad)
        assert (padded.probs.grad[6:] == 0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("padding", [None, [True, True, True], [False, False, True]])
def test_probabilities_of_zero_leave_finite_gradients(activation, padding):
    """Of the mutual information: its slope must not become infinite times zero."""
    torch.manual_seed(0)
    router = TopKRouter(4, num_experts=3, experts_per_token=2, activation=activation)
    x = torch.randn(3, 4)
    x[2] *= 1e6  # its probabilities are 0 and 1 in float32
    x.requires_grad_()
    loss = mutual_information_loss(router(x, None if padding is None else torch.tensor(padding)))
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all() and router.projection.weight.grad.isfinite().all()
