"""Rotary settings, norms and windows of every family, in float64 against loops, and under torch's tools."""

import copy
import math
import os
from functools import partial

import equations
import pytest
import torch
from threads import THREADS, assert_same_in_threads

from moa_fairseq.errors import UserError
from moa_fairseq.layers import (
    DenseAttention,
    GroupedQueryExperts,
    LatentAttention,
    MixtureOfAttention,
    MixtureOfAttentiveExperts,
    MixtureOfHeads,
    NativeMixtureOfHeads,
    SwitchHeadAttention,
)
from moa_fairseq.layers.rope_scaling import RopeScaling

C = 12
B = 3
T = 7
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_dim": 8}
MOA = partial(MixtureOfAttention, C, **EXPERTS)
MOH = partial(MixtureOfHeads, 24, 4, moh_shared_heads=1, experts_per_token=2)
GQE = partial(GroupedQueryExperts, C, gqe_groups=2, **EXPERTS)
SWITCHHEAD = partial(SwitchHeadAttention, C, switchhead_heads=2, **EXPERTS)
LATENT = partial(LatentAttention, C, 2, attention_head_dim=12, latent_dim=5)
FAMILIES = {
    "MoA": (MOA, equations.moa),
    "MoA, two heads each": (partial(MOA, heads_per_expert=2, expert_bias=True), equations.moa),
    "MoH": (partial(MOH, moh_skip="never"), equations.moh),
    "MoH, skipping": (partial(MOH, moh_skip="always"), equations.moh),
    "GQE": (GQE, equations.gqe),
    "NAMOH": (partial(NativeMixtureOfHeads, C, **EXPERTS), equations.namoh),
    "SwitchHead": (SWITCHHEAD, equations.switchhead),
    "MAE": (
        partial(MixtureOfAttentiveExperts, 24, 3, causal=True, mae_gate="uniform"),
        equations.dense,
    ),
    "dense": (partial(DenseAttention, 32, 4, key_heads=2), equations.dense),
    "latent": (LATENT, equations.latent),
}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 40}
DYNAMIC = {"rope_type": "dynamic", "factor": 4, "original_max_position_embeddings": 3}
ROPE = {"positions": "rope"}
SETTINGS = {
    "base": {**ROPE, "rope_base": 50.0},
    "linear": {**ROPE, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "dynamic": {**ROPE, "rope_scaling": DYNAMIC},
    "yarn": {**ROPE, "rope_scaling": YARN, "rope_base": 100.0},
    "part": {**ROPE, "rotary_dim": 5},
    "norm": {"query_key_norm": "head"},
    "norm, rope": {**ROPE, "query_key_norm": "head", "query_key_norm_weight": "none"},
    "norm after rope": {**ROPE, "query_key_norm": "rotated"},
    "norm of all heads": {**ROPE, "query_key_norm": "all-heads"},
    "window": {"window": 3},
    "window of itself": {**ROPE, "window": 1},
    "all": {
        **ROPE,
        "rope_scaling": YARN,
        "rotary_dim": 6,
        "query_key_norm": "head",
        "window": 4,
    },
}
REFUSED = {
    "MoA": {"norm of all heads"},
    "MoH": {"norm of all heads"},
    "GQE": {"norm of all heads"},
    "NAMOH": {"norm of all heads"},
    "latent": {"part", "norm", "norm, rope", "norm after rope", "norm of all heads", "all"},
}
PAIRS = [(family, name) for family in FAMILIES for name in SETTINGS]
TAKEN = [pair for pair in PAIRS if pair[1] not in REFUSED.get(pair[0].split(",")[0], ())]
# The equations above have no "xl": steps are compared with a whole pass
RELATIVE = {"positions": "xl", "window": 3}
STEPS = [
    *(pair for pair in TAKEN if pair[1] != "dynamic"),
    *((family, "xl") for family in FAMILIES if family not in ("GQE", "NAMOH", "latent")),
]
PADDING = torch.arange(T) < torch.tensor([[0], [2], [5]])  # on the left, [B, T]


def build(family, name, **more):
    """In float64, with weights that make norms, biases, gates and routers matter."""
    torch.manual_seed(0)
    make = FAMILIES[family][0]
    settings = RELATIVE if name == "xl" else SETTINGS[name]
    module = make(self_attention=True, **settings, **more)
    # The equations read it from the module
    assert ("rope_scaling" in settings) == (
        getattr(module.positions, "scaling", None) is not None
    )
    return equations.drawn(module.double().eval())


def hidden_keys(module):
    """[T, S], additive: the future, and what lies before the window."""
    place = torch.arange(T)
    hidden = place > place[:, None]
    if module.window is not None:
        hidden |= place <= place[:, None] - module.window
    return torch.zeros(T, T, dtype=torch.float64).masked_fill(hidden, -math.inf)


@pytest.mark.thorough(keep=("[MoA-", "[dense-", "[latent-", "all"))
@pytest.mark.parametrize(("family", "name"), TAKEN)
def test_output_and_every_gradient(family, name):
    module = build(family, name)
    x = torch.randn(B, T, module.embed_dim, dtype=torch.float64, requires_grad=True)
    padding = PADDING.flip(1)
    out = module(x, causal=True, padding=padding)
    # padding follows the real tokens, which do not see it
    exact = FAMILIES[family][1](module, x, x, hidden_keys(module), None, None)
    real = ~padding
    torch.testing.assert_close(out[real], exact[real], rtol=0, atol=1e-11)
    upstream = torch.randn(out.shape, dtype=torch.float64) * real.unsqueeze(-1)
    leaves = [x, *(leaf for leaf in module.parameters() if leaf.requires_grad)]
    given = [
        torch.autograd.grad(each, leaves, upstream, allow_unused=True, materialize_grads=True)
        for each in (out, exact)
    ]
    for one, other in zip(*given):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.thorough(keep=("[MoA-", "[dense-", "all"))
@pytest.mark.parametrize(("family", "name"), STEPS)
def test_step_by_step_with_padding_reordered_and_trimmed(family, name):
    """Also with the padding, or a mask, of all positions, those that a window has dropped included."""
    module = build(family, name)
    order = torch.tensor([2, 0, 1])
    x = torch.randn(B, T, module.embed_dim, dtype=torch.float64)
    whole = module(x, padding=PADDING, causal=True)
    cache = module.new_cache()
    rows = torch.arange(B)
    start = 0
    for size in (1, 3, 1, 2):
        end = start + size
        for again in range(2):
            if again and not (cache.can_trim and cache.dropped + (cache.needed or 0) <= start):
                break
            if again:
                cache.trim(start)
            padding = PADDING[rows, :end] if again else PADDING[rows, start:end]
            mask = {"mask": torch.zeros(end - start, end, dtype=torch.bool)} if again else {}
            out = module(x[rows, start:end], padding=padding, causal=True, cache=cache, **mask)
            assert cache.length == end
            real = ~PADDING[rows, start:end]
            torch.testing.assert_close(
                out[real], whole[rows, start:end][real], rtol=0, atol=1e-11
            )
        if module.window is not None:
            assert cache.keys.size(2) <= module.window - 1 + end - start
        rows = rows[order]
        start = end
        cache.reorder(order)


def test_a_cached_step_of_dynamic_positions_turns_at_the_speed_of_all_positions_so_far():
    positions = build("MoA", "dynamic").positions
    q, k = torch.randn(2, 1, 1, 1, 2 * positions.rotary_dim, dtype=torch.float64)
    angles, _ = equations.speeds(positions, 7)
    for x, turned in zip((q, k), positions.rotate(q, k, 6)):
        one, other, rest = x.split([len(angles), len(angles), 2 * len(angles)], dim=-1)
        angle = 6 * torch.tensor(angles, dtype=torch.float64)
        exact = [
            one * angle.cos() - other * angle.sin(),
            one * angle.sin() + other * angle.cos(),
        ]
        torch.testing.assert_close(turned, torch.cat([*exact, rest], -1))


@pytest.mark.parametrize(("weight", "count"), [("learned", 2), ("none", 0)])
def test_norms_of_queries_and_keys_have_weights_if_these_are_learned(weight, count):
    module = MOA(self_attention=True, query_key_norm="head", query_key_norm_weight=weight)
    names = [name for name, _ in module.named_parameters() if "norm" in name]
    assert len(names) == count


@pytest.mark.parametrize(("family", "name"), [pair for pair in PAIRS if pair not in TAKEN])
def test_settings_without_a_meaning_are_refused_by_name(family, name):
    with pytest.raises(UserError, match=r"query_key_norm|rotary_dim"):
        build(family, name)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rope_base": 5e5}, "rope_base=500000.0"),
        ({"rotary_dim": 4, "positions": "xl"}, "rotary_dim=4"),
        ({"rotary_dim": 1, **ROPE}, "rotary_dim=1"),
        ({"rotary_dim": 9, **ROPE}, "rotary_dim=9"),
        ({"rotary_dim": 4, "positions": "rope-half"}, "rotary_dim=4"),
        ({"rotary_dim": 2, "rope_scaling": DYNAMIC, **ROPE}, "rope_scaling"),
        ({"rope_base": 0.5, **ROPE}, "rope_base=0.5"),
        ({"rope_scaling": "{", **ROPE}, "rope_scaling"),
        ({"rope_scaling": "3", **ROPE}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "longrope"}, **ROPE}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}, **ROPE}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}, **ROPE}, "factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 1}, **ROPE},
            "beta_fast",
        ),
        ({"rope_scaling": {**YARN, "rope_theta": 1e4}, **ROPE}, "rope_base"),
        ({"rope_scaling": {**YARN, "beta_fast": "x"}, **ROPE}, "beta_fast"),
        ({"rope_scaling": {**YARN, "mscale": -1}, **ROPE}, "mscale"),
        ({"query_key_norm": "both"}, "query_key_norm both"),
        ({"query_key_norm": "rotated"}, "query_key_norm='rotated'"),
        ({"query_key_norm_weight": "none"}, "query_key_norm_weight='none'"),
        ({"window": 0}, "window=0"),
        ({"window": 2, "self_attention": False}, "window=2"),
    ],
)
def test_impossible_settings_are_refused_by_name(options, named):
    MOA(self_attention=True)
    with pytest.raises(UserError, match=named):
        MOA(**{"self_attention": True, **options})


def test_a_window_needs_causality_and_a_trimmed_cache_its_keys():
    module = build("MoA", "window")
    x = torch.randn(B, T, C, dtype=torch.float64)
    cache = module.new_cache()
    with pytest.raises(ValueError, match="causal=True"):
        module(x)
    for start in range(T):
        module(x[:, start : start + 1], cache=cache)
    with pytest.raises(ValueError, match="window"):
        cache.trim(2)
    with pytest.raises(ValueError, match="window"):
        cache.trim(T - 2)


@pytest.mark.parametrize("length", [2, 5, T, 11])
@pytest.mark.parametrize("cross", [MOA, partial(DenseAttention, C, 3)])
def test_query_t_sees_the_first_t_vectors_of_a_memory(cross, length):
    module = equations.drawn(cross().double().eval())
    x = torch.randn(B, T, C, dtype=torch.float64)
    memory = torch.randn(B, length, C, dtype=torch.float64)
    out = module(x, memory, causal=True)
    for t in range(T):
        alone = module(x[:, t : t + 1], memory[:, : t + 1])
        torch.testing.assert_close(out[:, t : t + 1], alone)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, "MAE, learned gate"])
def test_a_pass_without_gradients_records_none(family, training):
    learned = partial(MixtureOfAttentiveExperts, 24, 3, causal=True)
    make = learned if family == "MAE, learned gate" else FAMILIES[family][0]
    module = equations.drawn(make(self_attention=True).double().train(training))
    x = torch.randn(B, T, module.embed_dim, dtype=torch.float64)
    with torch.no_grad():
        out, routings = module(x, causal=True, with_routing=True)
    assert not out.requires_grad
    for routing in routings:
        for tensor in vars(routing).values():
            assert not getattr(tensor, "requires_grad", False)


def test_yarns_factor_for_attention():
    """As transformers has it: given, made of mscale and mscale_all_dim, or of the factor."""
    for more, expected in (
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.7}, 0.7),
        (
            {"mscale": 0.5, "mscale_all_dim": 2},
            (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1),
        ),
        ({"mscale": 0.5, "mscale_all_dim": 0}, 0.1 * math.log(4) + 1),  # 0 is no value
        ({"mscale": 0, "mscale_all_dim": 2}, 0.1 * math.log(4) + 1),
        ({"mscale": 0.5}, 0.1 * math.log(4) + 1),
    ):
        module = MOA(self_attention=True, rope_scaling={**YARN, **more}, **ROPE)
        q, k = torch.randn(2, 1, 4, 5, 8, dtype=torch.float64)
        rotated, _ = module.positions.rotate(q, k, 0)
        torch.testing.assert_close(rotated.norm(), expected * q.norm())


def test_yarns_ramp_ends_at_the_last_number():
    """With 1,000 original positions the ramp would end beyond the last pair.

    It ends at index 7, the last of the R = 8 numbers, not at the last of the 4 pairs.
    """
    scaling = RopeScaling("yarn", 4.0, original_max_position_embeddings=1000, beta_fast=1000)
    angles = scaling.scale_angles(torch.ones(4, dtype=torch.float64), base=2.0)
    torch.testing.assert_close(angles, 1 - torch.arange(4, dtype=torch.float64) * 3 / 4 / 7)


@pytest.mark.parametrize(("width", "heads"), [(25, 1), (25, 5), (27, 1), (27, 3)])
def test_rotary_positions_of_odd_widths(width, heads):
    module = equations.drawn(DenseAttention(width, heads, self_attention=True, **ROPE).double())
    x = torch.randn(B, T, width, dtype=torch.float64)
    torch.testing.assert_close(
        module(x, causal=True), equations.dense(module, x, x, hidden_keys(module), None, None)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_of_cross_attention_with_cached_keys(family):
    if family == "latent":
        return
    torch.manual_seed(1)
    module = equations.drawn(FAMILIES[family][0](query_key_norm="head").double().eval())
    x, memory = (torch.randn(B, size, module.embed_dim, dtype=torch.float64) for size in (T, 4))
    whole = module(x, memory)
    cache = module.new_cache()
    torch.testing.assert_close(whole, FAMILIES[family][1](module, x, memory, None, None, None))
    steps = [module(x[:, t : t + 1], memory, cache=cache) for t in range(T)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


def relative_error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@torch.no_grad()
@pytest.mark.parametrize(("family", "name"), [pair for pair in TAKEN if pair[1] == "all"])
def test_autocast_whole_and_step_by_step(family, name):
    """Angles, norms and routers stay wide; what the bfloat16 of a product loses is all that is lost."""
    module = build(family, name)
    x = torch.randn(B, T, module.embed_dim, dtype=torch.float64)
    exact = module(x, causal=True)
    narrow = module.float()
    cache = narrow.new_cache()
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(narrow(x.float(), causal=True), exact) < 0.03
        steps = [narrow(x[:, t : t + 1].float(), cache=cache) for t in range(T)]
    assert relative_error(torch.cat(steps, 1), exact) < 0.03


ODD = pytest.mark.parametrize(("family", "name"), [("MoA", "all"), ("dense", "dynamic")])


@pytest.mark.parametrize("kind", ["rope", "rope-half"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rotation_is_rounded_once(kind, dtype):
    """Not its cosines and sines first: a number may be a small difference of two large products."""
    torch.manual_seed(0)
    positions = MOA(self_attention=True, positions=kind).positions
    q, k = torch.randn(2, 1, 1, 200, 8, dtype=dtype)
    exact = positions.rotate(q.double(), k.double(), 0)
    for one, other in zip(positions.rotate(q, k, 0), exact):
        assert one.dtype == dtype
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(one.double(), other, rtol=rounding, atol=1e-6)


@pytest.mark.thorough(keep="dynamic")
@ODD
def test_exported_with_any_length(family, name):
    module = build(family, name)
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(
        module,
        (torch.randn(B, T, module.embed_dim, dtype=torch.float64),),
        {"causal": True},
        dynamic_shapes={"x": {1: length}, "causal": None},
    ).module()
    for tokens in (2, 30):
        x = torch.randn(B, tokens, module.embed_dim, dtype=torch.float64)
        torch.testing.assert_close(exported(x, causal=True), module(x, causal=True))


@ODD
def test_eight_threads_have_the_results_of_one(family, name):
    """Steps with a cache each, and gradients, of one module."""
    module = build(family, name)
    texts = torch.randn(THREADS, B, T, module.embed_dim, dtype=torch.float64)

    def run(number):
        x = texts[number]
        with torch.no_grad():
            cache = module.new_cache()
            steps = [module(part, causal=True, cache=cache) for part in x.split(2, 1)]
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(leaf, causal=True).square().sum(), leaf)
        return torch.cat(steps, 1), gradient

    assert_same_in_threads(run, 1)


def gradients_by_two(rank, folder):
    """One of two processes: half of each batch, by DistributedDataParallel, against the whole batch."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    for family in FAMILIES:
        module = build(family, "base" if family == "latent" else "norm")
        whole = copy.deepcopy(module)
        wrapped = torch.nn.parallel.DistributedDataParallel(module)
        torch.manual_seed(2)
        # The second pass fails where a parameter of the first had no gradient
        for _ in range(2):
            x = torch.randn(2 * B, T, module.embed_dim, dtype=torch.float64)
            wrapped(x.chunk(2)[rank], causal=True).square().sum().mul(2).backward()
            whole(x, causal=True).square().sum().backward()
        for one, other in zip(module.parameters(), whole.parameters()):
            if other.grad is not None:
                torch.testing.assert_close(one.grad, other.grad)
    torch.distributed.destroy_process_group()
    # The wrapped module's destructor may wait for gloo's thread, which waits for the interpreter's lock
    os._exit(0)


def test_two_processes_have_the_gradients_of_one(tmp_path):
    torch.multiprocessing.start_processes(
        gradients_by_two, args=(tmp_path,), nprocs=2, start_method="fork"
    )
