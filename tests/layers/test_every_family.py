"""What every family does alike: generation, causality, padding that holds NaN, batches without rows."""

import math
from functools import partial

import pytest
import torch
from equations import drawn
from time_first import (
    DenseAttention,
    GroupedQueryExperts,
    LatentAttention,
    MixtureOfAttention,
    MixtureOfAttentiveExperts,
    MixtureOfHeads,
    NativeMixtureOfHeads,
    SwitchHeadAttention,
)

from moa_fairseq.layers.load_statistics import load_statistics
from moa_fairseq.layers.losses import OF_ANY_FAMILY
from moa_fairseq.layers.running_statistics import forgetting, running_statistics_of
from moa_fairseq.layers.sigma_moe import SigmaMoESettings
from moa_fairseq.plugin.fairseq_call import FairseqSigmaMoE
from moa_fairseq.plugin.forward_context import collect_routings, forward_context

WIDTH = 16
MOA = partial(MixtureOfAttention, WIDTH, num_experts=4, expert_dim=4)
GQE = partial(
    GroupedQueryExperts, WIDTH, num_experts=4, expert_dim=4, gqe_groups=2, experts_per_token=2
)
MAE = partial(MixtureOfAttentiveExperts, WIDTH, 4)
NAMOH = partial(NativeMixtureOfHeads, WIDTH, num_experts=4, expert_dim=4, experts_per_token=2)
SWITCHHEAD = partial(
    SwitchHeadAttention,
    WIDTH,
    switchhead_heads=2,
    expert_dim=4,
    num_experts=3,
    experts_per_token=2,
)
MOH = partial(MixtureOfHeads, WIDTH, 4, moh_shared_heads=1, experts_per_token=2)
BUILD = {
    "dense": partial(DenseAttention, WIDTH, 4),
    "dense, grouped": partial(DenseAttention, WIDTH, 4, key_heads=2),
    "dense, multi-query": partial(DenseAttention, WIDTH, 4, key_heads=1),
    "latent": partial(LatentAttention, WIDTH, 4),
    "latent, norm": partial(LatentAttention, WIDTH, 4, latent_dim=6, latent_norm=True),
    "moa": partial(MOA, experts_per_token=2, expert_bias=True),
    "moa, all experts": partial(MOA, experts_per_token=4),
    "moa, biased choice": partial(
        MOA, experts_per_token=2, routing_bias_rate=0.1, routing_noise=True
    ),
    "mae": MAE,
    "mae, batch statistics": partial(MAE, gate_norm="batch"),
    "mae, causal": partial(MAE, causal=True),
    "mae, window": partial(MAE, causal=True, gate_window=3),
    "mae, one expert": partial(MAE, causal=True, gate_window=4, mae_evaluate_with="top-expert"),
    "mae, random expert": partial(MAE, causal=True, mae_evaluate_with="random-expert"),
    "mae, uniform": partial(MAE, mae_gate="uniform"),
    "switchhead": SWITCHHEAD,
    "switchhead, vkqo": partial(SWITCHHEAD, switchhead_experts="vkqo"),
    "switchhead, shared": partial(SWITCHHEAD, switchhead_shared_selection=True),
    "switchhead, dense": partial(SWITCHHEAD, switchhead_experts="none"),
    "moh": MOH,
    "moh, skipping": partial(MOH, moh_skip="always"),
    "moh, norms": partial(MOH, moh_router="query-norm"),
    "moh, norms, skipping": partial(MOH, moh_router="query-norm", moh_skip="always"),
    "moh, released": partial(
        MOH, moh_shared_heads=2, experts_per_token=1, moh_scaling="released"
    ),
    "gqe": GQE,
    "gqe, no shared head": partial(GQE, gqe_shared_heads=0),
    "gqe, one group": partial(GQE, gqe_groups=1),
    "gqe, own outputs": partial(
        GQE, gqe_output="experts", gqe_shared_heads=0, expert_bias=True
    ),
    "namoh": NAMOH,
    "namoh, one head each, biases": partial(NAMOH, experts_per_token=1, expert_bias=True),
    "namoh, biased choice": partial(NAMOH, routing_bias_rate=0.1),
    "namoh, all heads": partial(NAMOH, experts_per_token=4),
}
# heads that rotary positions rotate all but one number of, and windows
ODD = {
    "dense, odd heads": partial(DenseAttention, WIDTH, 4, attention_head_dim=5),
    "latent, odd": partial(
        LatentAttention, WIDTH, 4, attention_head_dim=5, latent_dim=7, rotary_key_dim=3
    ),
    "moa, odd heads": partial(MOA, expert_dim=5, experts_per_token=2),
    "switchhead, odd heads": partial(SWITCHHEAD, expert_dim=5),
    "gqe, odd heads": partial(GQE, expert_dim=5),
    "namoh, odd heads": partial(NAMOH, expert_dim=5),
    "moh, odd heads": partial(MixtureOfHeads, 20, 4, moh_shared_heads=1, experts_per_token=2),
    "moa, window": partial(MOA, experts_per_token=2, window=3, query_key_norm="rotated"),
    "namoh, window": partial(NAMOH, window=2, rope_base=100.0),
}
POSITIONS = [None, "rope", "xl"]
# GQE's shared head attends to a mean of keys, each with its own positions; NAMOH's heads see few of the keys;
# latent attention has no key of a single head to place
WITHOUT_XL = {"gqe", *(name for name in BUILD if name.startswith(("namoh", "latent")))}
# [B, T]: full, part, nothing but padding
PADDING = torch.arange(5) >= torch.tensor([[5], [3], [0]])


def future(length):
    return torch.full((length, length), -math.inf).triu(1)


def build(family, **role):
    """In float64, with weights that make biases, gates and routers matter."""
    torch.manual_seed(3)
    return drawn({**BUILD, **ODD}[family](**role).double().eval())


# Those that decide about each query by itself, as a decoder must.
DECODERS = [
    name
    for name in BUILD
    if not name.startswith("mae") or BUILD[name]().gate is None or BUILD[name]().causal
]


@pytest.mark.parametrize(
    ("family", "positions"),
    [
        *((family, None) for family in DECODERS),
        *((family, "rope") for family in ODD),
    ],
)
def test_step_by_step_equals_all_at_once_with_left_padding_and_beams(family, positions):
    attention = build(family, self_attention=True, positions=positions)
    order = torch.tensor([2, 0, 1, 1])
    x = torch.randn(9, 4, attention.embed_dim, dtype=torch.float64)
    padding = torch.arange(9) < torch.tensor([[0], [2], [0], [1]])
    # What follows belongs to the beam that it is in by then
    x = torch.cat([x[:4], x[4:, order.argsort()]])
    beams = torch.arange(4)
    state = {}
    for step in range(9):
        if step == 4:
            attention.reorder_incremental_state(state, order)
            beams = order
        seen = torch.cat([x[:4, beams], x[4:]])[: step + 1] if step > 3 else x[: step + 1]
        mask = padding[beams]
        now = {"key_padding_mask": mask[:, step : step + 1] if mask[:, step].any() else None}
        out, _ = attention(seen[-1:], None, None, incremental_state=state, **now)
        whole, _ = attention(
            seen,
            seen,
            seen,
            key_padding_mask=mask[:, : step + 1],
            attn_mask=future(step + 1).double(),
        )
        real = ~mask[:, step]
        torch.testing.assert_close(out[0, real], whole[-1, real])


@pytest.mark.parametrize("family", DECODERS)
def test_padding_that_first_comes_in_a_later_step_stays_where_it_stands(family):
    """Each step names its own padding, or all so far, or none while there is none; real tokens follow."""
    attention = build(family, self_attention=True)
    x = torch.randn(6, 3, WIDTH, dtype=torch.float64)
    padding = torch.arange(6) == torch.tensor([[6], [3], [4]])
    whole, _ = attention(x, x, x, key_padding_mask=padding, attn_mask=future(6).double())
    for sizes, of_all in (
        ([1] * 6, False),
        ([1] * 6, True),
        ([2, 1, 2, 1], False),
        ([2, 1, 2, 1], True),
    ):
        state = {}
        parts = []
        start = 0
        for size in sizes:
            end = start + size
            mask = padding[:, 0 if of_all else start : end]
            mask = future(end)[start:].double(), mask if mask.any() else None
            now = x[start:end]
            options = {
                "attn_mask": mask[0],
                "key_padding_mask": mask[1],
                "incremental_state": state,
            }
            parts.append(
                attention(now, None, None, query_padding_mask=padding[:, start:end], **options)[
                    0
                ]
            )
            start = end
        real = ~padding.t()
        torch.testing.assert_close(torch.cat(parts)[real], whole[real])


@pytest.mark.parametrize("family", DECODERS)
def test_a_beam_may_have_several_queries_at_once_and_a_mask(family):
    """As a forced beginning of a translation has."""
    attention = build(family, encoder_decoder_attention=True)
    memory = torch.randn(5, 2, WIDTH, dtype=torch.float64).repeat_interleave(3, 1)
    x = torch.randn(4, 6, WIDTH, dtype=torch.float64)
    mask = future(5)[:4].roll(1, 1).double()
    whole, _ = attention(x, memory, memory, attn_mask=mask)
    options = {
        "incremental_state": {},
        "static_kv": True,
        "attn_mask": mask,
        "need_weights": False,
    }
    with forward_context(beam_size=3):
        shared, _ = attention(x, memory, memory, **options)
    torch.testing.assert_close(shared, whole)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("positions", [None, "rope"])
def test_a_token_leaves_as_many_bytes_in_the_cache_as_are_stated(family, positions):
    attention = BUILD[family](self_attention=True, positions=positions).eval()
    state = {}
    sizes = []
    for _ in range(6):  # longer than a window
        attention(torch.randn(1, 1, WIDTH), None, None, incremental_state=state)
        (cache,) = state.values()
        sizes.append(sum(tensor.nbytes for tensor in cache.tensors()))
    assert sizes[-1] - sizes[-2] == attention.cache_bytes(number_bytes=4)


@pytest.mark.parametrize("family", DECODERS)
def test_a_beam_projects_its_source_once(family):
    attention = build(family, encoder_decoder_attention=True, kdim=10, vdim=10)
    memory = torch.randn(5, 2, 10, dtype=torch.float64).repeat_interleave(3, 1)
    padding = (torch.arange(5) >= torch.tensor([[5], [3]])).repeat_interleave(3, 0)
    x = torch.randn(4, 6, WIDTH, dtype=torch.float64)
    calls = []
    states = ({}, {})
    whole, _ = attention(x, memory, memory, key_padding_mask=padding)
    projection = attention.get_submodule(attention.memory_projections[0])
    projection.register_forward_hook(lambda _, inputs, out: calls.append(inputs[0].numel()))
    for step in range(4):
        keys = memory if step == 0 else None
        options = dict(key_padding_mask=padding, static_kv=True)
        alone, _ = attention(
            x[step : step + 1], keys, keys, incremental_state=states[0], **options
        )
        with forward_context(beam_size=3):
            shared, weights = attention(
                x[step : step + 1], memory, memory, incremental_state=states[1], **options
            )
        torch.testing.assert_close(alone[0], whole[step])
        torch.testing.assert_close(shared[0], whole[step])
        assert weights.shape == (6, 1, 5)
    assert calls == [5 * 6 * 10, 5 * 2 * 10]


def losses_of(decisions):
    """Every balance loss, z-loss and statistic of what was decided, [anything]."""
    values = [loss(decision) for _, decision in decisions for loss in OF_ANY_FAMILY.values()]
    values += [
        value for _, decision in decisions for value in load_statistics(decision).values()
    ]
    return torch.stack([value.double() for value in values]) if values else torch.zeros(1)


def outcome(module, run, *inputs):
    """What a training pass leaves: output, losses, sums of observers, all gradients."""
    module.zero_grad()
    for statistics in running_statistics_of(module):
        statistics.forget()
    torch.manual_seed(5)
    with collect_routings() as decisions:
        out = run(*inputs)
    losses = losses_of(decisions)
    (out.square().sum() + losses.sum()).backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return (
        out.detach(),
        losses.detach(),
        [o.pending.clone() for o in running_statistics_of(module)],
        grads,
    )


@pytest.mark.parametrize(
    ("family", "positions", "how"),
    [
        *((family, None, how) for family in BUILD for how in ("self", "causal self", "cross")),
        # what positions add does not know of a mask
        *((family, "xl", "causal self") for family in BUILD if family not in WITHOUT_XL),
    ],
)
def test_nan_in_padding_reaches_nothing(family, positions, how):
    role = {"encoder_decoder_attention": True} if how == "cross" else {"self_attention": True}
    attention = BUILD[family](**role, positions=positions).double()
    clean = torch.randn(5, 3, WIDTH, dtype=torch.float64)
    memory = torch.randn(5, 3, WIDTH, dtype=torch.float64)
    memory_padding = torch.arange(5) >= torch.tensor([[4], [5], [2]])

    def run(x, memory, need_weights):
        if how == "cross":
            keys = memory
            masks = dict(key_padding_mask=memory_padding)
        else:
            keys = x
            masks = dict(key_padding_mask=PADDING)
        masks["attn_mask"] = future(5).double() if how == "causal self" else None
        out, weights = attention(
            x, keys, keys, query_padding_mask=PADDING, need_weights=need_weights, **masks
        )
        out = out.transpose(0, 1)[~PADDING]
        return (
            out
            if weights is None
            else torch.cat([out.flatten(), weights[~PADDING].to(out).flatten()])
        )

    for need_weights in (False, True):
        spoilt = [clean.clone(), memory.clone()]
        spoilt[0].transpose(0, 1)[PADDING] = math.nan
        spoilt[1].transpose(0, 1)[memory_padding] = math.nan
        expected = outcome(attention, run, clean, memory, need_weights)
        got = outcome(attention, run, *spoilt, need_weights)
        for one, other in zip(got, expected):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_nan_in_padding_of_a_mixture_of_feed_forwards():
    layer = FairseqSigmaMoE(WIDTH, SigmaMoESettings(4, 2, 8)).double()
    clean = torch.randn(5, 3, WIDTH, dtype=torch.float64)
    spoilt = clean.clone()
    spoilt.transpose(0, 1)[PADDING] = math.nan

    def run(x):
        with forward_context(padding=PADDING):
            return layer(x).transpose(0, 1)[~PADDING]

    expected, got = (outcome(layer, run, x) for x in (clean, spoilt))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.thorough(keep=("-cross-True-B=0", "-self-False-T=0"))
@pytest.mark.parametrize("shape", [(5, 0), (0, 3), (0, 0)], ids=["B=0", "T=0", "B=T=0"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("how", ["self", "causal self", "cross"])
@pytest.mark.parametrize("family", BUILD)
def test_batches_without_a_row(family, how, padded, shape):
    length, batch = shape
    for positions in POSITIONS if how != "cross" else [None]:
        if positions == "xl" and family in WITHOUT_XL:
            continue
        role = (
            {"encoder_decoder_attention": True} if how == "cross" else {"self_attention": True}
        )
        attention = BUILD[family](**role, positions=positions)
        memory = torch.randn(4 if batch == 0 else length, batch, WIDTH)
        for need_weights in (False, True):
            x = torch.randn(length, batch, WIDTH, requires_grad=True)
            keys = memory if how == "cross" else x
            masks = (
                {"key_padding_mask": torch.zeros(batch, keys.size(0), dtype=torch.bool)}
                if padded
                else {}
            )
            masks["attn_mask"] = future(length) if how == "causal self" else None

            def run(x, attention=attention, keys=keys, masks=masks, need_weights=need_weights):
                out, weights = attention(x, keys, keys, need_weights=need_weights, **masks)
                assert (weights is not None) == need_weights
                return out

            out, losses, pending, grads = outcome(attention, run, x)
            assert out.shape == x.grad.shape == x.shape
            assert torch.isfinite(losses).all() and all(not sums.any() for sums in pending)
            assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("shape", [(5, 0), (0, 3)], ids=["B=0", "T=0"])
def test_a_mixture_of_feed_forwards_without_a_row(shape):
    layer = FairseqSigmaMoE(WIDTH, SigmaMoESettings(4, 2, 8))
    x = torch.randn(*shape, WIDTH, requires_grad=True)
    out, losses, _, grads = outcome(layer, layer, x)
    assert out.shape == x.grad.shape == x.shape and torch.isfinite(losses).all()
    assert all(not grad.any() for grad in grads)


def test_a_pass_that_fails_is_not_observed():
    attention = MixtureOfAttentiveExperts(WIDTH, 4, self_attention=True)
    running_statistics = running_statistics_of(attention)
    attention(torch.randn(3, 2, WIDTH), None, None)
    before = [statistics.pending.clone() for statistics in running_statistics]
    with pytest.raises(ZeroDivisionError), forgetting(running_statistics):
        attention(torch.randn(3, 2, WIDTH), None, None)
        1 / 0  # noqa: B018
    assert before[0].any()
    for statistics, pending in zip(running_statistics, before):
        assert torch.equal(statistics.pending, pending)
