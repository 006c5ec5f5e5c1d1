"""Triton's routing kernels against torch in float64; run by test_triton.py as triton_checks.py is."""

import os

import pytest
import torch

from moa_fairseq.layers.experts import ExpertPermutation
from moa_fairseq.layers.experts import triton as backend
from moa_fairseq.layers.moa import MoASettings
from moa_fairseq.layers.routers import TopKRouter

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = "cpu" if INTERPRETED else "cuda"

# N, C, E, K
SIZES = [
    (1, 8, 5, 2),
    (0, 8, 5, 2),
    (70, 37, 7, 3),
    (67, 64, 16, 1),
    (33, 20, 4, 4),
    (9, 16, 1, 1),
    (130, 16, 33, 8),
]


def routers(sizes, renormalize, dtype):
    """The same router by Triton and, in float64, by torch; rounded inputs."""
    _, width, experts, per_token = sizes
    torch.manual_seed(sum(sizes))
    sizes = dict(
        num_experts=experts, experts_per_token=per_token, router_renormalize=renormalize
    )
    fast = TopKRouter(width, MoASettings(**sizes, expert_backend="triton")).to(DEVICE, dtype)
    torch.nn.init.normal_(fast.projection.weight)
    exact = TopKRouter(width, MoASettings(**sizes, expert_backend="grouped")).to(
        DEVICE, torch.float64
    )
    exact.load_state_dict(fast.state_dict())
    return fast.eval(), exact.eval()  # a training refuses gates that are all 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("renormalize", ["detached", "full", "none"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_routing_and_its_gradients_equal_float64(
    sizes, padded, renormalize, dtype, monkeypatch
):
    fast, exact = routers(sizes, renormalize, dtype)
    x = torch.randn(sizes[0], sizes[1], device=DEVICE).to(dtype)
    padding = torch.rand(sizes[0], device=DEVICE) < 0.3 if padded else None
    launched = []
    from moa_fairseq.layers.experts.triton import launch_routing

    route = launch_routing.route
    monkeypatch.setattr(
        launch_routing, "route", lambda *args: launched.append(1) or route(*args)
    )
    leaves = []
    decisions = []
    for router, dtype_now in ((fast, dtype), (exact, torch.float64)):
        inputs = x.to(dtype_now).requires_grad_()
        decisions.append(router(inputs, padding))
        leaves.append((inputs, router.projection.weight))
    ours, theirs = decisions
    assert launched == [1], "the kernel did not run, or ran for the reference"
    assert torch.equal(ours.expert_ids, theirs.expert_ids)
    for name in ("logits", "probs", "gates"):
        got = getattr(ours, name)
        assert got.dtype == torch.float32
        torch.testing.assert_close(
            got.double(), getattr(theirs, name), atol=1e-5, rtol=1e-5, msg=name
        )
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    upstream = {
        n: torch.randn(getattr(ours, n).shape, device=DEVICE)
        for n in ("logits", "probs", "gates")
    }
    # An absent gradient is zero
    for names in (
        ("gates",),
        ("probs",),
        ("logits", "probs", "gates"),
    ):
        grads = [
            torch.autograd.grad(
                [getattr(d, n) for n in names],
                leaf,
                [upstream[n].to(getattr(d, n)) for n in names],
                retain_graph=True,
            )
            for d, leaf in zip(decisions, leaves)
        ]
        for got, truth in zip(*grads):
            scale = truth.abs().max().item() if truth.numel() else 0.0
            error = (got.double() - truth).abs().max().item() if truth.numel() else 0.0
            assert error <= tolerance * (1 + scale), (names, error, scale)


def test_not_a_number_still_gives_each_slot_an_expert_of_its_own():
    router, _ = routers((5, 8, 6, 3), "detached", torch.float32)
    x = torch.randn(5, 8, device=DEVICE)
    x[2] = float("nan")
    index = router(x).expert_ids
    assert ((index >= 0) & (index < 6)).all()
    assert all(len(set(row)) == 3 for row in index.tolist())


def test_the_largest_logits_are_chosen_where_probabilities_are_equal():
    """Float32 has no probability below 1e-45: most of the experts of a large input have 0."""
    router, _ = routers((70, 37, 7, 3), "detached", torch.float32)
    routing = router(torch.randn(70, 37, device=DEVICE) * 1e4)
    assert torch.equal(routing.expert_ids, routing.logits.topk(3).indices)


def test_infinite_logits_still_give_each_slot_an_expert_of_its_own():
    router, _ = routers((5, 8, 6, 3), "detached", torch.float32)
    with torch.no_grad():
        router.projection.weight.copy_(
            torch.tensor([-1.0, 1, -1, -1, -1, 1]).unsqueeze(1) * 1e38
        )
    index = router(torch.full((4, 8), 3.0, device=DEVICE)).expert_ids
    assert index.tolist() == [[1, 5, 0]] * 4


def test_ties_go_to_the_lower_number():
    router, _ = routers((5, 8, 6, 3), "detached", torch.float32)
    decision = router(torch.zeros(4, 8, device=DEVICE))
    assert decision.expert_ids.tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize(
    "tokens, experts, per_token, hot",
    [
        *[(1, 3, 2, 0.0), (300, 5, 2, 0.0), (37, 33, 8, 0.0), (0, 4, 2, 0.0), (5, 1, 1, 0.0)],
        (500, 5, 1, 1.0),
        (1100, 300, 2, 0.0),  # blocks of 16 tokens: more than are counted at once
    ],
)
def test_slots_are_sorted_as_torch_sorts_them(tokens, experts, per_token, hot):
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(3))
    scores[:, 3:4] += hot  # of 1: all tokens choose it
    index = scores.topk(per_token).indices.to(DEVICE)
    exact = ExpertPermutation(index, experts)
    fast = ExpertPermutation(index, experts)
    fast.sort_by(backend.sorted_slots)
    assert torch.equal(fast.order, exact.order) and torch.equal(fast.offsets, exact.offsets)
    assert fast.offsets.dtype == torch.int32 and fast.order.dtype == torch.int64


@pytest.mark.parametrize("slots, width", [(1, 5), (70, 130), (64, 128)])
def test_gated_slots(slots, width):
    own, product = torch.randn(2, slots, width, device=DEVICE)
    gate = torch.rand(slots, device=DEVICE)
    expected = own * gate[:, None], (own * product).sum(1), product * gate[:, None]
    from moa_fairseq.layers.experts.triton import launch_routing

    got = (*launch_routing.gate_slots(own, gate, product), product)
    for fast, exact in zip(got, expected):
        torch.testing.assert_close(fast, exact)
