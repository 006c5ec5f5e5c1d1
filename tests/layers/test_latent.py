"""Latent attention: sizes, steps, refused calls. test_equations.py has its equations."""

import pytest
import torch
from equations import drawn
from time_first import LatentAttention
from torch import nn

from moa_fairseq import layers as attention

C = 24
H = 3
D = 5
R = 4
L = 7
SIZES = {"attention_head_dim": D, "latent_dim": L, "rotary_key_dim": R}


def build(**options):
    torch.manual_seed(0)
    options = {**SIZES, "self_attention": True, "positions": "rope", **options}
    return drawn(attention.LatentAttention(C, H, **options).double().eval())


def test_sizes_without_flags_are_deepseeks_ratios():
    module = attention.LatentAttention(C, H, self_attention=True, positions="rope")
    assert (module.head_dim, module.latent_dim, module.rotary_dim) == (8, 32, 4)
    assert module.cache_bytes() == 2 * (32 + 4)
    # No rotary positions, no rotary key
    assert attention.LatentAttention(C, H).cache_bytes() == 2 * 32


def test_parameters_and_multiplications():
    module = build()
    queries = 7
    keys = 11
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    assert sizes == {
        "q_proj.weight": C * H * (D + R),
        "latent_proj.weight": C * (L + R),
        "k_proj.weight": L * H * D,
        "v_proj.weight": L * H * D,
        "out_proj.weight": H * D * C,
    }
    assert module.macs(queries, keys) == {
        "router": 0,
        "projections": queries * C * H * (2 * D + R) + keys * (C * (L + R) + 2 * L * H * D),
        "scores": queries * keys * H * (2 * D + R),
    }


def test_a_step_of_generation_builds_no_keys_of_single_heads(monkeypatch):
    module = build()
    shapes = []
    cache = module.new_cache()
    x = torch.randn(2, 20, C, dtype=torch.float64)
    attend = module.attend

    def seen(call, q, k, *rest):
        shapes.append((q.shape, k.shape))
        return attend(call, q, k, *rest)

    monkeypatch.setattr(module, "attend", seen)
    # 15, 4 and 1 queries, where a head has 5 numbers
    for start, end in (
        (0, 15),
        (15, 19),
        (19, 20),
    ):
        module(x[:, start:end], causal=True, cache=cache)
    assert shapes == [
        ((2, H, 15, R + D), (2, H, 15, R + D)),
        ((2, H, 4, R + L), (2, 1, 19, R + L)),
        ((2, H, 1, R + L), (2, 1, 20, R + L)),
    ]


class Twice(nn.Module):
    """An adapter that shows whether it is called."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return 2 * self.linear(x)


@pytest.mark.parametrize("name", ["k_proj", "v_proj", "latent_proj", "q_proj", "out_proj"])
def test_an_adapter_is_called_in_generation_too(name):
    module = build()
    x = torch.randn(2, 6, C, dtype=torch.float64)
    plain = module(x, causal=True)
    setattr(module, name, Twice(getattr(module, name)))
    whole = module(x, causal=True)
    cache = module.new_cache()
    steps = [module(x[:, at : at + 1], cache=cache) for at in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert not torch.allclose(whole, plain)


def test_keys_and_values_are_of_one_input():
    module = LatentAttention(C, H)
    x = torch.randn(4, 2, C)
    with pytest.raises(ValueError, match="self_attention=True"):
        module(x, x, x + 1)
