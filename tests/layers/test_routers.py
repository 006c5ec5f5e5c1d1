"""Routers: noise, padding, precision, and what a layer keeps for its backward pass."""

import pytest
import torch
from time_first import (
    MixtureOfAttention,
    MixtureOfAttentiveExperts,
    NativeMixtureOfHeads,
    SwitchHeadAttention,
)
from torch import nn

from moa_fairseq import layers as attention
from moa_fairseq.errors import UserError
from moa_fairseq.layers import routers
from moa_fairseq.layers.experts import every_expert
from moa_fairseq.layers.experts.routing import unsupported_reason, wide_product
from moa_fairseq.layers.initialization import init_fan_in_normal_
from moa_fairseq.layers.moa import MoASettings
from moa_fairseq.layers.moh import MoHSettings
from moa_fairseq.layers.moh_routers import QueryNormRouter, SharedAndRoutedRouter
from moa_fairseq.layers.routers import TopKRouter, WideLinear
from moa_fairseq.layers.running_statistics import running_statistics_of
from moa_fairseq.layers.sigmoid_router import SigmoidTopKRouter


def build(noise=False, dtype=torch.float32):
    torch.manual_seed(0)
    router = TopKRouter(16, MoASettings(6, 2, routing_noise=noise))
    torch.nn.init.normal_(router.projection.weight)
    return router.to(dtype)


def test_noise_is_drawn_in_training_only():
    router = build(noise=True)
    x = torch.randn(9, 16)
    assert not torch.equal(router(x).logits, router(x).logits)
    router.eval()
    assert torch.equal(router(x).logits, router(x).logits)
    router.train()
    router(x).gates.sum().backward()
    assert router.noise_projection.weight.grad.abs().sum() > 0


def test_noise_begins_with_zeros_however_matrices_are_drawn():
    router = build(noise=True)
    torch.nn.init.normal_(router.noise_projection.weight)
    init_fan_in_normal_(router, 0.5)
    assert not router.noise_projection.weight.any() and router.projection.weight.all()


def test_padding_has_zero_gates_and_sends_no_gradient():
    router = build()
    x = torch.randn(4, 16, requires_grad=True)
    padding = torch.tensor([False, True, False, True])
    gate = router(x, padding).gates
    gate.square().sum().backward()
    assert (gate[padding] == 0).all() and (gate[~padding] > 0).all()
    assert (x.grad[padding] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_still_route_in_float32(dtype):
    router = build(dtype=dtype)
    decision = router(torch.randn(5, 16).to(dtype))
    assert (
        decision.logits.dtype == decision.probs.dtype == decision.gates.dtype == torch.float32
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert build()(torch.randn(5, 16)).logits.dtype == torch.float32


def test_a_fresh_router_does_not_send_every_token_to_the_same_experts():
    torch.manual_seed(0)
    decision = TopKRouter(64, MoASettings(8, 2))(torch.randn(400, 64))
    assert torch.bincount(decision.expert_ids.reshape(-1), minlength=8).min() > 20


def test_sigmoids_of_groups_are_those_of_each_logit():
    router = TopKRouter(16, MoASettings(6, 2, router_activation="sigmoid"), groups=3)
    decision = router(torch.randn(5, 16))
    torch.testing.assert_close(decision.probs, decision.logits.sigmoid())


CHOOSERS = {
    "softmax": lambda: TopKRouter(16, MoASettings(6, 2)),
    "sigmoid": lambda: TopKRouter(16, MoASettings(6, 2, router_activation="sigmoid")),
    "groups": lambda: TopKRouter(16, MoASettings(6, 2), groups=3),
    "switchhead": lambda: SigmoidTopKRouter(16, 6, 2, groups=3),
    "moh": lambda: SharedAndRoutedRouter(
        16, 8, MoHSettings(moh_shared_heads=2, experts_per_token=2)
    ),
    "query-norm": lambda: QueryNormRouter(8, 2, 2),
}


@pytest.mark.parametrize("kind", CHOOSERS)
@pytest.mark.parametrize("size", (1.0, 1e4))
def test_the_largest_logits_are_chosen_where_probabilities_are_equal(kind, size):
    """Float32 has no probability below 1e-45: most of the experts of a large input have 0."""
    torch.manual_seed(0)
    routing = CHOOSERS[kind]()(torch.randn(50, 16) * size)
    logits = routing.logits[:, routing.shared :].unflatten(1, (routing.groups, -1))
    first = torch.arange(routing.groups).unsqueeze(1) * logits.size(-1) + routing.shared
    wanted = (logits.topk(2).indices + first).flatten(1)
    assert torch.equal(routing.expert_ids[:, routing.shared :], wanted)


def kept_bytes(module, x):
    """What a forward pass keeps for the backward pass, beside the module's own parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*[x.requires_grad_()] * 3, need_weights=False)
    return sum(kept.values())


def test_under_autocast_the_routers_gradient_is_not_rounded():
    """Weights in float32: 1e-9 would be 0 in half precision."""
    x = torch.rand(5, 8).half()
    weight = torch.randn(3, 8, requires_grad=True)
    grad = torch.full((5, 3), 1e-9)
    wide_product(x, weight).backward(grad)
    torch.testing.assert_close(weight.grad, grad.t() @ x.float(), atol=0, rtol=1e-5)


@pytest.mark.thorough(keep="8, 32, 128")
@pytest.mark.parametrize("sizes", [(8, 8, 128), (8, 32, 128), (16, 32, 256)], ids=str)
def test_in_half_precision_a_layer_keeps_no_more_than_a_dense_one_of_equal_arithmetic(sizes):
    """Bytes kept for the backward pass per multiply-accumulate; a float32 copy of the input shows."""
    per_token, experts, dim = sizes
    width = 512
    length = 32
    batch = 8
    module = MixtureOfAttention(
        width,
        num_experts=experts,
        experts_per_token=per_token,
        expert_dim=dim,
        self_attention=True,
    ).bfloat16()
    x = torch.randn(length, batch, width, dtype=torch.bfloat16, requires_grad=True)
    kept = kept_bytes(module, x)
    tokens = length * batch
    macs = 2 * (per_token + 1) * dim * width + experts * width + 2 * length * per_token * dim
    # Dense attention with as many keeps its input, q, k, v, result
    inner = macs / (4 * width + 2 * length)
    dense = 2 * (width + 4 * inner)
    assert kept / tokens <= 1.05 * dense


def test_what_switchhead_keeps_does_not_grow_with_k():
    """Never a row of width C per slot: indices (8 bytes) and gates (a few floats) for each head and side."""
    width = 12
    heads = 2
    tokens = 128
    kept = {}
    for k in (2, 6):
        sizes = dict(switchhead_heads=heads, expert_dim=6, num_experts=8, experts_per_token=k)
        module = SwitchHeadAttention(width, **sizes, self_attention=True)
        kept[k] = kept_bytes(module, torch.randn(64, 2, width))
    assert kept[6] - kept[2] < tokens * 4 * heads * min(2 * 64, width * 4 * 2)


def test_slots_are_sorted_once_for_each_routing_and_not_at_all_where_every_expert_is_chosen(
    monkeypatch,
):
    sort = torch.sort
    sorts = []
    monkeypatch.setattr(
        torch, "sort", lambda *args, **options: sorts.append(1) or sort(*args, **options)
    )
    monkeypatch.setitem(every_expert._STEP, "cpu", -1)
    sizes = dict(num_experts=4, expert_dim=4, expert_backend="grouped", self_attention=True)
    for build, per_token, expected in (
        (MixtureOfAttention, 2, 1),
        (MixtureOfAttention, 4, 0),
        (SwitchHeadAttention, 2, 2),  # of queries and outputs, and of keys and values
    ):
        module = build(8, experts_per_token=per_token, **sizes)
        sorts.clear()
        module(torch.randn(5, 3, 8))[0].sum().backward()
        assert len(sorts) == expected, build


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
def test_logits_of_half_precision_are_those_of_float64(weights):
    x = torch.randn(40, 16).bfloat16().requires_grad_()
    linear = WideLinear(16, 6).to(weights)
    weight = linear.weight
    logits = linear(x)
    upstream = torch.randn(40, 6)
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    exact = leaves[0] @ leaves[1].t()
    torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)
    grads = zip(
        torch.autograd.grad(logits, (x, weight), upstream),
        torch.autograd.grad(exact, leaves, upstream.double()),
    )
    for got, truth in grads:
        torch.testing.assert_close(got.double(), truth, atol=0.05, rtol=0.02)


def balanced(rate=0.001):
    sizes = dict(num_experts=4, experts_per_token=2, expert_dim=4, self_attention=True)
    return MixtureOfAttention(8, **sizes, routing_bias_rate=rate)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_observers_keep_over_updates_stays_in_float32(dtype):
    """Small steps of a selection bias add up; every token of an accumulated update counts."""
    attention = balanced().to(dtype)
    router = attention.router
    assert router.projection.weight.dtype == dtype
    for _ in range(600):
        router.update(torch.tensor([1000.0, 1.0, 1.0, 1.0]))
    torch.testing.assert_close(router.selection_bias, torch.tensor([-0.6, 0.6, 0.6, 0.6]))
    for _ in range(40):
        attention(torch.randn(101, 7, 8, dtype=dtype), None, None)
    assert router.pending.sum().item() == 40 * 101 * 7 * 2
    moved = balanced().to("meta", dtype).router.selection_bias
    assert moved.device.type == "meta" and moved.dtype == torch.float32


def test_pending_sums_are_zero_after_a_move_from_the_meta_device():
    """`to_empty` allocates memory with arbitrary content."""
    with torch.device("meta"):
        attention = balanced()
    attention._apply(lambda tensor: torch.full_like(tensor, 7.0, device="cpu"))
    assert not attention.router.pending.any()
    assert (attention.router.selection_bias == 7).all()


@pytest.mark.parametrize("kind", ["switchhead", "moh"])
def test_gradients_of_float32_logits_are_not_rounded_to_half_precision(kind):
    """The sum is (1 + 2^-10) − 1. bfloat16 cannot represent the first term, and would give 0."""
    projection = CHOOSERS[kind]().projection.bfloat16()
    x = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16).expand(2, 16)
    logits = projection(x)
    logits.backward(torch.tensor([[1 + 2**-10], [1.0]]).expand_as(logits))
    assert (projection.weight.grad == 2**-10).all()


@pytest.mark.parametrize("kind", ["MoA", "NAMOH", "MAE"])
def test_evaluation_leaves_no_trace_in_what_observers_keep(kind):
    """Validation comes between the micro-batches of training; also with gradients, as an analysis may."""
    balance = dict(num_experts=4, experts_per_token=2, expert_dim=4, routing_bias_rate=0.1)
    attention = {
        "MoA": lambda: MixtureOfAttention(8, **balance, encoder_decoder_attention=True),
        "NAMOH": lambda: NativeMixtureOfHeads(8, **balance, encoder_decoder_attention=True),
        "MAE": lambda: MixtureOfAttentiveExperts(8, 4, encoder_decoder_attention=True),
    }[kind]()
    x = torch.randn(5, 2, 8)
    memory = torch.randn(7, 2, 8)
    attention(x, memory, memory)
    running_statistics = running_statistics_of(attention)
    before = {name: buffer.clone() for name, buffer in attention.named_buffers()}
    assert running_statistics and all(
        statistics.pending.abs().sum() > 0 for statistics in running_statistics
    )
    attention.eval()
    attention(x, memory, memory)
    for name, buffer in attention.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_the_fused_router_reads_the_weight_of_an_untouched_projection_alone(monkeypatch):
    router = build()
    x = torch.randn(5, 16)
    asked = []
    seen = []
    router.may_fuse = True
    monkeypatch.setattr(routers, "top_k_routing", lambda *options: asked.append(options))
    router(x)
    assert len(asked) == 1
    hook = router.projection.register_forward_hook(lambda *_: seen.append(1))
    router(x)
    hook.remove()
    router.projection = nn.Sequential(router.projection)
    router(x)
    assert len(asked) == 1 and seen == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_of_a_router_still_routes_in_float32(dtype):
    for family in (
        attention.MixtureOfAttention(16, num_experts=4, experts_per_token=2, expert_dim=4),
        attention.SwitchHeadAttention(
            16, switchhead_heads=2, num_experts=4, experts_per_token=2
        ),
        attention.MixtureOfHeads(16, 4, moh_shared_heads=1, experts_per_token=2),
    ):
        family.router.projection = nn.Linear(
            16, family.router.projection.out_features, bias=False
        )
        _, (routing, *_) = family.to(dtype)(torch.randn(2, 3, 16).to(dtype), with_routing=True)
        assert routing.logits.dtype == routing.gates.dtype == torch.float32


def test_a_rule_of_ones_own_is_never_the_kernels(monkeypatch):
    """The fused kernel does neither such a choice nor such gates; gates of another shape are an error."""
    places = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2], [0, 3]])
    monkeypatch.setitem(routers.OTHER_CHOICES, "by place", lambda router, token_ids: places)
    monkeypatch.setattr(routers, "CHOICES", (*routers.CHOICES, "by place"))
    monkeypatch.setitem(routers.RENORMALIZATIONS, "first", lambda chosen: chosen[:1])
    monkeypatch.setattr(routers, "resolve_backend", lambda name: "triton")
    x = torch.randn(5, 8)
    padding = torch.zeros(5, dtype=torch.bool)
    router = TopKRouter(8, MoASettings(4, 2, router_choice="by place"))
    assert not router.may_fuse and torch.equal(router(x, padding).expert_ids, places)
    with pytest.raises(UserError, match="by place"):
        TopKRouter(8, MoASettings(4, 2, router_choice="by place", routing_bias_rate=0.1))
    router = TopKRouter(8, MoASettings(4, 2, router_renormalize="first"))
    assert unsupported_reason(x, router.projection.weight, "first", "triton")
    with pytest.raises(ValueError, match=r"'first' makes gates \[1, 2\]"):
        router(x, padding)
