"""What routers and gates keep over updates stays in float32 in models of half precision."""

import pytest
import torch

from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.moa import MixtureOfAttention

HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES)
def test_small_steps_of_a_selection_bias_add_up(dtype):
    router = MixtureOfAttention(
        8, num_experts=4, experts_per_token=2, expert_dim=4, routing_bias_rate=0.001, self_attention=True
    ).to(dtype)
    router = router.router
    assert router.projection.weight.dtype == dtype
    for _ in range(600):
        router.update(torch.tensor([1000.0, 1.0, 1.0, 1.0]))
    torch.testing.assert_close(router.selection_bias, torch.tensor([-0.6, 0.6, 0.6, 0.6]))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_token_of_an_accumulated_update_counts(dtype):
    torch.manual_seed(0)
    attention = MixtureOfAttention(
        8, num_experts=5, experts_per_token=2, expert_dim=4, routing_bias_rate=0.001, self_attention=True
    ).to(dtype)
    for _ in range(40):
        attention(torch.randn(101, 7, 8, dtype=dtype), None, None)
    assert attention.router.pending.sum().item() == 40 * 101 * 7 * 2


def test_gates_keep_their_statistics_and_follow_the_device():
    attention = MixtureOfAttentiveExperts(8, 2, self_attention=True).half()
    assert attention.gate.norm.running_mean.dtype == torch.float32
    moved = MixtureOfAttention(
        8, num_experts=4, experts_per_token=2, expert_dim=4, routing_bias_rate=0.1, self_attention=True
    ).to("meta", torch.float16)
    assert moved.router.selection_bias.device.type == "meta"
    assert moved.router.selection_bias.dtype == torch.float32
