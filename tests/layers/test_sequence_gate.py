"""The gate, its statistics, its inputs' means, and the draw of experts."""

import copy
import math

import pytest
import torch

from moa_fairseq.layers.expert_draw import ExpertDraw
from moa_fairseq.layers.input_mean import running_mean, sequence_mean
from moa_fairseq.layers.running_statistics import update_running_statistics
from moa_fairseq.layers.sequence_gate import SequenceGate


def test_layers_are_the_papers():
    gate = SequenceGate(512, 8)
    assert sum(p.numel() for p in gate.parameters()) == 2 * 512 + 512 * 256 + 256 + 256 * 8 + 8
    x = torch.randn(5, 512)
    gate.eval()
    probs, logits = gate(x)
    normal = (x - gate.norm.running_mean) / (gate.norm.running_var + gate.norm.eps).sqrt()
    expected = gate.fc2(torch.tanh(gate.fc1(normal * gate.norm.weight + gate.norm.bias)))
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(probs, expected.softmax(-1))


def test_a_frozen_gate_learns_by_what_is_added_to_it():
    gate = SequenceGate(6, 4).requires_grad_(False)
    assert not gate.learns
    gate.fc1.adapter = torch.nn.Linear(6, 2)
    assert gate.learns and not gate.eval().learns


def test_dropout_follows_the_first_layer_while_the_gate_learns():
    gate = SequenceGate(6, 4, hidden_dim=1000, dropout=0.4)
    x = torch.randn(3, 6)
    assert not torch.equal(gate(x)[1], gate(x)[1])
    gate.requires_grad_(False)
    assert gate.norm.has_pending and not gate.norm.forget()
    assert torch.equal(gate(x)[1], gate(x)[1])
    assert gate.norm.has_pending  # it observes nevertheless
    torch.testing.assert_close(gate(x)[1], gate.eval()(x)[1])


def test_statistics_are_those_of_earlier_updates_over_all_workers_and_micro_batches():
    torch.manual_seed(0)
    x = torch.randn(64, 5) * torch.tensor([1.0, 2, 3, 4, 5]) + 7
    real = torch.arange(64) < 60
    whole, parts = (SequenceGate(5, 4, dropout=0.0).train() for _ in range(2))
    parts.load_state_dict(whole.state_dict())
    before = whole(x, real)[0]
    torch.testing.assert_close(before, whole.eval()(x)[0])  # a batch does not normalise itself
    for rows in (slice(0, 20), slice(20, 64)):
        parts(x[rows], real[rows])
    for gate in (whole, parts):
        update_running_statistics([gate.norm])
        # half of the first update, half of the prior 0 and 1
        torch.testing.assert_close(gate.norm.running_mean, x[:60].mean(0) / 2)
        torch.testing.assert_close(
            gate.norm.running_var, (x[:60].var(0, unbiased=False) + 1) / 2
        )
        assert not gate.norm.pending.any() and not gate.norm.has_pending
    for _ in range(200):
        parts(x[:60])
        update_running_statistics([parts.norm])
    normalised = torch.nn.functional.batch_norm(x[:60], None, None, training=True)
    torch.testing.assert_close(parts.norm(x[:60]), normalised, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(parts.norm.running_mean, x[:60].mean(0), rtol=1e-4, atol=1e-4)
    update_running_statistics([parts.norm])  # nothing was seen
    torch.testing.assert_close(parts.norm.running_mean, x[:60].mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sums", ["no row on any worker", "overflowed"])
def test_an_update_without_usable_observations_changes_no_statistics(sums):
    norm = SequenceGate(5, 4).train().norm
    norm.observe(torch.rand(11) + 1)
    update_running_statistics([norm])
    before = copy.deepcopy(norm.state_dict())
    norm.update(torch.full((11,), math.inf if sums == "overflowed" else 0.0))
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_batchs_own_statistics_are_batch_normalisation():
    """torch's, with gradients, over the real rows, while the gate learns; else the running statistics."""
    torch.manual_seed(0)
    gate = SequenceGate(5, 4, dropout=0.0, norm="batch").double()
    reference = torch.nn.BatchNorm1d(5).double()
    x = (torch.randn(9, 5, dtype=torch.float64) * 3 + 7).requires_grad_()
    real = torch.arange(9) < 6
    out = gate.norm(x, real, observe=True, own=gate.learns)[:6]
    expected = reference(x[:6])
    torch.testing.assert_close(out, expected)
    upstream = torch.randn(6, 5, dtype=torch.float64)
    inputs = ([x, gate.norm.weight, gate.norm.bias], [x, reference.weight, reference.bias])
    for one, other in zip(
        *(torch.autograd.grad(o, i, upstream) for o, i in zip((out, expected), inputs)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    update_running_statistics([gate.norm])
    torch.testing.assert_close(gate.norm.running_mean, x[:6].mean(0).detach() / 2)
    evaluated = gate.eval()(x, real)[0]
    single = gate.train()(x[:1])[0]  # one row has no statistics of its own
    torch.testing.assert_close(single, evaluated[:1])
    gate.requires_grad_(False)
    torch.testing.assert_close(gate(x, real)[0], evaluated)
    assert not torch.allclose(gate.requires_grad_(True)(x, real)[0], evaluated)


def test_a_sum_over_workers_is_used():
    gates = [SequenceGate(3, 4).train() for _ in range(2)]
    gates[0](torch.ones(4, 3))
    update_running_statistics(
        [gate.norm for gate in gates], all_reduce=lambda flat: flat.add_(flat.clone())
    )
    assert gates[0].norm.running_mean.tolist() == [0.5] * 3
    assert gates[1].norm.num_batches_tracked == 0  # saw nothing


@pytest.mark.parametrize("cast", ["half", "bfloat16"])
def test_the_gate_stays_in_float32(cast):
    gate = SequenceGate(8, 4)
    model = getattr(torch.nn.Sequential(gate, torch.nn.Linear(2, 2)), cast)()
    weight = gate.fc1.weight.clone()
    assert model[1].weight.dtype != torch.float32
    assert {t.dtype for t in gate.state_dict().values()} == {torch.float32, torch.int64}
    assert torch.equal(gate.fc1.weight, weight)
    assert gate(torch.randn(2, 8).to(model[1].weight.dtype))[0].dtype == torch.float32
    assert gate.double().fc1.weight.dtype == torch.float64


def literal_means(x, padding, window):
    """One position after the other, in float64."""
    means = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.size(0)):
        for end in range(x.size(1)):
            seen = range(max(0, end + 1 - (window or end + 1)), end + 1)
            real = [x[row, i].double() for i in seen if padding is None or not padding[row, i]]
            if real:
                means[row, end] = torch.stack(real).mean(0)
    return means


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 12, 13, 14, 50, None])
def test_means_of_a_window(window, padded):
    x = torch.randn(2, 13, 5, generator=torch.Generator().manual_seed(1))
    padding = (
        torch.rand(2, 13, generator=torch.Generator().manual_seed(2)) < 0.4 if padded else None
    )
    expected = literal_means(x, padding, window)
    torch.testing.assert_close(
        running_mean(x.double(), padding, window), expected, rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(
        running_mean(x, padding, window), expected.float(), rtol=1e-5, atol=1e-6
    )
    if window is None:
        torch.testing.assert_close(sequence_mean(x.double(), padding), expected[:, -1])
    for sizes in ([1] * 13, [4, 1, 1, 7], [9, 4]):
        cache = {}
        parts = []
        start = 0
        for size in sizes:
            step = slice(start, start + size)
            mask = None if padding is None else padding[:, step]
            parts.append(running_mean(x[:, step], mask, window, cache))
            start += size
        torch.testing.assert_close(torch.cat(parts, 1), expected.float(), rtol=1e-5, atol=1e-6)


def test_means_of_bfloat16_are_counted_in_float32():
    """A bfloat16 cannot count beyond 256."""
    x = (1 + torch.arange(300) / 150).bfloat16().reshape(1, 300, 1)
    cache = {}
    steps = [running_mean(x[:, i : i + 1], None, None, cache) for i in range(300)]
    expected = literal_means(x, None, None).float()
    for means in (torch.cat(steps, 1), running_mean(x, None)):
        torch.testing.assert_close(means, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("large", [1e7, 3e38, math.inf, math.nan])
@pytest.mark.parametrize("stepwise", [False, True])
def test_what_has_left_the_window_leaves_no_trace(stepwise, large):
    window = 4
    x = torch.randn(1, 30, 3, generator=torch.Generator().manual_seed(1))
    spoilt = x.clone()
    spoilt[0, 5] = large
    if stepwise:
        cache = {}
        got = torch.cat(
            [running_mean(spoilt[:, i : i + 1], None, window, cache) for i in range(30)], 1
        )
    else:
        got = running_mean(spoilt, None, window)
    clean = torch.tensor([not 5 <= i < 5 + window for i in range(30)])
    expected = literal_means(x, None, window).float()
    torch.testing.assert_close(got[:, clean], expected[:, clean], rtol=1e-5, atol=1e-6)
    reached = literal_means(spoilt, None, window).float()[:, ~clean]
    torch.testing.assert_close(got[:, ~clean], reached, equal_nan=True)


def test_draws_follow_the_gate():
    """Chi-square over 20,000 sequences at a fixed seed: 99.9 % quantile for 7 degrees of freedom, 24.3."""
    n = 20000
    gate = torch.tensor([0.3, 0.02, 0.08, 0.2, 0.1, 0.15, 0.05, 0.1]).repeat(n, 1)
    for seed, update, name in (
        (1, 0, "encoder.layers.0.self_attn"),
        (1, 1, "b"),
        (7, 10**6, "decoder.c"),
    ):
        chosen = ExpertDraw(torch.arange(n), seed, update).choose(name, gate)
        observed = torch.bincount(chosen, minlength=8).double()
        expected = gate[0].double() * n
        assert ((observed - expected) ** 2 / expected).sum() < 24.3


def walk(length, sequences, experts, seed=0):
    """Gates that change a little from position to position, [B, T, E], as a causal one's do."""
    g = torch.Generator().manual_seed(seed)
    steps = torch.randn(sequences, length, experts, generator=g) * 0.1
    return (torch.randn(sequences, 1, experts, generator=g) + steps.cumsum(1)).softmax(-1)


def inverse_cdf(draw, name, probs):
    """The coupling by one number per sequence: whose stretch of the cumulated probabilities contains it."""
    return (
        (probs.cumsum(-1) <= draw.uniform(name)[:, None, None])
        .sum(-1)
        .clamp_max(probs.size(-1) - 1)
    )


@pytest.mark.parametrize("experts", [8, 28])
def test_an_expert_changes_along_a_sequence_as_little_as_the_gate_lets_it(experts):
    probs = walk(30, 4000, experts)
    draw = ExpertDraw(torch.arange(4000), 1, 3)
    chosen = draw.choose("decoder.a", probs)
    other = inverse_cdf(draw, "decoder.a", probs)
    # every position's expert still follows that position's gate (99.9 % quantiles of chi-square)
    for position in (0, 11, 29):
        expected = probs[:, position].double().sum(0)
        observed = torch.bincount(chosen[:, position], minlength=experts).double()
        assert ((observed - expected) ** 2 / expected).sum() < {8: 24.3, 28: 55.5}[experts]
    distance = (probs[:, 1:] - probs[:, :-1]).abs().sum(
        -1
    ) / 2  # in total variation: no coupling flips less
    flips, worse = (
        (index[:, 1:] != index[:, :-1]).double().mean() for index in (chosen, other)
    )
    assert distance.mean() < flips < (2 * distance / (1 + distance)).mean() * 1.03
    assert flips < worse / 1.5
    still = probs[:, :1].expand(-1, 30, -1)
    assert torch.equal(draw.choose("b", still), draw.choose("b", still[:, :1]).expand(-1, 30))


def test_an_expert_without_probability_is_never_drawn():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5]).repeat(20000, 1)
    assert set(ExpertDraw(torch.arange(20000), 1, 1).choose("a", probs).tolist()) == {1, 3}


def test_draws_depend_on_seed_update_sequence_and_module_only():
    ids = torch.tensor([3, 14, 15, 92, 65])
    draw = ExpertDraw(ids, seed=1, update=5)
    u = draw.uniform("a")
    assert ((u >= 0) & (u < 1)).all() and u.unique().numel() == 5
    assert torch.equal(ExpertDraw(ids.flip(0), 1, 5).uniform("a").flip(0), u)
    assert torch.equal(ExpertDraw(ids[2:3], 1, 5).uniform("a"), u[2:3])
    for other in (ExpertDraw(ids, 2, 5), ExpertDraw(ids, 1, 6), ExpertDraw(ids + 1, 1, 5)):
        assert not torch.isclose(other.uniform("a"), u, atol=1e-3).any()
    assert not torch.isclose(draw.uniform("b"), u, atol=1e-3).any()
    one = ExpertDraw(ids, 1, 6).uniform("a")
    other = ExpertDraw(ids, 2, 5).uniform("a")
    assert not torch.isclose(
        one, other, atol=1e-3
    ).any()  # the next seed is not the next update
    many = torch.stack([ExpertDraw(torch.arange(4000), 1, n).uniform("a") for n in range(4)])
    assert torch.corrcoef(many).fill_diagonal_(0).abs().max() < 0.06  # 4 standard errors
    with pytest.raises(ValueError, match="5 sequence ids for 4 sequences"):
        draw.choose("a", torch.full((4, 8), 1 / 8))
