import math
from dataclasses import replace

import pytest
import torch

from moa_fairseq.attention.load_statistics import load_statistics
from moa_fairseq.attention.losses import BALANCE_LOSSES, load_balance_loss, mutual_information_loss, z_loss
from moa_fairseq.attention.routing import RoutingDecision


def decide(logits, per_token, padding=None):
    probs = torch.softmax(logits, -1)
    gate, index = probs.topk(per_token, -1)
    return RoutingDecision(index, gate, probs, logits, probs.size(1), padding_mask=padding)


def test_load_balance_is_1_when_even_and_e_when_collapsed():
    even = torch.eye(4).repeat(3, 1) * 20
    collapsed = torch.zeros(9, 4)
    collapsed[:, 2] = 50.0
    assert math.isclose(load_balance_loss(decide(even, 1)).item(), 1.0, rel_tol=1e-4)
    assert math.isclose(load_balance_loss(decide(collapsed, 1)).item(), 4.0, rel_tol=1e-4)


def test_z_loss_is_equation_16_and_survives_large_logits():
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / 7
    assert math.isclose(z_loss(decide(logits, 2)).item(), expected, rel_tol=1e-9)
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


def test_padding_only_gives_zero_not_nan():
    decision = decide(torch.randn(3, 4), 2, torch.ones(3, dtype=torch.bool))
    assert load_balance_loss(decision).item() == 0.0 and z_loss(decision).item() == 0.0


def test_gradient_pushes_probability_away_from_the_loaded_expert():
    logits = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.2], [0.5, 0.0, 0.1]], requires_grad=True)
    load_balance_loss(decide(logits, 1)).backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1] < 0).all()


def test_statistics_of_an_even_and_a_collapsed_load():
    even = load_statistics(decide(torch.eye(4).repeat(2, 1), 1))
    assert math.isclose(even["load_entropy"].item(), math.log(4), rel_tol=1e-6)
    assert even["max_load"].item() == even["min_load"].item() == 0.25 and even["dead_experts"].item() == 0
    one = torch.zeros(5, 4)
    one[:, 1] = 9.0
    collapsed = load_statistics(decide(one, 1))
    assert collapsed["load_entropy"].item() == 0.0 and collapsed["max_load"].item() == 1.0
    assert collapsed["dead_experts"].item() == 3


def test_mutual_information_prefers_even_and_sure_to_collapsed():
    even = decide(torch.eye(4).repeat(3, 1) * 50, 1)
    collapsed = decide(torch.tensor([[50.0, 0, 0, 0]]).repeat(12, 1), 1)
    assert math.isclose(mutual_information_loss(even).item(), -math.log(4), rel_tol=1e-4)
    assert abs(mutual_information_loss(collapsed).item()) < 1e-4
    assert mutual_information_loss(decide(torch.ones(3, 4), 1, torch.ones(3, dtype=torch.bool))).item() == 0
