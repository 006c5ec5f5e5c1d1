"""Every backend against a float64 loop nobody can doubt: forward and all gradients, ugly shapes."""

import pytest
import torch

from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.errors import UserError
from moa_fairseq.kernels import every_expert, expert_bank, expert_loop, grouped, sorted_rows
from moa_fairseq.kernels.grouped import every_expert_pays
from moa_fairseq.kernels.slot_order import SlotOrder

# N, C, E, K, D, which experts the tokens choose
SHAPES = {
    "ordinary": (37, 16, 5, 2, 8, "random"),
    "aligned for grouped_mm": (64, 32, 8, 4, 16, "random"),
    "one token": (1, 16, 5, 2, 8, "random"),
    "no token": (0, 16, 5, 2, 8, "random"),
    "an expert nobody chose": (23, 16, 6, 2, 8, "skip the last"),
    "all tokens on one expert": (23, 16, 6, 1, 8, "first"),
    "K = 1": (11, 12, 3, 1, 4, "random"),
    "K = E": (19, 16, 4, 4, 8, "all"),
    "E = 1": (7, 8, 1, 1, 4, "all"),
    "prime sizes, no multiple of a tile": (31, 13, 7, 3, 11, "random"),
    "fewer tokens than experts": (3, 8, 16, 2, 4, "random"),
}


def choose(tokens, num_experts, per_token, kind, generator):
    if kind == "all":
        return torch.arange(num_experts).expand(tokens, -1)
    if kind == "first":
        return torch.zeros(tokens, per_token, dtype=torch.long)
    usable = num_experts - 1 if kind == "skip the last" else num_experts
    scores = torch.rand(tokens, usable, generator=generator)
    return scores.topk(per_token, dim=-1).indices


def loop_dispatch(x, index, weight, bias):
    rows = [
        torch.stack([weight[e] @ row + bias[e] for e in chosen]) for row, chosen in zip(x, index.tolist())
    ]
    return torch.stack(rows) if rows else x.new_zeros(0, index.size(1), weight.size(1))


def loop_combine(slots, index, gate, weight, bias):
    rows = [
        sum(gate[t, k] * (slots[t, k] @ weight[e] + bias[e]) for k, e in enumerate(chosen))
        for t, chosen in enumerate(index.tolist())
    ]
    return torch.stack(rows) if rows else slots.new_zeros(0, weight.size(2))


def leaves(*tensors, dtype):
    return [t.detach().to(dtype).requires_grad_() for t in tensors]


def assert_close(fast, exact, what):
    error = (fast.double() - exact).abs().max().item() if exact.numel() else 0.0
    scale = exact.abs().max().item() if exact.numel() else 1.0
    assert torch.isfinite(fast).all(), what
    assert error <= 1e-5 * (1 + scale), f"{what}: off by {error:.2e}"


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_forward_and_every_gradient_equal_the_loop(shape, backend):
    compare_with_the_loop(shape, backend)


def compare_with_the_loop(shape, backend, always_sorts=False):
    tokens, model_dim, num_experts, per_token, dim, kind = shape
    g = torch.Generator().manual_seed(tokens + 31 * num_experts)
    index = choose(tokens, num_experts, per_token, kind, g)
    x = torch.randn(tokens, model_dim, generator=g)
    slots = torch.randn(tokens, per_token, dim, generator=g)
    gate = torch.rand(tokens, per_token, generator=g)
    gate[: tokens // 3] = 0.0  # padding
    weight = torch.randn(num_experts, dim, model_dim, generator=g)
    q_bias, out_bias = torch.randn(num_experts, dim), torch.randn(num_experts, model_dim)
    sorts = always_sorts or (kind != "all" and backend != "reference")
    order = SlotOrder.from_index(index, num_experts) if sorts else None

    for name, arguments, fast, exact in (
        (
            "dispatch",
            (x, weight, q_bias),
            lambda x, w, b: expert_bank.dispatch(x, index, order, w, b, backend),
            lambda x, w, b: loop_dispatch(x, index, w, b),
        ),
        (
            "combine",
            (slots, gate, weight, out_bias),
            lambda s, p, w, b: expert_bank.combine(s, index, p, order, w, b, backend),
            lambda s, p, w, b: loop_combine(s, index, p, w, b),
        ),
    ):
        fast_in, exact_in = leaves(*arguments, dtype=torch.float32), leaves(*arguments, dtype=torch.float64)
        fast_out, exact_out = fast(*fast_in), exact(*exact_in)
        assert fast_out.shape == exact_out.shape
        assert_close(fast_out, exact_out, f"{name} forward")
        upstream = torch.randn(exact_out.shape, generator=g, dtype=torch.float64)
        fast_out.backward(upstream.float())
        if exact_out.requires_grad:
            exact_out.backward(upstream)
        for i, (a, b) in enumerate(zip(fast_in, exact_in)):
            assert a.grad is not None, f"{name}: argument {i} has no gradient"
            assert_close(
                a.grad, b.grad if b.grad is not None else torch.zeros_like(b), f"{name} gradient {i}"
            )


def test_an_expert_without_tokens_gets_a_zero_gradient_not_none():
    index = torch.tensor([[0], [0]])
    weight = torch.randn(3, 4, 8, requires_grad=True)
    order = SlotOrder.from_index(index, 3)
    expert_bank.dispatch(torch.randn(2, 8), index, order, weight).sum().backward()
    assert weight.grad[0].abs().sum() > 0
    assert (weight.grad[1:] == 0).all()


def test_slot_order_invariants():
    index = torch.randint(0, 7, (29, 3), generator=torch.Generator().manual_seed(1))
    order = SlotOrder.from_index(index, 7)
    flat = index.reshape(-1)
    assert torch.equal(order.order[order.inverse], torch.arange(flat.numel()))
    assert (flat[order.order].diff() >= 0).all()
    assert torch.equal(order.offsets.long(), torch.bincount(flat, minlength=7).cumsum(0))
    for expert, (token, slot) in enumerate(order.by_expert):
        assert torch.equal(slot, (flat == expert).nonzero().flatten()) and torch.equal(token, slot // 3)
    assert torch.equal(order.token, order.order // 3)


WALKS = {"expert_loop": expert_loop, "every_expert": every_expert, "sorted_rows": sorted_rows}


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_way_to_walk_over_the_experts_equals_the_loop(walk, shape, monkeypatch):
    """sorted_rows is not chosen on a CPU, but newer torch has its product there, too."""
    if walk is sorted_rows:
        x, weight = torch.zeros(shape[0], shape[1]), torch.zeros(shape[2], shape[4], shape[1])
        if not takes_on_cpu(x, weight):
            pytest.skip("no grouped_mm in this torch, or none for these sizes")
    monkeypatch.setattr(grouped, "_walk", lambda *_: walk)
    compare_with_the_loop(shape, "grouped", always_sorts=True)


def takes_on_cpu(rows, weight):
    aligned = all(size % 4 == 0 for size in (rows.size(1), weight.size(1), weight.size(2)))
    return sorted_rows.GROUPED_MM is not None and aligned and rows.size(0) > 0


@pytest.mark.parametrize(
    "sizes, pays",
    [
        ((512, 4, 8, 48, 128), True),  # small experts: the loop's steps would cost more than the surplus
        ((2048, 8, 32, 128, 512), False),
        ((1, 8, 32, 128, 512), False),  # 24 of 32 matrices need not be read
        ((16, 8, 32, 128, 512), True),
    ],
)
def test_when_computing_every_expert_pays(sizes, pays):
    tokens, per_token, num_experts, dim, model_dim = sizes
    assert every_expert_pays(tokens, per_token, torch.empty(num_experts, dim, model_dim)) == pays


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_autocast_gives_what_a_matmul_gives(backend):
    g = torch.Generator().manual_seed(4)
    index = choose(12, 4, 2, "random", g)
    order = SlotOrder.from_index(index, 4)
    x, weight = torch.randn(12, 16, generator=g), torch.randn(4, 8, 16, generator=g, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        slots = expert_bank.dispatch(x, index, order, weight, None, backend)
        out = expert_bank.combine(slots, index, torch.ones(12, 2), order, weight, None, backend)
    assert slots.dtype == out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert weight.grad.dtype == torch.float32


def test_unknown_backend_is_refused_by_name():
    with pytest.raises(UserError, match="--expert-backend turbo"):
        expert_bank.resolve_backend("turbo")


def test_decision_sorts_once_and_not_at_all_when_every_expert_is_chosen():
    probs = torch.rand(5, 3)
    some = RoutingDecision(torch.randint(0, 3, (5, 2)), torch.rand(5, 2), probs, probs, 3)
    assert some.slot_order is some.slot_order
    every = RoutingDecision(torch.arange(3).expand(5, 3), probs, probs, probs, 3)
    assert every.slot_order is None
