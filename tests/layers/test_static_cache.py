"""A cache that is written in place gives what the growing one gives, whatever the steps are."""

import functools

import pytest
import torch
from equations import drawn
from host_waits import host_waits, listed
from hypothesis import given, settings
from hypothesis import strategies as st
from test_common_settings import DYNAMIC, EXPERTS, YARN, B, C
from test_common_settings import FAMILIES as BUILD
from torch._dynamo.testing import CompileCounter

from moa_fairseq.errors import UserError
from moa_fairseq.layers import (
    MixtureOfAttention,
    MixtureOfAttentiveExperts,
    NativeMixtureOfHeads,
)

LONGEST = 24
FAMILIES = [family for family in BUILD if family not in ("MAE", "NAMOH")]
BY_KERNELS = ("MoA", "MoA, two heads each", "SwitchHead", "GQE")
SETTINGS = [
    {},
    {"positions": "rope"},
    {"positions": "rope", "rope_scaling": DYNAMIC, "window": 5},
    {"positions": "rope", "rope_scaling": YARN, "rope_base": 500.0, "window": 2},
    {"positions": "xl", "query_key_norm": "head"},
    {"window": 1, "query_key_norm": "head"},
]


def build(family, options):
    torch.manual_seed(3)
    if family == "latent":
        options = {name: value for name, value in options.items() if name != "query_key_norm"}
    if family == "latent" or (family == "GQE" and options.get("positions") == "xl"):
        options = {**options, "positions": "rope"}
    return drawn(BUILD[family][0](self_attention=True, **options).double().eval())


prepared = functools.cache(lambda family, number: build(family, SETTINGS[number]))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=settings.default.max_examples // 8)
@given(st.sampled_from(range(len(SETTINGS))), st.randoms())
def test_any_steps_equal_those_of_the_growing_cache(family, number, choose):
    """Tokens, padding, masks, orders, lengths to go back to."""
    module = prepared(family, number)
    random_rows = torch.Generator().manual_seed(choose.randint(0, 99))
    growing = module.new_cache()
    static = module.new_cache(batch=B, max_length=LONGEST)
    padding = torch.zeros(B, 0, dtype=torch.bool)
    calls = 0
    while calls < 5:
        size = choose.randint(1, 7)
        end = padding.size(1) + size
        if end > LONGEST:
            return
        calls += 1
        x = torch.randn(B, size, module.embed_dim, generator=random_rows, dtype=torch.float64)
        now = torch.rand(B, size, generator=random_rows) < choose.choice((0.0, 0.0, 0.4))
        if calls == 1 and choose.random() < 0.5:  # on the left
            now = torch.arange(size) < torch.randint(size, (B, 1), generator=random_rows)
        padding = torch.cat([padding, now], 1)
        options = {"causal": size > 1 or choose.random() < 0.7}
        if now.any() or choose.random() < 0.3:
            options["padding"] = now if choose.random() < 0.5 else padding
        if choose.random() < 0.3:
            mask = torch.rand(size, end, generator=random_rows) < 0.2
            additive = torch.zeros(size, end, dtype=torch.float64).masked_fill(mask, -torch.inf)
            options["mask"] = choose.choice((mask, mask.expand(B, -1, -1), additive))
        one, other = (module(x, cache=cache, **options) for cache in (growing, static))
        torch.testing.assert_close(other[~now], one[~now], rtol=0, atol=1e-12)
        assert int(static.length) == growing.length == end
        if choose.random() < 0.4:
            order = torch.randint(B, (B,), generator=random_rows)
            growing.reorder(order)
            static.reorder(order)
            padding = padding[order]
        if choose.random() < 0.3:
            first = 0 if not growing.dropped else growing.dropped + growing.needed
            length = choose.randint(min(first, end), end)
            growing.trim(length)
            static.trim(length)
            padding = padding[:, :length]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_it_takes_the_bytes_that_are_stated(family):
    module = BUILD[family][0](self_attention=True).eval()
    cache = module.new_cache(batch=B, max_length=LONGEST)
    places = set()
    for _ in range(3):
        module(torch.randn(B, 1, module.embed_dim), cache=cache)
        places.add((cache.keys.data_ptr(), cache.values.data_ptr(), cache.length.data_ptr()))
    assert len(places) == 1  # written in place
    size = sum(tensor.nbytes for tensor in (cache.keys, cache.values))
    assert size == B * LONGEST * module.cache_bytes(number_bytes=4)
    assert sum(tensor.nbytes for tensor in cache.tensors()) == size + 8


def test_what_it_cannot_hold_is_refused():
    module = build("MoA", {})
    x = torch.randn(B, 2, C, dtype=torch.float64)
    for attention in (
        MixtureOfAttentiveExperts(C, 4, causal=True),
        NativeMixtureOfHeads(C, **EXPERTS),
    ):
        with pytest.raises(UserError, match=f"max_length=9.*{type(attention).__name__}"):
            attention.new_cache(batch=B, max_length=9)
    for sizes in ({"batch": 2}, {"max_length": 3}, {"batch": 2, "max_length": 0}):
        with pytest.raises(UserError, match=r"batch=.*max_length="):
            module.new_cache(**sizes)
    cache = module.new_cache(batch=B, max_length=5)
    with pytest.raises(ValueError, match="no_grad"):
        module(x, causal=True, cache=cache)
    cache = module.new_cache(batch=B, max_length=5)
    with torch.no_grad():
        with pytest.raises(ValueError, match="3 sequences"):
            module(x[:2], causal=True, cache=cache)
        module(x.repeat(1, 2, 1), causal=True, cache=cache)
        with pytest.raises(ValueError, match="max_length=5"):
            module(x, causal=True, cache=cache)
        with pytest.raises(ValueError, match="order"):
            cache.reorder(torch.tensor([0, 1]))
        with pytest.raises(ValueError, match="length 5"):
            cache.trim(5)
        cross = MixtureOfAttention(C, **EXPERTS).double()
        with pytest.raises(ValueError, match="max_length"):
            cross(x, x, cache=cross.new_cache(batch=B, max_length=5))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", SETTINGS[2:5:2], ids=("dynamic", "xl"))
def test_no_step_waits_for_a_gpu(as_by_triton, family, options):
    """After the first call, which makes the tensors: one token, and three with padding.

    moh_skip="always" asks how many tokens chose each head.
    """
    if family in BY_KERNELS:
        options = {**options, "expert_backend": "triton"}
    module = build(family, options)
    for cache in (module.new_cache(), module.new_cache(batch=B, max_length=LONGEST)):
        x = torch.randn(B, 3, module.embed_dim, dtype=torch.float64)
        padding = torch.tensor([[True, False, False]] * B)
        module(x, causal=True, cache=cache, padding=padding)
        with host_waits() as places:
            for _ in range(4):
                module(x[:, :1], causal=True, cache=cache)
                module(x, causal=True, cache=cache, padding=padding)
        waiting = {place.split(":")[0] for place in places}
        skips = family == "MoH, skipping" and options.get("positions") != "xl"
        assert waiting == ({"selected.py"} if skips else set()), listed(places)


@torch.no_grad()
@pytest.mark.thorough(keep="-1-MoA]")
@pytest.mark.parametrize("family", ["MoA", "SwitchHead", "GQE", "MoH", "dense"])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_is_one_graph_for_a_whole_generation(batch, family):
    """fullgraph: nothing in it asks for a tensor's content, or it would break."""
    torch.compiler.reset()
    module = build(family, {"positions": "rope", "query_key_norm": "head", "window": 20})
    counter = CompileCounter()
    step = torch.compile(module, backend=counter, fullgraph=True)
    growing = module.new_cache()
    static = module.new_cache(batch=batch, max_length=40)
    x = torch.randn(batch, 7, module.embed_dim, dtype=torch.float64)
    for cache in (growing, static):
        module(x, causal=True, cache=cache)
    for _ in range(30):
        x = torch.randn(batch, 1, module.embed_dim, dtype=torch.float64)
        expected = module(x, causal=True, cache=growing)
        torch.testing.assert_close(
            step(x, causal=True, cache=static), expected, rtol=0, atol=1e-12
        )
    assert counter.frame_count == 1


@torch.no_grad()
def test_padding_and_masks_of_lengths_without_a_meaning_are_refused():
    """Six positions are held, two are new: lengths are 2 (padding), 8 and 16."""
    torch.compiler.reset()
    module = build("dense", {"positions": "rope"})
    x = torch.randn(B, 8, module.embed_dim, dtype=torch.float64)
    padding = torch.arange(16) < torch.tensor([[3], [0], [1]])
    expected = module(x, causal=True, padding=padding[:, :8])
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    cache = module.new_cache(batch=B, max_length=16)
    module(x[:, :6], causal=True, cache=cache, padding=padding[:, :6])
    for length in range(1, 20):
        if length in (2, 8, 16):
            part = padding[:, 6:8] if length == 2 else padding[:, :length]
            out = compiled(x[:, 6:], causal=True, cache=cache, padding=part)
            torch.testing.assert_close(out, expected[:, 6:], rtol=0, atol=1e-12)
            cache.trim(6)
        else:
            with pytest.raises(ValueError, match=r"padding.*\[3, 2\] or \[3, 8\] or \[3, 16\]"):
                module(
                    x[:, 6:],
                    causal=True,
                    cache=cache,
                    padding=torch.zeros(B, length, dtype=torch.bool),
                )
        mask = torch.zeros(2, length, dtype=torch.bool)
        if length in (8, 16):
            module(x[:, 6:], causal=True, cache=cache, mask=mask)
            cache.trim(6)
        else:
            with pytest.raises(ValueError, match=r"mask.*\[2, 8\] or \[2, 16\]"):
                module(x[:, 6:], causal=True, cache=cache, mask=mask)


@torch.no_grad()
def test_padding_of_all_places_is_cut_at_those_of_the_step():
    """What is not written yet may stand there as padding; what is padding may hold anything."""
    module = build("dense", {"positions": "rope"})
    x = torch.randn(B, 8, module.embed_dim, dtype=torch.float64)
    padding = torch.arange(8) < torch.tensor([[3], [0], [7]])
    expected = module(x, causal=True, padding=padding)
    x[padding] = torch.nan
    cache = module.new_cache(batch=B, max_length=16)
    for start in (0, 4):
        everything = torch.ones(B, 16, dtype=torch.bool)
        everything[:, : start + 4] = padding[:, : start + 4]
        out = module(x[:, start : start + 4], causal=True, cache=cache, padding=everything)
        real = ~padding[:, start : start + 4]
        torch.testing.assert_close(
            out[real], expected[:, start : start + 4][real], rtol=0, atol=1e-12
        )


@torch.no_grad()
@pytest.mark.parametrize(
    "sizes", [{}, {"batch": B, "max_length": 16}], ids=("growing", "static")
)
@pytest.mark.parametrize("window", [None, 6])
def test_a_padding_of_all_positions_does_not_show_what_was_padding(sizes, window):
    """Keys of padding are made of zeros: what hides less than an earlier step leaves them hidden."""
    module = build("dense", {"positions": "rope", "window": window})
    x = torch.randn(B, 7, module.embed_dim, dtype=torch.float64)
    padding = torch.arange(7) < torch.tensor([[3], [0], [1]])
    expected = module(x, causal=True, padding=padding)
    cache = module.new_cache(**sizes)
    module(x[:, :5], causal=True, cache=cache, padding=padding[:, :5])
    for end in (6, 7):
        nothing = torch.zeros(B, end, dtype=torch.bool)
        out = module(x[:, end - 1 : end], causal=True, cache=cache, padding=nothing)
        torch.testing.assert_close(out, expected[:, end - 1 : end], rtol=0, atol=1e-12)
