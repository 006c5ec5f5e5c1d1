import math

import pytest
import torch

from moa_fairseq.attention.load_statistics import load_statistics
from moa_fairseq.attention.losses import BALANCE_LOSSES, load_balance_loss, mutual_information_loss, z_loss
from moa_fairseq.attention.routing import RoutingDecision


def decide(logits, per_token, padding=None):
    probs = torch.softmax(logits, -1)
    gate, index = probs.topk(per_token, -1)
    return RoutingDecision(index, gate, probs, logits, probs.size(1), padding_mask=padding)


def test_load_balance_is_equation_13_written_out():
    logits = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
    decision = decide(logits, 2)
    f = [0.0] * 4
    for row in decision.expert_index.tolist():
        for expert in row:
            f[expert] += 1 / 22
    mass = decision.probs.sum(0)
    expected = 4 * sum(f[i] * (mass[i] / mass.sum()).item() for i in range(4))
    assert math.isclose(load_balance_loss(decision).item(), expected, rel_tol=1e-5)


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
        padded, plain = decide(logits, 2, padding), decide(real, 2)
        padded.probs = torch.cat([plain.probs, torch.full((3, 4), 0.25)])
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
    padded.logits = logits.masked_fill(padding.unsqueeze(1), math.nan)
    padded.probs = padded.probs.masked_fill(padding.unsqueeze(1), math.nan).requires_grad_()
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


def test_gradients_against_finite_differences():
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: load_balance_loss(decide(x, 2)), logits)
    assert torch.autograd.gradcheck(lambda x: z_loss(decide(x, 2)), logits)


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


def test_mutual_information_written_out():
    logits = torch.randn(7, 4, generator=torch.Generator().manual_seed(2))
    padding = torch.tensor([False, False, True, False, False, True, False])
    decision = decide(logits, 2, padding)
    rows = [row for row, pad in zip(decision.probs.tolist(), padding.tolist()) if not pad]
    mean = [sum(row[i] for row in rows) / len(rows) for i in range(4)]
    h_marginal = -sum(p * math.log(p) for p in mean)
    h_conditional = -sum(p * math.log(p) for row in rows for p in row) / len(rows)
    expected = h_conditional - h_marginal
    assert math.isclose(mutual_information_loss(decision).item(), expected, rel_tol=1e-5)
    assert expected < 0


def test_mutual_information_prefers_even_and_sure_to_collapsed():
    even = decide(torch.eye(4).repeat(3, 1) * 50, 1)
    collapsed = decide(torch.tensor([[50.0, 0, 0, 0]]).repeat(12, 1), 1)
    assert math.isclose(mutual_information_loss(even).item(), -math.log(4), rel_tol=1e-4)
    assert abs(mutual_information_loss(collapsed).item()) < 1e-4
    assert mutual_information_loss(decide(torch.ones(3, 4), 1, torch.ones(3, dtype=torch.bool))).item() == 0


def test_groups_are_judged_apart_and_shared_experts_not_at_all():
    one, other = torch.randn(9, 3), torch.randn(9, 3)
    first, second = decide(one, 1), decide(other, 1)
    both = RoutingDecision(
        torch.cat([first.expert_index, second.expert_index + 3], 1),
        torch.cat([first.gate, second.gate], 1),
        torch.cat([first.probs, second.probs], 1),
        torch.cat([first.logits, second.logits], 1),
        num_experts=6,
        groups=2,
    )
    shared = RoutingDecision(
        torch.cat([torch.zeros(9, 1, dtype=torch.long), first.expert_index + 1], 1),
        torch.cat([torch.ones(9, 1), first.gate], 1),
        torch.cat([torch.ones(9, 1), first.probs], 1),
        torch.cat([torch.full((9, 1), 30.0), first.logits], 1),
        num_experts=4,
        shared=1,
    )
    for loss in (load_balance_loss, mutual_information_loss, z_loss):
        torch.testing.assert_close(loss(both), (loss(first) + loss(second)) / 2)
        torch.testing.assert_close(loss(shared), loss(first))
    for key, value in load_statistics(first).items():
        torch.testing.assert_close(load_statistics(shared)[key], value)
