"""fairseq's search for the module that made a NaN, which it starts once a loss is none."""

import pytest
import torch
from fairseq.nan_detector import NanDetector

from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.moa import MixtureOfAttention


@pytest.mark.parametrize(
    "attention",
    [
        MixtureOfAttention(8, num_experts=4, experts_per_token=2, expert_dim=4, self_attention=True),
        MixtureOfAttentiveExperts(8, num_heads=2, self_attention=True),
    ],
    ids=["moa", "mae"],
)
def test_a_nan_is_traced_to_its_module(attention, caplog):
    torch.nn.init.constant_(attention.v_proj.weight, float("nan"))
    with caplog.at_level("WARNING", "fairseq.nan_detector"), NanDetector(attention):
        attention(torch.randn(3, 2, 8, requires_grad=True), None, None)[0].sum().backward()
    assert "NaN detected in output of v_proj" in caplog.text
