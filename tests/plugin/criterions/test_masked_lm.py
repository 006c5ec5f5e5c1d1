"""fairseq's masked-LM loss with routers: equal without coefficients, Eq. 17 with them, nothing leaks."""

import argparse
import copy

import pytest
import torch
from fairseq import options
from fairseq.criterions.masked_lm import MaskedLmLoss
from fairseq.data import Dictionary
from fairseq.logging import metrics
from fairseq.models import ARCH_MODEL_REGISTRY

from moa_fairseq.layers.losses import load_balance_loss, z_loss
from moa_fairseq.plugin.criterions.with_routing import (
    MaskedLmWithRouting,
    MaskedLmWithRoutingConfig,
)
from moa_fairseq.plugin.forward_context import collect_routings
from moa_fairseq.plugin.logged_values import mean_values

PAD = 1
MASK = 43


@pytest.fixture
def task():
    dictionary = Dictionary()
    for i in range(40):
        dictionary.add_symbol(f"w{i}")
    return argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)


@pytest.fixture
def model(task):
    torch.manual_seed(0)
    line = ["data", "--task", "masked_lm", "--arch", "moa_roberta_tiny", "--dropout", "0"]
    args = options.parse_args_and_arch(
        options.get_training_parser(), [*line, "--attention-dropout", "0"]
    )
    return ARCH_MODEL_REGISTRY["moa_roberta_tiny"].build_model(args, task).train()


def sample(masked=((0, 2), (1, 1), (1, 4)), padding=0):
    """Two samples of 9 and 6 tokens, the longer one padded by `padding` more; (row, column) are masked."""
    tokens = torch.full((2, 9 + padding), PAD)
    tokens[:, :9] = torch.randint(4, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    tokens[1, 6:] = PAD
    target = torch.full_like(tokens, PAD)
    source = tokens.clone()
    for place in masked:
        target[place] = tokens[place]
        source[place] = MASK
    return {
        "net_input": {"src_tokens": source},
        "target": target,
        "ntokens": 15,
        "nsentences": 2,
    }


def criterion(task, alpha=0.01, beta=0.001, scale="sample-size"):
    cfg = MaskedLmWithRoutingConfig(
        load_balance_coef=alpha, z_loss_coef=beta, aux_loss_scale=scale
    )
    return MaskedLmWithRouting.build_criterion(cfg, task)


def plain(task):
    return MaskedLmLoss(argparse.Namespace(tpu=False), task)


def test_without_coefficients_loss_and_gradients_are_fairseqs(task, model):
    twin = copy.deepcopy(model)
    ours, size, _ = criterion(task, 0, 0)(model, sample())
    theirs, their_size, _ = plain(task)(twin, sample())
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6) and size == their_size == 3
    ours.backward()
    theirs.backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters()):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


@pytest.mark.parametrize("scale", ["sample-size", "none"])
def test_the_auxiliary_term_counts_per_masked_token(task, model, scale):
    with collect_routings() as decisions:
        model(**sample()["net_input"], features_only=True)
    aux = sum(0.5 * load_balance_loss(d) + 0.25 * z_loss(d) for _, d in decisions)
    expected = plain(task)(model, sample())[0] + aux * (3 if scale == "sample-size" else 1)
    assert criterion(task, 0.5, 0.25, scale)(model, sample())[0].item() == pytest.approx(
        expected.item()
    )


def test_what_is_to_be_guessed_and_padding_leave_the_statistics_alone(task, model):
    """The same input with other targets, and with more padding, has the same load."""
    reference = criterion(task)(model, sample())[2]
    other_targets = {**sample(), "target": sample(masked=((0, 1), (1, 2)))["target"]}
    for changed in (other_targets, sample(padding=4)):
        log = criterion(task)(model, changed)[2]
        assert mean_values("router/", [log])[0] == pytest.approx(
            mean_values("router/", [reference])[0], rel=1e-5
        )


def test_metrics_are_fairseqs_and_the_routers(task, model):
    _, size, log = criterion(task)(model, sample())
    with metrics.aggregate(new_root=True) as aggregate:
        MaskedLmWithRouting.reduce_metrics([log, log])
        values = aggregate.get_smoothed_values()
    assert values["ppl"] == pytest.approx(
        2 ** (log["loss"].item() / size.item() / 0.6931472), rel=1e-2
    )
    assert values["max_load"] == pytest.approx(
        mean_values("router/", [log])[0]["max_load"], abs=1e-4
    )


def test_a_batch_without_masked_tokens_is_harmless(task, model):
    loss, size, _ = criterion(task)(model, sample(masked=()))
    assert size == 0 and torch.isfinite(loss)
