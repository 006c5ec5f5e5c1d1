"""Every attention as a plain module: batch first, with a cache, compiled, exported, on the meta device."""

import copy
import functools
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from equations import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from time_first import with_fairseq_call
from torch import nn

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
    moa,
)
from moa_fairseq.layers.gqe import OUTPUTS
from moa_fairseq.layers.losses import BALANCE_LOSSES, OF_ANY_FAMILY
from moa_fairseq.layers.moa import MoASettings
from moa_fairseq.layers.torch_compat import without_fused_attention

B = 3
T = 7
S = 5
C = 16


def gqe(output):
    return lambda **options: GroupedQueryExperts(
        C,
        gqe_groups=2,
        num_experts=4,
        experts_per_token=2,
        expert_dim=8,
        gqe_output=output,
        **options,
    )


EXPERTS = dict(num_experts=6, experts_per_token=2, expert_dim=8)
FAMILIES = {
    "dense": lambda **options: DenseAttention(C, 4, **options),
    "multi-query": lambda **options: DenseAttention(C, 4, key_heads=1, **options),
    "latent": lambda **options: LatentAttention(C, 4, latent_norm=True, **options),
    "MoA": lambda **options: MixtureOfAttention(C, **EXPERTS, **options),
    "MoA, all experts": lambda **options: MixtureOfAttention(
        C, num_experts=4, experts_per_token=4, **options
    ),
    "MAE": lambda **options: MixtureOfAttentiveExperts(C, 4, causal=True, **options),
    "MAE, window": lambda **options: MixtureOfAttentiveExperts(
        C, 4, causal=True, gate_window=3, **options
    ),
    "MoH": lambda **options: MixtureOfHeads(
        C, 4, moh_shared_heads=1, experts_per_token=2, **options
    ),
    "MoH, skipping": lambda **options: MixtureOfHeads(
        C, 4, moh_shared_heads=1, experts_per_token=2, moh_skip="always", **options
    ),
    "MoH, query norms": lambda **options: MixtureOfHeads(
        C, 4, moh_shared_heads=1, experts_per_token=2, moh_router="query-norm", **options
    ),
    **{f"GQE {output}": gqe(output) for output in OUTPUTS},
    "NAMOH": lambda **options: NativeMixtureOfHeads(C, **EXPERTS, **options),
    "SwitchHead": lambda **options: SwitchHeadAttention(
        C, switchhead_heads=2, expert_dim=8, num_experts=4, experts_per_token=2, **options
    ),
    "SwitchHead, one choice": lambda **options: SwitchHeadAttention(
        C,
        switchhead_heads=2,
        expert_dim=8,
        num_experts=4,
        experts_per_token=2,
        switchhead_shared_selection=options.get("self_attention", False),
        **options,
    ),
}
POSITIONS = [None, "rope", "xl"]
UNPLACED = ("GQE", "NAMOH", "latent")  # their keys take no "xl"
FUTURE = torch.ones(T, T).triu(1).bool()
PADDING = torch.arange(T) >= torch.tensor([[T], [4], [0]])  # a whole row, a part, none; [B, T]


def build(family, **options):
    """In float64, with weights that make biases, gates and routers matter."""
    torch.manual_seed(1)
    return drawn(FAMILIES[family](**options).double().eval())


@pytest.fixture(params=FAMILIES)
def attention(request):
    torch.manual_seed(1)
    return FAMILIES[request.param](self_attention=True).eval()


def fairseq_call(module, x, memory=None, padding=None, mask=None):
    """The same weights by fairseq's call."""
    twin = with_fairseq_call(type(module)).__new__(with_fairseq_call(type(module)))
    twin.__dict__.update(module.__dict__, encoder_decoder_attention=memory is not None)
    keys = (x if memory is None else memory).transpose(0, 1)
    own = padding if memory is None else None
    out, _ = twin(
        x.transpose(0, 1),
        keys,
        keys,
        padding,
        attn_mask=mask,
        need_weights=False,
        query_padding_mask=own,
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize(
    ("mask", "causal", "whole"),
    [
        (None, False, None),
        (None, True, FUTURE),
        (FUTURE.T, False, FUTURE.T),
        (torch.eye(T).bool().roll(1), True, torch.eye(T).bool().roll(1) | FUTURE),
        (
            torch.full((T, T), 0.5),
            True,
            torch.full((T, T), 0.5).masked_fill(FUTURE, -torch.inf),
        ),
    ],
)
def test_equal_to_fairseqs_call(attention, mask, causal, whole):
    for dtype, padding in ((torch.float32, None), (torch.bfloat16, PADDING)):
        x = torch.randn(B, T, C, dtype=dtype, requires_grad=True)
        module = attention.to(dtype)
        out = module(x, mask=mask, padding=padding, causal=causal)
        expected = fairseq_call(module, x, padding=padding, mask=whole)
        assert out.shape == (B, T, C) and out.dtype == dtype
        real = slice(None) if padding is None else ~padding
        assert torch.equal(out[real], expected[real])
        (gradient,) = torch.autograd.grad(out[real].square().sum(), x)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_memory_makes_cross_attention(family):
    torch.manual_seed(2)
    module = FAMILIES[family]().eval()
    x = torch.randn(B, T, C)
    memory = torch.randn(B, S, C)
    padding = PADDING[:, :S]
    out = module(x, memory, padding=padding)
    assert torch.equal(out, fairseq_call(module, x, memory, padding))


prepared = functools.cache(build)
FEW = settings(max_examples=settings.default.max_examples // 10)  # of each family


def bits(draw, *shape):
    """A tensor of bool, drawn."""
    count = math.prod(shape)
    number = draw(st.integers(0, 2**count - 1))
    return torch.tensor([number >> place & 1 for place in range(count)]).bool().view(shape)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@FEW
@given(st.data())
def test_a_sentence_gets_alone_what_it_gets_in_a_batch(family, data):
    """Wherever its padding stands; alone its mask is additive, and blocks the future itself."""
    draw = data.draw
    placed = st.sampled_from(POSITIONS[: 2 if family.startswith(UNPLACED) else 3])
    module = prepared(family, self_attention=True, positions=draw(placed))
    torch.manual_seed(draw(st.integers(0, 99)))
    spans = st.tuples(st.integers(0, 2), st.integers(1, 4))
    spans = [
        (first, first + size) for first, size in draw(st.lists(spans, min_size=1, max_size=3))
    ]
    longest = max(end for _, end in spans) + draw(st.integers(0, 1))
    place = torch.arange(longest)
    padding = torch.stack([(place < first) | (place >= end) for first, end in spans])
    x = torch.randn(len(spans), longest, C, dtype=torch.float64)
    options = {"causal": draw(st.booleans())}
    if padding.any() or draw(st.booleans()):
        options["padding"] = padding
    shape = (longest, longest)
    shape = draw(st.sampled_from([shape, (len(spans), *shape)]))
    added = torch.zeros(shape, dtype=torch.float64)
    form = draw(st.sampled_from([None, "bool", "float"]))
    blocked = bits(draw, *shape) if form else added.bool()
    if form == "float":
        added = torch.randn_like(added)
        options["mask"] = added.masked_fill(blocked, -torch.inf)
    elif form:
        options["mask"] = blocked
    whole = module(x, **options)
    if options["causal"]:
        blocked = blocked | torch.ones(longest, longest).triu(1).bool()
    masks = added.masked_fill(blocked, -torch.inf).expand(len(spans), -1, -1)
    for row, (first, end) in enumerate(spans):
        alone = module(x[row, None, first:end], mask=masks[row, first:end, first:end])
        torch.testing.assert_close(whole[row, None, first:end], alone)


@pytest.mark.thorough(keep="[dense]", one_in=3)
@pytest.mark.slow
def test_compiled_without_a_break_and_exported(attention):
    """Forward, backward, routing and its losses: fullgraph raises at the first break."""
    torch.compiler.reset()  # torch compiles one `forward` for few classes in a process

    def step(x, padding):
        out, routings = attention(x, padding=padding, causal=True, with_routing=True)
        losses = [loss(each) for each in routings for loss in OF_ANY_FAMILY.values()]
        return out[~padding].square().sum(), torch.stack(
            losses
        ).sum() if losses else out.new_zeros(())

    x = torch.randn(B, T, C, requires_grad=True)
    found = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        values = run(x, PADDING)
        leaves = [x, *attention.parameters()]
        grads = torch.autograd.grad(
            sum(values), leaves, allow_unused=True, materialize_grads=True
        )
        found.append((*values, *grads))
    for eager, compiled in zip(*found):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.thorough
def test_exported_with_any_length(attention):
    x = torch.randn(B, T, C)
    options = {"padding": PADDING, "causal": True}
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(
        attention,
        (x,),
        options,
        dynamic_shapes={"x": {1: length}, "padding": {1: length}, "causal": None},
    ).module()
    for tokens in (2, T, 40):
        x = torch.randn(B, tokens, C)
        padding = torch.arange(tokens) >= torch.tensor([[tokens], [2], [1]])
        expected = attention(x, padding=padding, causal=True)[~padding]
        torch.testing.assert_close(
            exported(x, padding=padding, causal=True)[~padding], expected
        )


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["dense", "MoA", "MoH", "SwitchHead"])
@pytest.mark.parametrize("positions", ["xl", "rope"])
def test_positions_compile_without_a_break(family, positions):
    torch.compiler.reset()
    module = FAMILIES[family](self_attention=True, positions=positions)
    x = torch.randn(B, T, C)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_comes_out_of_nothing(family):
    for head_gate in ("head", "element"):
        module = FAMILIES[family](self_attention=True, head_gate=head_gate)
        for shape in ((0, T, C), (B, 0, C)):
            assert module(torch.randn(shape)).shape == shape


class Adapter(nn.Module):
    """A change of a linear map, as LoRA's; it has no weight itself."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.change = nn.Parameter(0.3 * torch.randn_like(linear.weight))

    def forward(self, x):
        return self.linear(x) + F.linear(x, self.change)


def touched(family):
    """A layer with as many linear maps as it can have, and their names."""
    xl = family.split()[0].rstrip(",") not in ("GQE", "NAMOH", "latent")
    module = build(
        family, self_attention=True, head_gate="head", positions="xl" if xl else None
    )
    return module, [
        name for name, part in module.named_modules() if isinstance(part, nn.Linear)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_in_for_a_linear_map_is_called(family, monkeypatch):
    monkeypatch.setattr(moa, "_ROWS_OF_ONE_PRODUCT", 0)
    module, names = touched(family)
    x = torch.randn(B, T, C, dtype=torch.float64)
    assert names
    for name in names:
        changed = copy.deepcopy(module)
        expected = copy.deepcopy(module)
        adapter = Adapter(changed.get_submodule(name))
        parent, _, own = name.rpartition(".")
        setattr(changed.get_submodule(parent), own, adapter)
        with torch.no_grad():
            expected.get_submodule(name).weight += adapter.change
        assert not torch.allclose(expected(x), module(x)), name
        torch.testing.assert_close(changed(x), expected(x))


# what the queries' norms choose is not the same in 8 bits
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:must run observer")
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "MoH, query norms"])
def test_torchs_own_quantisation(family):
    """Its maps have a method named weight. Routers stay as they are, for the same reason."""
    module, names = touched(family)
    module = module.float()
    chosen = {name for name in names if "router" not in name}
    quantised = torch.ao.quantization.quantize_dynamic(
        module, dict.fromkeys(chosen, torch.ao.quantization.default_dynamic_qconfig)
    )
    x = torch.randn(B, T, C)
    exact = module(x, causal=True)
    assert (quantised(x, causal=True) - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_of_linear_maps_are_called(family, monkeypatch):
    monkeypatch.setattr(moa, "_ROWS_OF_ONE_PRODUCT", 0)
    module, names = touched(family)
    x = torch.randn(B, T, C, dtype=torch.float64, requires_grad=True)
    seen = set()
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        hooks = [
            getattr(module.get_submodule(name), f"register_{kind}_hook")(
                lambda *_, name=name: seen.add(name)
            )
            for name in names
        ]
        module(x).square().sum().backward()
        for hook in hooks:
            hook.remove()
        has_no_gates = family == "GQE hard" and "backward" in kind
        assert seen == set(names) - ({"router.projection"} if has_no_gates else set()), kind
        seen.clear()
    hook = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.add(part))
    module(x)
    hook.remove()
    assert {module.get_submodule(name) for name in names} <= seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_on_the_meta_device(family):
    with torch.device("meta"):
        module = FAMILIES[family]()
        memory = torch.randn(B, S, C)
        x = torch.randn(B, T, C)
        padding = torch.zeros(B, T, dtype=torch.bool)
        many = torch.randn(2, 3000, C)
    out = module(x, padding=padding, causal=True)
    out.sum().backward()
    assert out.is_meta and out.shape == x.shape
    assert module(x, memory).shape == x.shape and module(many).shape == many.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_routings_come_with_the_output(family):
    module = build(family)
    x = torch.randn(B, T, C, dtype=torch.float64)
    memory = torch.randn(B, S, C, dtype=torch.float64)
    own = module(x, with_routing=True)
    cross = module(x, memory, with_routing=True)
    sides = [[routing.side for routing in routings] for _, routings in (own, cross)]
    two = ["queries", "keys"]
    expected = {"dense": [], "multi": [], "latent": [], "SwitchHead": two, "NAMOH": two}.get(
        family.split("-")[0].split(",")[0]
    )
    assert sides == [["queries"] if expected is None else expected] * 2
    assert torch.equal(own[0], module(x)) and torch.equal(cross[0], module(x, memory))
    for routing in own[1]:
        assert routing.gates.size(0) == B * T and BALANCE_LOSSES["moa"](routing).isfinite()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_add_up_to_one(family):
    module = build(family, self_attention=True)
    x = torch.randn(B, T, C, dtype=torch.float64)
    out, weights = module.with_weights(x, padding=PADDING, causal=True)
    torch.testing.assert_close(out[~PADDING], module(x, padding=PADDING, causal=True)[~PADDING])
    assert weights.shape == (B, module.num_heads if "MoH" not in family else 3, T, T)
    sums = weights.sum(-1).transpose(1, 2)[~PADDING]
    torch.testing.assert_close(sums, torch.ones_like(sums))
    assert (
        not weights.transpose(1, 2)[~PADDING][..., 1:].triu(T).any()
        and not weights.triu(1).any()
    )


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@FEW
@given(st.data())
def test_any_steps_equal_the_whole(family, data):
    """Of any sizes, in beams, with positions taken back, and padding named for the step or for all so far."""
    draw = data.draw
    placed = st.sampled_from(POSITIONS[: 2 if family.startswith(UNPLACED) else 3])
    module = prepared(family, self_attention=True, positions=draw(placed))
    torch.manual_seed(draw(st.integers(0, 99)))
    cache = module.new_cache()
    x = torch.zeros(B, 0, C, dtype=torch.float64)
    padding = torch.zeros(B, 0, dtype=torch.bool)
    for size in draw(st.lists(st.integers(0, 3), min_size=1, max_size=5)):
        start = x.size(1)
        x = torch.cat([x, torch.randn(B, size, C, dtype=torch.float64)], 1)
        padding = torch.cat([padding, bits(draw, B, size)], 1)
        now = padding[:, start:]
        named = [now, padding] if now.any() else [None, now, padding]
        named = draw(st.sampled_from(named))
        out = module(x[:, start:], padding=named, causal=True, cache=cache)
        whole = module(x, padding=padding, causal=True)[:, start:]
        torch.testing.assert_close(out[~now], whole[~now])
        assert cache.length == x.size(1)
        if draw(st.booleans()):
            order = torch.tensor(draw(st.lists(st.integers(0, B - 1), min_size=B, max_size=B)))
            cache.reorder(order)
            x, padding = x[order], padding[order]
        if cache.can_trim:
            length = x.size(1) - draw(st.integers(0, min(2, x.size(1))))
            cache.trim(length)
            x, padding = x[:, :length], padding[:, :length]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_cache_cannot_forget_is_refused(family):
    module = build(family, self_attention=True)
    cache = module.new_cache()
    module(torch.randn(B, 3, C, dtype=torch.float64), causal=True, cache=cache)
    length, says = (2, "trimmed") if family.startswith("MAE") else (4, "length 4")
    with pytest.raises(ValueError, match=says):
        cache.trim(length)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_memorys_keys_are_made_once(family):
    module = build(family)
    x = torch.randn(B, T, C, dtype=torch.float64)
    memory = torch.randn(B, S, C, dtype=torch.float64)
    padding = PADDING[:, :S]
    made = []
    whole = module(x, memory, padding=padding)
    cache = module.new_cache()
    module.get_submodule(module.memory_projections[0]).register_forward_hook(
        lambda *_: made.append(1)
    )
    for step in range(T):
        given = {"memory": memory} if step % 2 == 0 else {}
        given["padding"] = padding if step % 3 == 0 else None
        out = module(x[:, step : step + 1], cache=cache, **given)
        torch.testing.assert_close(out[:, 0], whole[:, step])
    assert made == [1]
    with pytest.raises(ValueError, match="another memory"):
        module(x[:, :1], memory.clone(), cache=cache)


X = torch.zeros(B, T, C)
LATER = torch.ones(T, T).triu(1).bool()
REFUSED = [
    # keywords of torch's and fairseq's attention, alone and with what is read
    (TypeError, "padding", (X,), {"key_padding_mask": PADDING}),
    (TypeError, "mask", (X,), {"attn_mask": LATER}),
    (TypeError, "causal", (X,), {"is_causal": True}),
    (TypeError, "with_weights", (X,), {"need_weights": True}),
    (TypeError, "with_weights", (X,), {"need_head_weights": True}),
    (TypeError, "new_cache", (X,), {"causal": True, "incremental_state": {}}),
    (TypeError, "memory", (X,), {"key": X}),
    (TypeError, "positional", (X, X, X), {}),
    (TypeError, "positional", (X, X, X), {"causal": True}),
    (TypeError, "positional", (X, X, X), {"mask": LATER}),
    (TypeError, "positional", (X, X, X), {"padding": PADDING}),
    (TypeError, "static_kv", (X,), {"static_kv": True}),
    (ValueError, "self_attention=True", (X, X), {}),
    (ValueError, "query_padding", (X,), {"query_padding": PADDING}),
    (TypeError, "token_ids", (X,), {"token_ids": torch.zeros(B, T)}),
    # layouts and shapes
    (ValueError, f"C = {C}", (torch.zeros(B, T, C + 1),), {}),
    (ValueError, r"\[B, T, C\]", (torch.zeros(T, C),), {}),
    (ValueError, r"mask is \[7, 8\]", (X,), {"mask": torch.zeros(T, T + 1)}),
    (
        ValueError,
        r"padding is \[3, 8\]",
        (X,),
        {"padding": torch.zeros(B, T + 1, dtype=torch.bool)},
    ),
    (ValueError, r"padding is \[7, 3\]", (X,), {"padding": PADDING.T}),
    # dtypes
    (ValueError, "float64", (X.double(),), {}),
    (ValueError, "int64", (X.long(),), {}),
    (ValueError, "True = padding", (X,), {"padding": PADDING.long()}),
    (ValueError, "True = padding", (X,), {"padding": PADDING.float()}),
    (ValueError, "True = blocked", (X,), {"mask": LATER.long()}),
    # caches
    (ValueError, "new_cache", (X,), {"cache": {}, "causal": True}),
]


@pytest.mark.parametrize(("error", "named", "inputs", "options"), REFUSED)
def test_what_would_not_be_read_is_refused(error, named, inputs, options):
    module = FAMILIES["MoA"](self_attention=True)
    with pytest.raises(error, match=named):
        module(*inputs, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_of_others_are_refused(family):
    module = FAMILIES[family](self_attention=True).eval()
    x = torch.randn(B, T, C)
    cache = module.new_cache()
    module(x, causal=True, cache=cache)
    for other, error in (
        (
            lambda: FAMILIES[family](self_attention=True)(x, causal=True, cache=cache),
            "another|this attention",
        ),
        (lambda: module(x[:2], causal=True, cache=cache), "3 sequences"),
        (lambda: module(x, cache=cache), "causal=True"),
        (lambda: module(x, causal=True, cache=cache, mask=FUTURE), r"mask is \[7, 7\]"),
    ):
        with pytest.raises(ValueError, match=error):
            other()
    cross = FAMILIES[family]().eval()
    cache = cross.new_cache()
    cross(x, causal=True, cache=cache)
    with pytest.raises(ValueError, match="of x"):
        cross(x[:, :1], torch.randn(B, S, C), cache=cache)
    for memory in (torch.randn(B + 1, S, C), torch.randn(B, S, C).double()):
        with pytest.raises(ValueError, match="memory is"):
            cross(x, memory)


def test_a_hash_chooses_by_the_ids_that_are_given():
    module = MixtureOfAttention(C, **EXPERTS, router_choice="hash", self_attention=True)
    x = torch.randn(B, T, C)
    ids = torch.randint(0, 9, (B, T))
    _, (routing,) = module(x, token_ids=ids, with_routing=True)
    chosen = dict(zip(ids.flatten().tolist(), routing.expert_ids.sort(-1).values.tolist()))
    for token, experts in zip(
        ids.flatten().tolist(), routing.expert_ids.sort(-1).values.tolist()
    ):
        assert chosen[token] == experts
    with pytest.raises(UserError, match="token_ids"):
        module(x)


def test_a_gate_over_the_whole_sequence_is_not_causal():
    module = MixtureOfAttentiveExperts(C, 4, self_attention=True)
    for options in ({"causal": True}, {"cache": module.new_cache()}):
        with pytest.raises(ValueError, match="causal=True"):
            module(torch.zeros(B, T, C), **options)


@pytest.mark.parametrize("family", ["MAE", "MoH"])
def test_heads_of_their_own_keys_do_not_share_them(family):
    with pytest.raises(UserError, match="key_heads=2"):
        FAMILIES[family](key_heads=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_has_a_constant_factor(family):
    outputs = []
    for scale in (1.0, 0.25):
        torch.manual_seed(0)
        module = FAMILIES[family](self_attention=True, output_scale=scale).double().eval()
        x = torch.randn(B, T, C, generator=torch.Generator().manual_seed(1)).double()
        outputs.append((module(x, causal=True), *module.with_weights(x, causal=True)))
    (whole, same, weights), (quarter, same_quarter, weights_of_quarter) = outputs
    torch.testing.assert_close(whole / 4, quarter, rtol=0, atol=0)
    torch.testing.assert_close(same / 4, same_quarter, rtol=0, atol=0)
    torch.testing.assert_close(weights, weights_of_quarter, rtol=0, atol=0)


def test_all_experts_with_even_gates_times_k_are_multi_query_attention():
    """The output matrices of the experts, side by side, are the dense one (MoA Eq. 6)."""
    experts = 5
    width = 4
    sizes = dict(num_experts=experts, experts_per_token=experts, expert_dim=width)
    mixture = MixtureOfAttention(
        C, **sizes, router_gates="uniform", output_scale=experts, self_attention=True
    )
    dense = DenseAttention(
        C, experts, attention_head_dim=width, key_heads=1, bias=False, self_attention=True
    )
    with torch.no_grad():
        dense.k_proj.weight.copy_(mixture.k_proj.weight)
        dense.v_proj.weight.copy_(mixture.v_proj.weight)
        dense.q_proj.weight.copy_(
            mixture.q_experts.weight.flatten(0, 1)
        )  # [E, D, C] → [E·D, C]
        dense.out_proj.weight.copy_(mixture.out_experts.weight.flatten(0, 1).t())
    x = torch.randn(B, T, C, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    outputs = [module.double()(x, causal=True) for module in (mixture, dense)]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, upstream)[0] for out in outputs))


def test_what_a_layer_is_built_with_is_read():
    for options, named in (
        ({"positions": "ropee", "self_attention": True}, "positions ropee"),
        ({"positions": "rope"}, "self_attention=True"),
        ({"head_gate": "heads"}, "head_gate"),
        ({"output_scale": 0.0}, "output_scale"),
    ):
        for family in FAMILIES.values():
            with pytest.raises(UserError, match=named):
                family(**options)
    with pytest.raises(UserError, match="router_choice any"):
        SwitchHeadAttention(C, router_choice="any")
    x = torch.randn(B, T, C)
    memory = torch.randn(B, S, 10)
    for module, inputs, named in (
        (DenseAttention(C, 4, kdim=10, vdim=10), (x,), "give memory"),
        (DenseAttention(C, 4, kdim=10), (x, memory), "two inputs"),
        (MixtureOfAttention(C, vdim=10), (x,), "two inputs"),
    ):
        with pytest.raises(ValueError, match=named):
            module(*inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_memory_that_was_written_to_is_another(family):
    cross = build(family)
    x = torch.randn(B, T, C, dtype=torch.float64)
    memory = torch.randn(B, S, C, dtype=torch.float64)
    cache = cross.new_cache()
    cross(x, memory, cache=cache)
    memory += 1
    with pytest.raises(ValueError, match="another memory"):
        cross(x, memory, cache=cache)


def test_settings_are_given_once():
    with pytest.raises(TypeError, match="num_experts"):
        MixtureOfAttention(C, MoASettings(), num_experts=4)
    with pytest.raises(TypeError, match="renormalize"):
        MixtureOfAttention(C, renormalize="full")
    with pytest.raises(TypeError, match="NAMOHSettings"):
        NativeMixtureOfHeads(C, 4)


@pytest.mark.thorough(keep="assign")
@pytest.mark.parametrize("filled", ["assign", "to_empty"])
@pytest.mark.parametrize("family", FAMILIES)
def test_made_on_the_meta_device(family, filled):
    options = dict(self_attention=True, positions="rope")
    module = build(family, **options).float()
    x = torch.randn(B, T, C)
    with torch.device("meta"):
        other = FAMILIES[family](**options)
    if filled == "to_empty":
        other = other.to_empty(device="cpu")
    other.load_state_dict(module.state_dict(), assign=filled == "assign")
    for training in (False, True):
        outs = []
        for each in (module, other):
            torch.manual_seed(3)
            outs.append(each.train(training)(x, causal=True))
        assert torch.equal(*outs)


# the gradient of the gates of query norms is not that of their values
@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family != "MoH, query norms"]
)
def test_differentiated_twice(family):
    """A gradient penalty with a constant incoming gradient, by the attention of torch's that can."""
    # Detached is none, either
    options = {"router_renormalize": "full"} if family in ("MoA", "NAMOH") else {}
    module = build(family, self_attention=True, **options)
    x = torch.randn(2, 4, C, dtype=torch.float64, requires_grad=True)

    def penalty(x):
        with without_fused_attention():
            (grad,) = torch.autograd.grad(module(x, causal=True).sum(), x, create_graph=True)
        return grad.square().sum()

    (exact,) = torch.autograd.grad(penalty(x), x)
    direction = torch.randn_like(x)
    step = 1e-5
    sides = [
        penalty((x + sign * step * direction).detach().requires_grad_()) for sign in (1, -1)
    ]
    numeric = (sides[0] - sides[1]) / (2 * step)
    torch.testing.assert_close(
        (exact * direction).sum(), numeric.detach(), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_func(family):
    module = build(family, self_attention=True)
    x = torch.randn(B, T, C, dtype=torch.float64)
    weights = dict(module.named_parameters())

    def loss(weights):
        return (
            torch.func.functional_call(module, weights, (x,), {"causal": True}).square().sum()
        )

    options = {"allow_unused": True, "materialize_grads": True}
    expected = torch.autograd.grad(loss(weights), list(weights.values()), **options)
    found = torch.func.grad(loss)(weights)
    torch.testing.assert_close(list(found.values()), list(expected))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("family", FAMILIES)
def test_torch_func_maps_and_pushes_forward(family):
    """Padding is mapped, too, which masks of every kind are made of."""
    module = build(family, self_attention=True, positions="rope")
    x = torch.randn(2, B, T, C, dtype=torch.float64)
    padding = torch.stack([PADDING, PADDING.roll(1, 0)])
    for causal in (False, True):

        def run(x, padding, causal=causal):
            return module(x, padding=padding, causal=causal).masked_fill(
                padding.unsqueeze(-1), 0.0
            )

        expected = torch.stack([run(*pair) for pair in zip(x, padding)])
        torch.testing.assert_close(torch.func.vmap(run)(x, padding), expected)
    torch.testing.assert_close(
        torch.func.vmap(module)(x), torch.stack([module(sequences) for sequences in x])
    )
    with without_fused_attention():  # torch's fused kernel for CPUs has no forward derivative
        out, tangent = torch.func.jvp(lambda x: run(x, PADDING), (x[0],), (x[1],))
        y = x[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(run(y, PADDING).sum(), y)
    assert out.shape == x[0].shape
    torch.testing.assert_close(tangent.sum(), (grad * x[1]).sum())


# A few more calls are no fault, but each has its reason: a token's way through a layer stays short.
@pytest.mark.parametrize(
    ("family", "most", "files"),
    [
        ("dense", 13, 4),
        ("MoA", 25, 10),
        ("MoH", 24, 11),
        ("MAE", 28, 10),
        ("SwitchHead", 33, 12),
        ("GQE paper", 33, 12),
        ("NAMOH", 53, 12),
        ("latent", 14, 5),
    ],
)
def test_python_calls_of_a_pass(family, most, files):
    module = FAMILIES[family](self_attention=True).eval()
    x = torch.randn(2, 27, C)
    seen = []

    def note(frame, event, argument):
        if event == "call" and "moa_fairseq" in Path(frame.f_code.co_filename).parts:
            seen.append(frame.f_code.co_filename)

    with torch.no_grad():
        module(x)  # what is computed once
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            module(x)
        finally:
            sys.setprofile(before)
    assert len(seen) <= most and len(set(seen)) <= files, seen
