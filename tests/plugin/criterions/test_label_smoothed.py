"""Eq. 17 in fairseq's sum semantics, and what reaches the log."""

import argparse
import copy
import math

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.logging import meters, metrics
from torch import nn

from moa_fairseq.layers.load_statistics import load_statistics
from moa_fairseq.layers.losses import BALANCE_LOSSES, load_balance_loss, z_loss
from moa_fairseq.layers.moa import MoASettings
from moa_fairseq.layers.routers import TopKRouter
from moa_fairseq.layers.sigmoid_router import SigmoidTopKRouter
from moa_fairseq.plugin.criterions.with_routing import (
    LabelSmoothedCrossEntropyWithRouting,
    LabelSmoothedCrossEntropyWithRoutingConfig,
)
from moa_fairseq.plugin.forward_context import collect_routings, current_context
from moa_fairseq.plugin.logged_values import mean_values

TASK = argparse.Namespace(target_dictionary=Dictionary())
TWO_OF_FOUR = MoASettings(num_experts=4, experts_per_token=2)


class TwoRouters(nn.Module):
    """The smallest model with routers: its output does not depend on them, so gradients are theirs alone."""

    def __init__(self):
        super().__init__()
        self.routers = nn.ModuleList(TopKRouter(8, TWO_OF_FOUR) for _ in range(2))
        self.head = nn.Linear(8, 12)

    def forward(self, x):
        for i, router in enumerate(self.routers):
            named = argparse.Namespace(name=f"layer{i}")
            current_context().record(named, router(x.reshape(-1, 8)))
        return (self.head(x),)

    def get_normalized_probs(self, net_output, log_probs):
        return torch.log_softmax(net_output[0], -1)

    def get_targets(self, sample, net_output):
        return sample["target"]


def build(**settings):
    cfg = LabelSmoothedCrossEntropyWithRoutingConfig(
        sentence_avg=False, label_smoothing=0.1, **settings
    )
    return LabelSmoothedCrossEntropyWithRouting.build_criterion(cfg, TASK)


def sample(batch=3, length=5):
    g = torch.Generator().manual_seed(batch)
    target = torch.randint(4, 12, (batch, length), generator=g)
    return {
        "net_input": {"x": torch.randn(batch, length, 8, generator=g)},
        "target": target,
        "ntokens": batch * length,
    }


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TwoRouters().train()


def values_of(*logs):
    return mean_values("router/", logs)[0]


def auxiliary(model, batch, alpha=0.01, beta=0.001):
    with collect_routings() as decisions:
        model(**batch["net_input"])
    return sum(alpha * load_balance_loss(d) + beta * z_loss(d) for _, d in decisions)


def test_training_loss_is_the_models_plus_the_scaled_auxiliary_term(model):
    batch = sample()
    plain, size, _ = LabelSmoothedCrossEntropyCriterion(TASK, False, 0.1)(model, batch)
    aux = auxiliary(model, batch)
    assert build()(model, batch)[0].item() == pytest.approx(
        (plain + size * aux).item(), rel=1e-6
    )
    assert build(aux_loss_scale="none")(model, batch)[0].item() == pytest.approx(
        (plain + aux).item(), rel=1e-6
    )


def test_the_gradient_of_a_router_is_analytically_the_auxiliary_terms(model):
    batch = sample()
    loss, size, _ = build()(model, batch)
    (loss / size).backward()
    got = [router.projection.weight.grad.clone() for router in model.routers]
    twin = copy.deepcopy(model)
    twin.zero_grad()
    auxiliary(twin, batch).backward()
    for grad, router in zip(got, twin.routers):
        torch.testing.assert_close(grad, router.projection.weight.grad)
        assert grad.abs().max() > 0


def test_validation_loss_is_the_models_alone_but_routers_are_still_logged(model):
    model.eval()
    batch = sample()
    plain, _, _ = LabelSmoothedCrossEntropyCriterion(TASK, False, 0.1)(model, batch)
    loss, _, log = build()(model, batch)
    assert loss.item() == plain.item()
    assert values_of(log)["load_balance_loss"] > 0


def test_logs_of_workers_add_up_to_the_mean_over_passes(model):
    logs = [build()(model, sample(batch))[2] for batch in (2, 4)]
    assert LabelSmoothedCrossEntropyWithRouting.logging_outputs_can_be_summed()
    summed = {key: sum(log[key] for log in logs) for key in logs[0]}  # as fairseq does
    with metrics.aggregate(new_root=True) as aggregate:
        LabelSmoothedCrossEntropyWithRouting.reduce_metrics([summed])
        values = aggregate.get_smoothed_values()
    for key in (
        "load_balance_loss",
        "z_loss",
        "load_entropy",
        "max_load",
        "min_load",
        "dead_experts",
    ):
        expected = sum(values_of(log)[key] for log in logs) / 2
        assert values[key] == pytest.approx(expected, abs=1e-4), key
    assert isinstance(aggregate["max_load"], meters.AverageMeter)
    assert 0 < float(values["load_entropy"]) <= math.log(4) + 1e-6


def test_per_module_statistics_on_request(model):
    log = values_of(build(router_log="modules")(model, sample())[2])
    assert "dead_experts.layer1" in log
    assert log["z_loss"] == pytest.approx((log["z_loss.layer0"] + log["z_loss.layer1"]) / 2)
    assert {k: v for k, v in log.items() if "." not in k} == values_of(
        build()(model, sample())[2]
    )


def test_a_model_without_routers_is_scored_as_by_fairseq():
    dense = TwoRouters()
    dense.routers = nn.ModuleList()
    batch = sample()
    plain, _, _ = LabelSmoothedCrossEntropyCriterion(TASK, False, 0.1)(dense, batch)
    loss, _, log = build()(dense, batch)
    assert loss.item() == plain.item() and not any(key.startswith("router/") for key in log)


def decisions_of_three_kinds():
    """TopK routers about 1, 9 and 1 tokens, between them attention without auxiliary losses."""
    torch.manual_seed(3)
    routers = {
        "a": (TopKRouter(8, TWO_OF_FOUR), 1),
        "b": (SigmoidTopKRouter(8, 4, 2, auxiliary=False), 5),
        "c": (TopKRouter(8, TWO_OF_FOUR), 9),
        "d": (TopKRouter(8, TWO_OF_FOUR), 1),
        "e": (SigmoidTopKRouter(8, 4, 2), 7),
    }
    for router, _ in routers.values():
        nn.init.normal_(router.projection.weight, std=2.0)
    named = [
        (name, router(torch.randn(tokens, 8))) for name, (router, tokens) in routers.items()
    ]
    return {name: router.projection.weight for name, (router, _) in routers.items()}, named


def test_losses_act_on_those_decisions_alone_that_allow_it():
    weights, named = decisions_of_three_kinds()
    auxiliary, _ = build().terms(named)
    held = [decision for name, decision in named if name != "b"]
    assert auxiliary.item() == pytest.approx(
        sum((0.01 * load_balance_loss(d) + 0.001 * z_loss(d)).item() for d in held), rel=1e-5
    )
    auxiliary.backward()
    assert weights["b"].grad is None or weights["b"].grad.abs().sum() == 0
    assert all(weights[name].grad.abs().sum() > 0 for name in "acde")
    mean, _ = build(aux_loss_reduce="mean").terms(named)
    assert mean.item() == pytest.approx(auxiliary.item() / 4, rel=1e-5)
    only, _ = build().terms([named[1]])
    assert only.item() == 0


def test_statistics_of_each_module_stand_under_its_own_name():
    _, named = decisions_of_three_kinds()
    log = values_of(build(router_log="modules").terms(named)[1])
    for name, decision in named:
        expected = {
            "load_balance_loss": load_balance_loss(decision),
            "z_loss": z_loss(decision),
        }
        for key, value in {**expected, **load_statistics(decision)}.items():
            assert log[f"{key}.{name}"] == pytest.approx(value.item(), abs=1e-5), (key, name)
    another = values_of(build(router_log="modules", balance_loss="entropy").terms(named)[1])
    for name, decision in named:
        entropy = BALANCE_LOSSES["entropy"](decision).item()
        assert another[f"balance_loss.{name}"] == pytest.approx(entropy, abs=1e-5)
        assert another[f"load_balance_loss.{name}"] == log[f"load_balance_loss.{name}"]
    dead = [log[f"dead_experts.{name}"] for name, _ in named]
    assert log["dead_experts"] == pytest.approx(sum(dead)) and sum(dead) > 0


def test_a_mean_over_updates_weighs_passes_alike():
    """An update of three passes counts three times as much as one of a single pass."""
    key = "router/max_load"
    plain = dict.fromkeys(("loss", "nll_loss", "ntokens", "sample_size"), 1)
    sums = ([0.2, 1.0], [1.8, 3.0])  # of the statistic, and of the passes
    updates = [{**plain, key: torch.tensor(both)} for both in sums]
    with metrics.aggregate(new_root=True) as aggregate:
        for update in updates:
            LabelSmoothedCrossEntropyWithRouting.reduce_metrics([update])
    assert aggregate["max_load"].avg == pytest.approx((0.2 + 1.8) / 4)
