"""Losses and statistics of many decisions at once: those of each one, and their equations in float64."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moa_fairseq.layers.load_statistics import load_statistics
from moa_fairseq.layers.losses import (
    BALANCE_LOSSES,
    load_balance_loss,
    mutual_information_loss,
    z_loss,
)
from moa_fairseq.layers.moa import MoASettings
from moa_fairseq.layers.routers import ACTIVATIONS, TopKRouter
from moa_fairseq.layers.routing import Routing, RoutingSums, _SquaredLogSumExp


def decide(
    tokens, experts=4, chosen=2, groups=1, shared=0, padded=0, seed=0, dtype=torch.float32
):
    """A random decision of `groups` times `experts` experts, with `shared` ones before them."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(
        tokens, shared + groups * experts, generator=g, dtype=dtype
    ).requires_grad_()
    free = logits[:, shared:].view(tokens, groups, experts)
    probs = torch.cat([logits.new_ones(tokens, shared), torch.softmax(free, -1).flatten(1)], 1)
    index = probs[:, shared:].view(free.shape).topk(chosen, -1).indices
    if chosen == experts:
        index = torch.arange(experts).expand(free.shape)
    index = (index + shared + torch.arange(groups).unsqueeze(1) * experts).flatten(1)
    index = torch.cat([torch.arange(shared).expand(tokens, -1), index], 1)
    mask = (torch.arange(tokens) >= tokens - padded) if padded else None
    sizes = dict(num_experts=probs.size(1), groups=groups, shared=shared)
    return Routing(index, probs.gather(1, index), probs, logits, **sizes, padding=mask)


def by_hand(d):
    """MoA Eq. 13-16, SUT Eq. 8 and the statistics, one number after the other."""
    size = (d.num_experts - d.shared) // d.groups
    rows = [i for i in range(d.probs.size(0)) if d.padding is None or not d.padding[i]]
    balance = z = information = 0.0
    all_counts = []
    for group in range(d.groups):
        first = d.shared + group * size
        experts = range(first, first + size)
        counts = [sum(int(e in d.expert_ids[n].tolist()) for n in rows) for e in experts]
        probs = [[d.probs[n, e].item() for e in experts] for n in rows]
        summed_probability = [sum(p[i] for p in probs) for i in range(size)]
        if rows:
            shares = zip(counts, summed_probability)
            balance += (
                size
                * sum(c / sum(counts) * m / sum(summed_probability) for c, m in shares)
                / d.groups
            )
            lse = [
                math.log(sum(math.exp(d.logits[n, e].item()) for e in experts)) for n in rows
            ]
            z += sum(v * v for v in lse) / len(rows) / d.groups
            sure = -sum(p * math.log(p) for row in probs for p in row) / len(rows)
            even = -sum(m / len(rows) * math.log(m / len(rows)) for m in summed_probability)
            information += (sure - even) / d.groups
        all_counts += counts
    share = [c / max(sum(all_counts), 1) for c in all_counts]
    return {
        "load_balance_loss": balance,
        "z_loss": z,
        "mutual_information_loss": information,
        "load_entropy": -sum(s * math.log(s) for s in share if s),
        "max_load": max(share),
        "min_load": min(share),
        "dead_experts": all_counts.count(0),
    }


def computed(routed):
    losses = (load_balance_loss, mutual_information_loss, z_loss)
    return {**{loss.__name__: loss(routed) for loss in losses}, **load_statistics(routed)}


KINDS = {
    "top 2 of 4": {},
    "all of 4": dict(chosen=4),
    "one of 7": dict(experts=7, chosen=1),
    "2 groups": dict(groups=2),
    "shared": dict(shared=2),
    "groups and shared": dict(groups=3, shared=1, chosen=1),
}
# (tokens, of which padding): encoder and decoder differ, one is without padding, one is nothing else
LENGTHS = [(9, 2), (5, 1), (9, 0), (1, 0), (9, 9), (5, 0)]


def lengths_of(kind):
    return [
        decide(tokens, padded=padded, seed=seed, dtype=torch.float64, **KINDS[kind])
        for seed, (tokens, padded) in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_many_are_the_equations_of_each(kind):
    decisions = lengths_of(kind)
    (sums,) = RoutingSums.by_kind(decisions)
    assert sorted(sums.order) == list(range(len(decisions)))
    together = computed(sums)
    for row, place in enumerate(sums.order):
        expected = by_hand(decisions[place])
        alone = computed(decisions[place])
        for key, value in expected.items():
            assert together[key][row].item() == pytest.approx(value, rel=1e-9, abs=1e-12), (
                key,
                place,
            )
            assert alone[key].shape == () and alone[key].item() == pytest.approx(
                value, rel=1e-9, abs=1e-12
            )


@pytest.mark.parametrize("loss", [load_balance_loss, mutual_information_loss, z_loss])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_many_are_those_of_each(kind, loss):
    weights = [1.0, 2.0, -3.0, 0.5, 1.0, 1.5]
    together = lengths_of(kind)
    apart = lengths_of(kind)
    (sums,) = RoutingSums.by_kind(together)
    (loss(sums) * torch.tensor([weights[place] for place in sums.order])).sum().backward()
    sum(weight * loss(decision) for weight, decision in zip(weights, apart)).backward()
    for one, other in zip(together, apart):
        torch.testing.assert_close(one.logits.grad, other.logits.grad, rtol=1e-9, atol=1e-12)
        assert one.logits.grad.isfinite().all()

    def of(logits):  # of one decision, against finite differences
        free = logits.view(4, 2, 3)
        probs = torch.softmax(free, -1).flatten(1)
        index = torch.tensor([[0, 3], [1, 4], [0, 5], [2, 3]])
        mask = torch.tensor([False, False, True, False])
        return loss(Routing(index, probs, probs, logits, 6, groups=2, padding=mask))

    g = torch.Generator().manual_seed(1)
    assert torch.autograd.gradcheck(
        of, torch.randn(4, 6, generator=g, dtype=torch.float64, requires_grad=True)
    )


@pytest.mark.parametrize("padding", [None, torch.tensor([False, True])])
def test_gradients_that_are_differentiated_are_the_gradients(padding):
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    once, again = (
        torch.autograd.grad(_SquaredLogSumExp.apply(x, padding)[0], x, create_graph=twice)[0]
        for twice in (False, True)
    )
    torch.testing.assert_close(again, once)
    assert again.requires_grad


def test_kinds_are_kept_apart_and_in_their_places():
    one_is_shared = dict(
        experts=3, chosen=1, shared=1
    )  # of 4 experts a token has 2, as in the first
    shapes = [dict(), dict(experts=7), dict(), dict(chosen=4), dict(experts=7), one_is_shared]
    decisions = [decide(6, seed=seed, **shape) for seed, shape in enumerate(shapes)]
    kinds = RoutingSums.by_kind(decisions)
    assert [sums.order for sums in kinds] == [[0, 2], [1, 4], [3], [5]]
    for loss in BALANCE_LOSSES.values():
        for sums in kinds:
            alone = torch.stack([loss(decisions[place]) for place in sums.order])
            torch.testing.assert_close(loss(sums), alone)


def test_sums_are_exact_under_autocast():
    """Half precision would count 257 tokens as 256."""
    decision = decide(600, chosen=1, padded=3)
    with torch.autocast("cpu", torch.bfloat16):
        counts = decision.expert_counts
        values = computed(decision)
    assert counts.sum() == 597 and values["z_loss"].dtype == torch.float32
    for key, value in computed(decision).items():
        assert torch.equal(values[key], value), key


def test_z_loss_survives_large_logits():
    logits = torch.full((2, 3), 1e4)
    assert z_loss(Routing(torch.tensor([[0], [1]]), logits, logits, logits, 3)).isfinite()


@pytest.mark.parametrize("content", [0.5, math.inf, math.nan])
@pytest.mark.parametrize(
    "loss", [*(BALANCE_LOSSES[name] for name in BALANCE_LOSSES if name != "none"), z_loss]
)
def test_padding_is_ignored_whatever_it_contains(loss, content):
    plain = decide(6, seed=3)
    decisions = []
    leaves = []
    for padding in (None, torch.arange(9) > 5):
        rows = (x.detach() for x in (plain.expert_ids, plain.gates, plain.probs, plain.logits))
        if padding is not None:
            rows = (
                torch.cat([x, x[:3] if x.dtype == torch.int64 else x[:3] * 0 + content])
                for x in rows
            )
        index, gate, *ours = rows
        leaves.append([x.clone().requires_grad_() for x in ours])
        decisions.append(Routing(index, gate, *leaves[-1], 4, padding=padding))
    assert torch.equal(*(decision.expert_counts for decision in decisions))
    torch.testing.assert_close(*(loss(decision) for decision in decisions))
    grads = (
        torch.autograd.grad(loss(d), x, allow_unused=True) for d, x in zip(decisions, leaves)
    )
    for one, other in zip(*grads):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other[:6], one)
            assert (other[6:] == 0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("padding", [None, [True, True, True], [False, False, True]])
def test_probabilities_of_zero_leave_finite_gradients(activation, padding):
    """Of the mutual information: its slope must not become infinite times zero."""
    torch.manual_seed(0)
    router = TopKRouter(4, MoASettings(3, 2, router_activation=activation))
    x = torch.randn(3, 4)
    x[2] *= 1e6  # its probabilities are 0 and 1 in float32
    x.requires_grad_()
    loss = mutual_information_loss(
        router(x, None if padding is None else torch.tensor(padding))
    )
    loss.backward()
    assert (
        loss.isfinite()
        and x.grad.isfinite().all()
        and router.projection.weight.grad.isfinite().all()
    )


# What an operation of torch starts on a GPU, where that is not one kernel.
KERNELS = {
    "logsumexp": 9,
    "topk": 3,
    "sort": 12,
    "detach": 0,
    "view": 0,
    "_unsafe_view": 0,
    "alias": 0,
}


class Launches(TorchDispatchMode):
    """Counts the kernels that a GPU would be told to run."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        empty = name.startswith(("empty", "new_empty"))
        if not function.is_view and not empty:
            self.count += KERNELS.get(name, 1)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("experts, chosen", [(8, 8), (32, 8)])
def test_eighteen_routers_cost_few_launches(experts, chosen):
    """A translation model's: 6 about the source, 12 about the target, both padded; more layers cost none."""
    from moa_fairseq.plugin.criterions.with_routing import (
        LabelSmoothedCrossEntropyWithRouting,
        LabelSmoothedCrossEntropyWithRoutingConfig,
    )

    config = LabelSmoothedCrossEntropyWithRoutingConfig(sentence_avg=False)
    criterion = LabelSmoothedCrossEntropyWithRouting.__new__(
        LabelSmoothedCrossEntropyWithRouting
    )
    torch.nn.Module.__init__(criterion)
    criterion.routing = config

    def launches(modules):
        decisions = [
            (f"m{i}", decide(40 if i % 3 else 50, experts, chosen, padded=5, seed=i))
            for i in range(modules)
        ]
        with Launches() as forward:
            auxiliary, _ = criterion.terms(decisions)
        with Launches() as backward:
            auxiliary.backward()
        return forward.count, backward.count

    forward, backward = launches(18)
    assert launches(36)[0] == forward
    assert forward <= 42
    # a router's own two: its softmax, and where its two gradients meet
    assert backward <= 24 + 18 * 2
