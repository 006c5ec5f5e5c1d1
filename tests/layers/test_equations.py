"""Outputs and all gradients are those of the papers' equations, in float64; MAE's are in test_mae.py."""

import functools
import itertools
import math
import re
from pathlib import Path

import equations
import pytest
import torch
from time_first import (
    DenseAttention,
    GroupedQueryExperts,
    LatentAttention,
    MixtureOfAttention,
    MixtureOfHeads,
    NativeMixtureOfHeads,
    SwitchHeadAttention,
)

from moa_fairseq.layers.gqe import OUTPUTS
from moa_fairseq.plugin.forward_context import forward_context

C = 12
E = 5
K = 2
H = 6
D = 4


def moa(**settings):
    sizes = {"num_experts": E, "experts_per_token": K, "expert_dim": D, "expert_bias": True}
    return lambda **role: MixtureOfAttention(C, **{**sizes, **settings}, **role), equations.moa


def switchhead(**settings):
    sizes = {"switchhead_heads": 2, "expert_dim": D, "num_experts": 4, "experts_per_token": K}
    return lambda **role: SwitchHeadAttention(
        C, **{**sizes, **settings}, **role
    ), equations.switchhead


def moh(**settings):
    sizes = {"num_heads": H, "moh_shared_heads": 2, "experts_per_token": K}
    return lambda **role: MixtureOfHeads(C, **{**sizes, **settings}, **role), equations.moh


def gqe(**settings):
    sizes = {
        "gqe_groups": 3,
        "num_experts": 4,
        "experts_per_token": K,
        "expert_dim": D,
        "expert_bias": True,
    }
    return lambda **role: GroupedQueryExperts(C, **{**sizes, **settings}, **role), equations.gqe


def namoh(**settings):
    sizes = {"num_experts": E, "experts_per_token": K, "expert_dim": D, "expert_bias": True}
    return lambda **role: NativeMixtureOfHeads(
        C, **{**sizes, **settings}, **role
    ), equations.namoh


def dense(**settings):
    return lambda expert_backend, **role: DenseAttention(
        C, **{"num_heads": 3, **settings}, **role
    ), equations.dense


def latent(**settings):
    return lambda expert_backend, **role: LatentAttention(
        C, **{"num_heads": 3, **settings}, **role
    ), equations.latent


def scaled(family, factor):
    """The family with a constant factor on its output."""
    build_family, equation = family
    return lambda **role: build_family(
        output_scale=factor, **role
    ), lambda *given: factor * equation(*given)


def rotary(family):
    """With rotary positions in self-attention, where there are positions."""
    make, equation = family

    def with_positions(self_attention=False, **role):
        return make(
            self_attention=self_attention, positions="rope" if self_attention else None, **role
        )

    return with_positions, equation


SUBSETS = ["".join(s) for size in range(1, 5) for s in itertools.combinations("vkqo", size)] + [
    "none"
]
FAMILIES = {
    "moa": moa(),
    "moa, K = E": moa(experts_per_token=E),
    "moa, K = 1": moa(experts_per_token=1),
    "moa, without biases": moa(expert_bias=False),
    "moa, the gradient of the sum": moa(router_renormalize="full"),
    "moa, released": moa(router_renormalize="none"),
    "moa, sigmoid": moa(router_activation="sigmoid"),
    "moa, three per expert": moa(heads_per_expert=3),
    "moa, two heads, K = E": moa(heads_per_expert=2, experts_per_token=E),
    "moa, own keys": moa(expert_keys_values="own", experts_per_token=E),
    "moa, own keys, two each": moa(
        expert_keys_values="own", experts_per_token=E, heads_per_expert=2
    ),
    "moa, own keys, sigmoid": moa(
        expert_keys_values="own", experts_per_token=E, router_activation="sigmoid"
    ),
    "moa, gates times K": scaled(moa(), K),
    "moa, uniform": moa(router_gates="uniform"),
    "moa, uniform, K = E": moa(router_gates="uniform", experts_per_token=E),
    "moa, straight-through": moa(router_gates="straight-through"),
    "moa, frozen": moa(router_choice="frozen"),
    "moa, hash": moa(router_choice="hash"),
    "switchhead, k = E": switchhead(experts_per_token=4),
    "switchhead, E = 1": switchhead(num_experts=1, experts_per_token=1),
    "switchhead, one gated output": switchhead(
        num_experts=1, experts_per_token=1, switchhead_experts="o"
    ),
    "switchhead, one head": switchhead(switchhead_heads=1),
    "switchhead, three heads, k = 1": switchhead(switchhead_heads=3, experts_per_token=1),
    "switchhead, shared selection": switchhead(switchhead_shared_selection=True),
    "switchhead, frozen": switchhead(router_choice="frozen"),
    **{f"switchhead, {experts}": switchhead(switchhead_experts=experts) for experts in SUBSETS},
    **{
        f"moh, {name}, {skip}": moh(moh_skip=skip, **settings)
        for skip in ("never", "always")
        for name, settings in {
            "paper": {},
            "released": {"moh_scaling": "released"},
            "one shared head": {"moh_shared_heads": 1},
            "no shared head": {"moh_shared_heads": 0, "moh_scaling": "released"},
            "query norms": {"moh_router": "query-norm"},
            "query norms, chosen": {
                "moh_router": "query-norm",
                "moh_straight_through": "chosen",
            },
            "frozen": {"router_choice": "frozen"},
            "hash": {"router_choice": "hash"},
        }.items()
    },
    "moa, a gate a head": moa(head_gate="head"),
    "moa, element gates, three per expert": moa(head_gate="element", heads_per_expert=3),
    "moa, own keys, element gates": moa(
        head_gate="element", expert_keys_values="own", experts_per_token=E
    ),
    "switchhead, element gates": switchhead(head_gate="element"),
    "moh, a gate a head, never": moh(head_gate="head", moh_skip="never"),
    "moh, element gates, always": moh(head_gate="element", moh_skip="always"),
    "dense, a gate for all heads": dense(head_gate="head"),
    "dense, element gates, wide heads": dense(head_gate="element", attention_head_dim=7),
    "gqe, element gates": gqe(head_gate="element"),
    "gqe, k = 1": gqe(experts_per_token=1),
    "gqe, k = M": gqe(experts_per_token=4),
    "gqe, k = M, no shared head": gqe(experts_per_token=4, gqe_shared_heads=0),
    "gqe, M = 1": gqe(num_experts=1, experts_per_token=1),
    "gqe, G = 1": gqe(gqe_groups=1),
    "gqe, detached": gqe(router_renormalize="detached"),
    "gqe, not renormalised, no biases": gqe(router_renormalize="none", expert_bias=False),
    "gqe, experts, k = M": gqe(gqe_output="experts", experts_per_token=4),
    **{
        f"gqe, {output}, {shared} shared": gqe(gqe_output=output, gqe_shared_heads=shared)
        for output in OUTPUTS
        for shared in (0, 1)
    },
    "namoh": namoh(),
    "namoh, K = E": namoh(experts_per_token=E),
    "namoh, K = 1": namoh(experts_per_token=1),
    "namoh, one head": namoh(num_experts=1, experts_per_token=1),
    "namoh, no biases": namoh(expert_bias=False),
    "namoh, the gradient of the sum": namoh(router_renormalize="full"),
    "namoh, not renormalised": namoh(router_renormalize="none"),
    "namoh, frozen": namoh(router_choice="frozen"),
    "namoh, element gates": namoh(head_gate="element"),
    # rotary positions, mostly of odd heads
    "moa, rotary": rotary(moa(expert_dim=5)),
    "moa, rotary, two per expert": rotary(moa(expert_dim=7, heads_per_expert=2)),
    "switchhead, rotary": rotary(switchhead(expert_dim=5)),
    "moh, rotary, never": rotary(moh(num_heads=4, moh_shared_heads=1, moh_skip="never")),
    "moh, rotary, always": rotary(moh(num_heads=4, moh_shared_heads=1, moh_skip="always")),
    "gqe, rotary": rotary(gqe(expert_dim=7)),
    "gqe, rotary, no shared head": rotary(gqe(expert_dim=5, gqe_shared_heads=0)),
    "namoh, rotary": rotary(namoh(expert_dim=5)),
    "dense, rotary heads": rotary(dense()),
    "dense, rotary, odd heads": rotary(dense(attention_head_dim=7)),
    "dense, rotary, grouped odd heads": rotary(
        dense(num_heads=6, key_heads=2, attention_head_dim=3)
    ),
    "latent heads": latent(),
    "latent, rotary heads": rotary(latent()),
    "latent, rotary, norm, odd heads": rotary(
        latent(attention_head_dim=7, latent_dim=5, rotary_key_dim=3, latent_norm=True)
    ),
    "latent, rotary, element gates, one of the heads": rotary(
        latent(num_heads=1, latent_dim=1, rotary_key_dim=6, head_gate="element")
    ),
    "dense": dense(),
    "dense, narrow heads": dense(attention_head_dim=1),
    "dense, wide heads": dense(attention_head_dim=7),
    "dense, multi-query heads": dense(key_heads=1),
    "dense, grouped heads": dense(num_heads=6, key_heads=2, head_gate="element"),
}
CASES = {
    "self-attention": dict(tgt=7, batch=3),
    "one token": dict(tgt=1, batch=1),
    "causal": dict(tgt=6, batch=2, causal=True),
    "padding": dict(tgt=6, batch=3, lengths=[6, 3, 1]),
    "causal and padding": dict(tgt=6, batch=3, lengths=[6, 2, 4], causal=True),
    "cross-attention": dict(tgt=5, batch=2, src=9, lengths=[9, 4]),
    "an expert that nobody chooses": dict(tgt=7, batch=3, first_expert=-9.0),
    "all tokens choose the first expert": dict(tgt=7, batch=3, first_expert=9.0),
}


def build(family, backend="grouped", first_expert=None, **role):
    """In float64, with weights that make biases, gates and routers matter; evaluation."""
    torch.manual_seed(0)
    module = FAMILIES[family][0](expert_backend=backend, **role).double().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
            if "router" in name and first_expert is not None:
                parameter[0, 0] = first_expert  # the inputs' first number is 3
    return module


# The backend matters where experts are projected.
PAIRS = [
    (family, backend)
    for family in FAMILIES
    for backend in ("grouped", "reference")
    if backend == "grouped" or not family.endswith(("never", "heads", "dense"))
]


def passed(family, backend, case, by_equations=False):
    """(its output, the gradient of each of its leaves), of the module or of the papers' equations."""
    case = dict(CASES[case])
    tgt = case["tgt"]
    batch = case["batch"]
    src = case.get("src")
    lengths = case.get("lengths")
    role = {"self_attention": True} if src is None else {"encoder_decoder_attention": True}
    module = build(family, backend, case.get("first_expert"), **role)
    g = torch.Generator().manual_seed(tgt)
    query, memory = (
        torch.randn(length, batch, C, generator=g, dtype=torch.float64)
        for length in (tgt, src or tgt)
    )
    query[..., 0] = memory[..., 0] = 3.0
    leaves = {
        "query": query.requires_grad_(),
        "key": memory.requires_grad_(),
        **dict(module.named_parameters()),
    }
    key = query if src is None else memory
    padding = (
        None if lengths is None else torch.arange(key.size(0)) >= torch.tensor(lengths)[:, None]
    )
    mask = (
        torch.full((tgt, tgt), -math.inf, dtype=torch.float64).triu(1)
        if case.get("causal")
        else None
    )
    ids = torch.randint(4, 9, (batch, tgt), generator=g)
    if by_equations:
        rows = (query.transpose(0, 1), key.transpose(0, 1))
        out = FAMILIES[family][1](module, *rows, mask, padding, ids).transpose(0, 1)
    else:
        with forward_context(token_ids=ids):
            out, _ = module(
                query, key, key, key_padding_mask=padding, attn_mask=mask, need_weights=False
            )
    real = torch.ones(tgt, batch, dtype=torch.bool) if padding is None or src else ~padding.t()
    upstream = torch.randn(out.shape, generator=g) * real.unsqueeze(-1)
    frozen = {name for name, leaf in leaves.items() if not leaf.requires_grad}
    assert bool(frozen) == ("frozen" in family) and all("router" in name for name in frozen)
    leaves = {name: leaf for name, leaf in leaves.items() if name not in frozen}
    options = dict(allow_unused=True, materialize_grads=True)
    return out[real].detach(), dict(
        zip(leaves, torch.autograd.grad(out, list(leaves.values()), upstream, **options))
    )


@functools.lru_cache(maxsize=len(CASES))
def exact(family, case):
    """Once for both backends."""
    return passed(family, "grouped", case, by_equations=True)


@pytest.mark.thorough(
    keep=(
        "-grouped-self-attention",
        "-grouped-causal and padding",
        "-grouped-cross-attention",
        "-grouped-an expert",
        "-reference-causal and padding",
    )
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family, backend", PAIRS)
def test_output_and_every_gradient(family, backend, case):
    out, grads = passed(family, backend, case)
    exact_out, exact_grads = exact(family, case)
    torch.testing.assert_close(out, exact_out)
    torch.testing.assert_close(grads, exact_grads)


def test_the_readme_counts_no_more_cases_than_there_are():
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    (count,) = re.findall(r"\[([\d,]+) tests\]\(tests/layers/test_equations.py\)", text)
    assert len(PAIRS) * len(CASES) > int(count.replace(",", ""))
