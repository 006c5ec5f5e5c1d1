"""Statistics of passes that lack a module, and coefficients that make no sense."""

import argparse
import math

import pytest
import torch

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.criterions.with_routing import LabelSmoothedCrossEntropyWithRouting
from moa_fairseq.plugin.logged_values import logged, mean_values


def test_a_module_that_a_pass_left_out_is_averaged_over_the_others():
    """LayerDrop; two micro-batches of one kind, one of another, and what fairseq leaves of many workers."""
    logs = [
        logged("x/", ["all", "all.a", "all.b"], torch.tensor([2.0, 1.0, 3.0])),
        logged("x/", ["all", "all.a"], torch.tensor([4.0, 4.0])),
        logged("x/", ["all", "all.a", "all.b"], torch.tensor([6.0, 4.0, 5.0])),
    ]
    expected = {"all": 4.0, "all.a": 3.0, "all.b": 4.0}
    assert mean_values("x/", logs) == (expected, 3)
    both = {key: value + logs[2][key] for key, value in logs[0].items()}
    assert mean_values("x/", [both, logs[1]]) == (expected, 3)
    assert mean_values("x/", [{"loss": 1.0}]) == ({}, 0)


@pytest.mark.parametrize("name", ["load_balance_coef", "z_loss_coef"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_coefficient_that_is_no_weight_is_refused(name, value):
    cfg = argparse.Namespace(**{"load_balance_coef": 0.01, "z_loss_coef": 0.001, name: value})
    with pytest.raises(UserError, match="--" + name.replace("_", "-")):
        LabelSmoothedCrossEntropyWithRouting.build_criterion(cfg, None)
