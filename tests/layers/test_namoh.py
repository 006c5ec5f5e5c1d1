"""NativeMixtureOfHeads: as MoA, masks, cost, refusals. test_equations.py has its equations."""

import pytest
import torch
from time_first import NativeMixtureOfHeads

from moa_fairseq import layers as attention
from moa_fairseq.errors import UserError
from moa_fairseq.plugin.forward_context import collect_routings, forward_context

C = 24
D = 6
E = 8
K = 3


def build(kind=NativeMixtureOfHeads, **settings):
    torch.manual_seed(0)
    sizes = {"num_experts": E, "experts_per_token": K, "expert_dim": D, **settings}
    return kind(C, **sizes).double().eval()


@pytest.mark.parametrize("is_self", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_all_heads_are_moa_with_keys_of_their_own(bias, is_self):
    sizes = {"experts_per_token": E, "expert_bias": bias, "self_attention": is_self}
    ours = build(attention.NativeMixtureOfHeads, **sizes)
    moa = build(attention.MixtureOfAttention, expert_keys_values="own", **sizes)
    state = {
        name: value
        for name, value in ours.state_dict().items()
        if not name.startswith("source_router")
    }
    moa.load_state_dict(
        {n: v.flatten(0, 1) if n[:2] in ("k_", "v_") else v for n, v in state.items()}
    )
    x = torch.randn(2, 7, C).double()
    memory = torch.randn(2, 5, C).double()
    inputs = (x,) if is_self else (x, memory)
    padding = torch.arange(inputs[-1].size(1)) >= torch.tensor([[9], [3]])
    results = [module(*inputs, padding=padding) for module in (ours, moa)]
    real = slice(None) if len(inputs) == 2 else ~padding
    torch.testing.assert_close(results[0][real], results[1][real])


def test_a_head_is_seen_by_those_who_chose_it_alone():
    """Head weights stand slot by slot over all keys: zero where the key's token chose other heads."""
    module = build(self_attention=True)
    x = torch.randn(9, 2, C).double()
    future = torch.ones(9, 9).triu(1).bool()
    with collect_routings() as decisions:
        out, weights = module(x, x, x, attn_mask=future, need_head_weights=True)
    index = decisions[0][1].expert_ids.view(2, 9, K)
    chose = (index[:, :, :, None, None] == index[:, None, None]).any(-1)  # [B, T, K, S]
    expected = (chose & ~future[:, None]).permute(2, 0, 1, 3)
    assert torch.equal(weights > 0, expected)
    torch.testing.assert_close(weights.sum(-1), torch.ones(K, 2, 9).double())
    same, _ = module(x, x, x, attn_mask=future, need_weights=False)
    torch.testing.assert_close(out, same)


def test_a_carried_context_is_routed_with_the_text():
    module = build(self_attention=True, positions="rope")
    x = torch.randn(10, 2, C).double()
    future = torch.full((10, 10), -torch.inf).triu(1).double()
    whole, _ = module(x, x, x, attn_mask=future)
    with forward_context(carried=x[:6]), collect_routings() as decisions:
        after, _ = module(x[6:], x[6:], x[6:], attn_mask=future[:4, :4])
    torch.testing.assert_close(after, whole[6:])
    assert [d.gates.size(0) for _, d in decisions] == [8]  # the text counts once
    biased = build(self_attention=True, routing_bias_rate=0.1).train()
    with forward_context(carried=x[:6]):
        biased(x[6:], x[6:], x[6:])
    assert biased.router.pending.sum() == 8 * K


def test_cross_attention_balances_both_sides_without_their_padding():
    module = build(encoder_decoder_attention=True, kdim=10, vdim=10)
    memory = torch.randn(7, 2, 10).double()
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 4:] = True
    with collect_routings() as decisions:
        module(torch.randn(4, 2, C).double(), memory, memory, key_padding_mask=padding)
    assert [(name[-5:], d.auxiliary) for name, d in decisions][1] == (".keys", True)
    assert [int(d.expert_counts.sum()) for _, d in decisions] == [2 * 4 * K, (4 + 7) * K]


def test_its_cost():
    """Four matrices of D · C for each of K heads, and K / E of the scores of K heads."""
    macs = build(self_attention=True).macs(16, 16)
    scores = 2 * (16 * K // E) ** 2 * E * D
    assert macs == {"router": 16 * C * E, "projections": 16 * C * D * 4 * K, "scores": scores}
    cross = build(encoder_decoder_attention=True, kdim=10, vdim=10).macs(16, 8)
    assert cross["router"] == 16 * C * E + 8 * 10 * E
    assert cross["projections"] == (2 * 16 * C + 2 * 8 * 10) * K * D


@pytest.mark.parametrize(
    "settings, flag",
    [
        ({"experts_per_token": 9}, "experts_per_token 9"),
        ({"expert_dim": 0}, "expert_dim"),
        ({"router_choice": "hash"}, "router_choice"),
        ({"self_attention": True, "positions": "xl"}, "positions='xl'"),
    ],
)
def test_impossible_settings_are_refused(settings, flag):
    with pytest.raises(UserError, match=flag):
        build(**settings)
