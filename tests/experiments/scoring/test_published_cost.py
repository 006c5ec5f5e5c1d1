"""The costs of SwitchHead's paper, by its formulas."""

from functools import partial

import pytest

from moa_fairseq.experiments.scoring.published_cost import published_cost
from moa_fairseq.layers import MixtureOfAttention, SwitchHeadAttention

XL = {"self_attention": True, "positions": "xl"}
ROPE = {"self_attention": True, "positions": "rope"}
DENSE = partial(
    SwitchHeadAttention, 412, switchhead_heads=10, expert_dim=41, switchhead_experts="none"
)
SWITCHHEAD = partial(SwitchHeadAttention, 412, switchhead_heads=2, num_experts=5)
TWO = partial(SWITCHHEAD, expert_dim=76, experts_per_token=2)
THREE = partial(SWITCHHEAD, expert_dim=64, experts_per_token=3)
FOUR = {"num_experts": 10, "experts_per_token": 4, "expert_dim": 88}


@pytest.mark.parametrize(
    ("attention", "length", "chunks", "macs", "floats"),
    [
        (partial(DENSE, **XL), 256, 2, 453_427_200, 3_461_120),
        (partial(DENSE, **ROPE), 512, 1, 560_906_240, 6_082_560),
        (partial(TWO, **XL), 256, 2, 170_364_928, 762_880),
        (partial(THREE, **ROPE), 512, 1, 285_618_176, 1_315_840),
        (partial(MixtureOfAttention, 412, **FOUR, **XL), 256, 2, 223_451_136, 1_324_032),
    ],
)
def test_switchheads_formulas_by_hand(attention, length, chunks, macs, floats):
    """Its Tables 1 and 7 print 453.4M and 3.5M, 560.9M and 6.1M, 170.4M and 0.8M, 285.6M and 1.3M, 223.5M and
    1.3M."""
    assert published_cost(attention(), length, chunks) == {"macs": macs, "floats": floats}


@pytest.mark.parametrize(
    "attention",
    [
        partial(SWITCHHEAD, expert_dim=8, switchhead_experts="v"),
        partial(SWITCHHEAD, expert_dim=8, switchhead_experts="vq"),
        partial(MixtureOfAttention, 412, **FOUR, **ROPE),
        partial(MixtureOfAttention, 412, **FOUR, groups=2, **XL),
    ],
)
def test_an_attention_without_a_published_formula_has_no_published_cost(attention):
    assert published_cost(attention(), 256, 1) is None
