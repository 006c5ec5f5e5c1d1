"""Attention with a bias and with shared heads of keys, against the formula; rotary positions."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_fairseq.errors import UserError
from moa_fairseq.layers import sdpa
from moa_fairseq.layers.positions import RotaryPositions
from moa_fairseq.layers.sdpa import Masks, attend, attend_with_weights, merge_masks
from moa_fairseq.layers.torch_compat import without_cudnn_attention
from moa_fairseq.plugin.patches.host_tokens import is_right_padded


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def literal(q, k, v, bias, blocked):
    """One query head after the other; head i reads key head i mod G. blocked: [B, T or 1, S]."""
    outs = []
    weights = []
    for i in range(q.size(1)):
        scores = q[:, i] @ k[:, i % k.size(1)].transpose(1, 2) / math.sqrt(q.size(-1))
        if bias is not None:
            scores = scores + bias[:, i % bias.size(1)]
        weights.append(scores.masked_fill(blocked, -math.inf).softmax(-1).nan_to_num(0.0))
        outs.append(weights[-1] @ v[:, i % v.size(1)])
    return torch.stack(outs, 1), torch.stack(weights, 1)


@st.composite
def attentions(draw):
    """Queries, keys, values, masks and bias of any sizes, and what the formula makes of them."""
    sizes = st.integers(1, 4)
    sentences, beam, groups, sharing, length, keys = (draw(sizes) for _ in range(6))
    batch = sentences * beam
    heads = groups * sharing
    seed = draw(st.integers(0, 99))
    q = random(batch, heads, length, 6, seed=seed)
    k, v = (random(sentences, groups, keys, 6, seed=seed + n) for n in (1, 2))
    mask = padding = bias = None
    blocked = torch.zeros(batch, length, keys, dtype=torch.bool)
    scores = torch.zeros(batch, heads, length, keys, dtype=torch.float64)
    form = draw(st.sampled_from([None, "bool", "float"]))
    if form:
        # A mask differs between sentences; hypotheses of a beam share one
        each = (sentences,) * (beam == 1 and draw(st.booleans()))
        mask = random(*each, length, keys, seed=seed + 3) > draw(
            st.sampled_from([0.0, 1.0, 9.0])
        )
        blocked = blocked | mask
    if form == "float":
        added = random(*each, length, keys, seed=seed + 4)
        scores = scores + added.expand(batch, -1, -1).unsqueeze(1)
        mask = added.masked_fill(mask, -math.inf)
    threshold = draw(st.sampled_from([None, 0.0, 1.0]))
    if threshold is not None:
        padding = random(sentences, keys, seed=seed + 5) > threshold
        blocked = blocked | padding.repeat_interleave(beam, 0)[:, None]
    if draw(st.booleans()):
        bias = random(
            draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), length, keys
        )
        scores = scores + bias
    copies = [each.repeat_interleave(beam, 0) for each in (k, v)]
    expected = literal(q, *copies, scores, blocked)
    return (q, k, v, Masks(mask, padding)), bias, expected


@settings(max_examples=settings.default.max_examples // 2)
@given(attentions())
def test_masks_bias_shared_heads_and_beams_in_any_combination(attention):
    arguments, bias, (expected, weights) = attention
    torch.testing.assert_close(attend(*arguments, bias=bias), expected)
    out, got = attend_with_weights(*arguments, bias=bias)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(got, weights)


@pytest.mark.parametrize("dim", [2, 3, 6, 7, 25])
def test_rope_is_the_literal_rotation(dim):
    """Su et al. Eq. 34: a block of cos and sin for each pair of numbers; the last of an odd width stays."""
    length = 5
    first = 3
    pairs = dim // 2
    x = random(2, 3, length, dim)
    turned, _ = RotaryPositions(dim).rotate(x, x, first)
    for position in range(length):
        for j in range(pairs):
            angle = (first + position) * 10000.0 ** (-2 * j / (2 * pairs))
            rotation = torch.tensor(
                [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]],
                dtype=torch.float64,
            )
            pair = x[:, :, position, [j, j + pairs]]
            torch.testing.assert_close(
                turned[:, :, position, [j, j + pairs]], pair @ rotation.t()
            )
    assert torch.equal(turned[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("dim", [8, 9])
def test_rope_scores_know_distances_only_and_survive_half_precision(dim):
    q = random(1, 1, 4, dim)
    k = random(1, 1, 4, dim, seed=1)
    rope = RotaryPositions(dim).half()
    scores = [
        one @ other.transpose(-1, -2)
        for one, other in (rope.rotate(q, k, p) for p in (0, 7000))
    ]
    torch.testing.assert_close(*scores)
    halves, exact = (
        rope.rotate(q.to(dtype), k, 7000)[0] for dtype in (torch.bfloat16, torch.float64)
    )
    torch.testing.assert_close(halves.double(), exact, atol=0.05, rtol=0.02)
    exact = RotaryPositions(dim)
    torch.testing.assert_close(
        rope.rotate(q, k, 7000), exact.rotate(q, k, 7000), rtol=0, atol=0
    )
    with pytest.raises(UserError, match="positions='rope'"):
        RotaryPositions(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_padding_only_whatever_padded_keys_hold(dtype):
    """A padded row gives zeros, its keys and values get no gradient, and not-a-number in them stays there."""
    q, k, v = (random(3, heads, 5, 8, seed=heads).to(dtype) for heads in (4, 1, 2))
    k = k.expand(-1, 2, -1, -1).clone()
    v = v.clone()
    padding = torch.tensor([[False] * 5, [False] * 2 + [True] * 3, [True] * 5])
    v[1, :, 3] = math.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attend(*leaves, Masks(padding=padding))
    grads = torch.autograd.grad(out.float().square().sum(), leaves)
    exact, _ = literal(
        q[:2, :, :, :],
        k[:2],
        v.masked_fill(padding[:, None, :, None], 0)[:2],
        None,
        padding[:2, None],
    )
    tolerance = {} if dtype == torch.float64 else dict(atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(out[:2], exact.to(out.dtype), **tolerance)
    assert (out[2] == 0).all()
    for grad in grads:
        assert torch.isfinite(grad).all() and (grad[2] == 0).all()
    assert (grads[2][1, :, 2:] == 0).all() and (grads[2][1, :, :2] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_large_numbers_of_a_mask_hide_in_every_precision(dtype):
    """-1e9, which is −inf in half precision, beside padding."""
    mask = torch.triu(torch.full((4, 4), -1e9), 1)
    padding = torch.tensor([[False, True, False, False]])
    merged, _ = merge_masks(mask, padding, dtype)
    assert torch.equal(merged[0, 0] < -60000, (mask < 0) | padding)


def test_a_kernels_flag_replaces_a_causal_mask_on_a_gpu_where_padding_follows(monkeypatch):
    """The flag alone gives real queries what both masks give them."""
    right = torch.arange(6)[None] >= torch.tensor([[6], [4], [1]])
    assert is_right_padded(right, True) and is_right_padded(
        torch.zeros(2, 3, dtype=torch.bool), True
    )
    for left in (
        right.flip(1),
        torch.tensor([[False, True, False]]),
        torch.ones(1, 3, dtype=torch.bool),
    ):
        assert not is_right_padded(left, True)
    q = random(3, 4, 6, 8)
    k = random(3, 1, 6, 8)
    v = random(3, 1, 6, 8, seed=1)
    mask = torch.triu(torch.full((6, 6), -math.inf, dtype=torch.float64), 1)
    expected = attend(q, k, v, Masks(mask, right))
    flags = []
    fused = sdpa.fused_attention
    monkeypatch.setattr(
        sdpa,
        "fused_attention",
        lambda *args, is_causal=False: flags.append(is_causal) or fused(*args, is_causal),
    )
    monkeypatch.setattr(sdpa, "_processors", lambda _: 0)

    class OnGpu(torch.Tensor):
        is_cuda = True

    gpu = q.as_subclass(OnGpu)
    real = ~right[:, None, :, None].expand(-1, 4, -1, 8)
    for query, is_causal, right_padded, padding, flag in (
        (q, True, True, right, False),  # CPUs have no use for the flag
        (gpu, True, True, right, True),
        (gpu, True, False, None, True),
        (gpu, True, False, right, False),
        (gpu, False, True, right, False),
    ):
        monkeypatch.setattr(sdpa, "_KEEPS_CUDNN", True)  # no switch of a GPU's kernels
        out = attend(query, k, v, Masks(mask, padding, is_causal, right_padded))
        assert flags.pop() == flag
        if padding is not None:
            torch.testing.assert_close(out[real].as_subclass(torch.Tensor), expected[real])


def test_few_long_sentences_get_copies_of_shared_keys(monkeypatch):
    """Enough programs in a GPU's backward pass; the result is the same."""
    q = random(2, 4, 130, 8)
    k = random(2, 1, 130, 8)
    v = random(2, 1, 130, 8, seed=1)
    folded = attend(q, k, v)
    heads = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(sdpa, "_KEEPS_CUDNN", True)
    product = torch.nn.functional.scaled_dot_product_attention
    watch = lambda q, *rest, **options: heads.append(q.size(1)) or product(q, *rest, **options)  # noqa: E731
    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", watch)
    for processors in (0, 4, 5):
        monkeypatch.setattr(sdpa, "_processors", lambda _, processors=processors: processors)
        found = attend(q.as_subclass(OnGpu), k, v)
        torch.testing.assert_close(found.as_subclass(torch.Tensor), folded)
    assert heads == [1, 1, 4]  # 2 sentences × 2 blocks of keys


@pytest.mark.thorough
def test_cudnns_attention_is_left_out_unless_asked_for():
    program = (
        "import torch; from moa_fairseq.layers import sdpa; on = torch.backends.cuda.cudnn_sdp_enabled;"
        "before = on(); block = sdpa.without_cudnn_attention(); block.__enter__(); within = on();"
        "block.__exit__(None, None, None); after = on(); sdpa.switch_off_cudnn();"
        "print(before, within, after, on())"
    )
    for asked, expected in (("", "False"), ("1", "True")):
        environment = {**os.environ, sdpa.CUDNN_VARIABLE: asked}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert done.stdout.split()[-4:] == ["True", "False", "True", expected], done.stderr


def test_dropout_acts_where_weights_are_asked_for_too():
    """The weights that are returned are from before it."""
    q = random(2, 4, 6, 8)
    k = random(2, 2, 6, 8)
    v = random(2, 2, 6, 8, seed=1)
    out, weights = attend_with_weights(q, k, v)
    torch.manual_seed(0)
    dropped = torch.stack([attend_with_weights(q, k, v, dropout=0.5)[0] for _ in range(400)])
    assert not torch.allclose(dropped[0], dropped[1])
    torch.testing.assert_close(dropped.mean(0), out, rtol=0.2, atol=0.25)
    torch.testing.assert_close(attend_with_weights(q, k, v, dropout=0.5)[1], weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_score_that_is_blocked_leaves_room_for_a_bias(dtype):
    """Else a sentence of padding has scores of −inf only, whose softmax is NaN."""
    mask, _ = sdpa._padding_bias(
        torch.tensor([[False, True]]), torch.zeros(1, 1, 2, 3, dtype=dtype)
    )
    assert torch.isfinite(mask + mask).all() and mask[..., 1] < -3e4


def test_cudnn_stays_off_until_the_last_thread_has_left_it_out():
    """torch's switch is the process's: a thread that ends its block must not switch it on in another's."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    before = enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        first = without_cudnn_attention()
        second = without_cudnn_attention()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not enabled()
        second.__exit__(None, None, None)
        assert enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        with without_cudnn_attention():
            assert not enabled()
        assert not enabled()  # whoever has switched it off for good
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
