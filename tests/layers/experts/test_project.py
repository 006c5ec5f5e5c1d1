"""Every backend against a float64 loop nobody can doubt: forward and all gradients, ugly shapes, memory."""

import functools

import pytest
import torch
from projection_cases import SHAPES, USES, choose, variants
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moa_fairseq.layers.experts import ExpertPermutation, every_expert, project, projection
from moa_fairseq.layers.experts.grouped import dense, expert_loop, sorted_rows
from moa_fairseq.layers.experts.grouped.expert_loop import ExpertLoop
from moa_fairseq.layers.experts.grouped.sorted_rows import SortedRows

# name → the way, and the constants that make it go in steps
WALKS = {
    "as chosen": (None, []),
    "expert_loop": (projection._LOOP, []),
    "expert_loop in pieces": (projection._LOOP, [(expert_loop, "_PIECE", 3)]),
    "every_expert": (projection._EVERY_EXPERT, []),
    "placed_rows": (projection._FEW_TOKENS, []),
    "sorted_rows": (projection._GROUPED_MM, []),
    "sorted_rows in steps": (
        projection._GROUPED_MM,
        [(sorted_rows, "_FREE_ELEMENTS", 0), (sorted_rows, "_UNIT", 4)],
    ),
}


def assert_close(fast, exact, what):
    error = (fast.double() - exact).abs().max().item() if exact.numel() else 0.0
    scale = exact.abs().max().item() if exact.numel() else 1.0
    assert fast.shape == exact.shape and torch.isfinite(fast).all(), what
    assert error <= 1e-5 * (1 + scale), f"{what}: off by {error:.2e}"


def walk_by(name, monkeypatch):
    way, constants = WALKS.get(name, (None, []))
    if way is projection._GROUPED_MM and not sorted_rows.HAS_GROUPED_MM:
        pytest.skip("no grouped_mm in this torch")
    if way is not None:
        always = way._replace(unsupported_reason=lambda _: "")
        monkeypatch.setitem(projection._WAYS, "grouped", (always,))
    for constant in constants:
        monkeypatch.setattr(*constant)


def takes_on_cpu(shape):
    """sorted_rows is not chosen on a CPU, but newer torch has its product there, too."""
    tokens, model_dim, _, _, dim, *_ = shape
    return sorted_rows.HAS_GROUPED_MM and tokens > 0 and model_dim % 4 == dim % 4 == 0


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("shape", "walk"),
    [
        pytest.param(shape, walk, id=f"{name}-{walk}")
        for name, shape in SHAPES.items()
        for walk in ("reference", *WALKS)
        if not walk.startswith("sorted_rows") or takes_on_cpu(shape)
    ],
)
def test_forward_and_every_gradient_equal_the_loop(shape, walk, use, monkeypatch):
    walk_by(walk, monkeypatch)
    backend = "reference" if walk == "reference" else "grouped"
    in_order = shape[-1] == "all"
    for case in variants(shape, use):
        fast = case.run(
            case.projected(backend, in_order and walk in ("reference", "as chosen")),
            torch.float32,
        )
        for name, exact in case.exact.items():
            assert_close(fast[name], exact, f"{name}, {case}")


def switchhead(use, tokens, model_dim, num_experts, k, dim, heads=2):
    """A function that computes one of SwitchHead's fans and all its gradients, and keeps nothing."""
    g = torch.Generator().manual_seed(1)
    index = choose(tokens, num_experts, k, heads, "random", g)
    is_up, fan, _ = USES[use]
    narrow = (index.numel() // fan(k), dim)
    wide = (tokens, model_dim)
    rows = torch.randn(wide if is_up else narrow, requires_grad=True)
    weight = torch.randn(heads * num_experts, dim, model_dim, requires_grad=True)
    gate = torch.rand(index.shape, requires_grad=True)
    upstream = torch.randn(narrow if is_up else wide)

    def step(backend="grouped"):
        order = ExpertPermutation(index, weight.size(0))
        out = project(rows, weight, order, is_up=is_up, fan=fan(k), gates=gate, backend=backend)
        torch.autograd.grad(out, (rows, weight, gate), upstream)

    return step


class Largest(TorchDispatchMode):
    """How many elements the largest tensor had that any operation made; views and expansions do not count."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(
                    self.elements, tensor.untyped_storage().nbytes() // tensor.element_size()
                )
        return result


@pytest.mark.parametrize("walk", ["reference", *WALKS])
@pytest.mark.parametrize("use", ["SwitchHead source", "SwitchHead destination"])
def test_nothing_as_large_as_every_slot_of_the_models_width_is_stored(use, walk, monkeypatch):
    tokens = 128
    model_dim = 64
    num_experts = 6
    k = 4
    dim = 8
    heads = 2
    walk_by(walk, monkeypatch)
    monkeypatch.setattr(sorted_rows, "_FREE_ELEMENTS", 0)
    monkeypatch.setattr(sorted_rows, "_UNIT", 16)
    with Largest() as largest:
        backend = "reference" if walk == "reference" else "grouped"
        switchhead(use, tokens, model_dim, num_experts, k, dim)(backend)
    every_slot = tokens * heads * k * model_dim
    assert largest.elements >= tokens * model_dim, "the counter sees nothing"
    assert largest.elements <= every_slot / 2, f"{largest.elements} of {every_slot} elements"


def peak_bytes(step):
    """The most bytes that the step holds at once, by the allocator's own record."""
    step()
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


@pytest.mark.thorough(keep="destination")
@pytest.mark.parametrize("use", ["SwitchHead source", "SwitchHead destination"])
def test_switchheads_peak_of_memory_is_flat_in_k(use):
    """More slots need more indices and gates, but not one row more of either width."""
    tokens = 16384
    model_dim = 256
    num_experts = 16
    dim = 64
    heads = 2
    peaks = {
        k: peak_bytes(switchhead(use, tokens, model_dim, num_experts, k, dim)) for k in (1, 4)
    }
    more_slots = tokens * heads * (4 - 1)
    assert peaks[1] > 4 * tokens * model_dim, "the record is empty"
    assert peaks[4] < 1.15 * peaks[1], peaks
    assert peaks[4] - peaks[1] < 4 * more_slots * dim / 2, (
        peaks
    )  # not even the slots' narrow side


@pytest.mark.skipif(
    not sorted_rows.HAS_GROUPED_MM, reason="no grouped_mm in this torch: 2.10 has it"
)
@pytest.mark.parametrize("use", USES)
def test_each_step_of_sorted_rows_names_rows_that_it_has(use, monkeypatch):
    """A GPU reads what the offsets say; a CPU's product stops at the last row by itself."""
    product = torch.nn.functional.grouped_mm
    calls = []

    def watch(left, right, offs):
        calls.append(offs.tolist())
        assert calls[-1] == sorted(calls[-1]) and calls[-1][0] >= 0
        assert calls[-1][-1] == left.size(0 if right.dim() == 3 else 1)
        return product(left, right, offs=offs)

    monkeypatch.setattr(sorted_rows.F, "grouped_mm", watch)
    walk_by("sorted_rows in steps", monkeypatch)
    # C is 4·D: four steps, the last one shorter
    (case, *_) = variants((60, 64, 4, 2, 16, 2, "random"), use)
    case.run(case.projected("grouped"), torch.float32)
    assert len(calls) > 8, "there were two steps"


@pytest.mark.parametrize(
    ("rows", "weight", "options"),
    [
        ((2, 8), (3, 4, 8), {"is_up": True}),  # two tokens for three
        ((3, 8), (2, 4, 8), {"is_up": True}),  # two experts for three
        ((3, 4), (3, 4, 8), {"is_up": True}),  # of the experts' width
        ((3, 8), (3, 4, 8), {"is_up": True, "fan": 4}),  # of two slots
        ((6, 8), (3, 4, 8), {"is_up": False}),  # of the model's width
        ((6, 4), (3, 4, 8), {"is_up": False, "fan": 2}),
        ((3, 8), (3, 4, 8), {"is_up": True, "gates": torch.rand(3)}),
    ],
)
def test_sizes_that_do_not_fit_are_refused(rows, weight, options):
    order = ExpertPermutation(torch.tensor([[0, 2], [1, 2], [0, 1]]), 3)
    with pytest.raises(ValueError):
        project(torch.randn(rows), torch.randn(weight), order, **options)


def second_gradients(case, function, dtype, is_constant):
    """Gradients of something made of the gradients, and of the incoming one unless that is a constant."""
    index, inputs, upstream = case.inputs
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in inputs.items()}
    incoming = upstream.detach().to(dtype).requires_grad_(not is_constant)
    first = torch.autograd.grad(
        function(index, leaves), leaves.values(), incoming, create_graph=True
    )
    penalty = sum((grad * grad.detach().cos()).sum() for grad in first)
    named = leaves if is_constant else {**leaves, "upstream": incoming}
    options = dict(allow_unused=True, materialize_grads=True)
    return dict(zip(named, torch.autograd.grad(penalty, named.values(), **options)))


@functools.cache
def exact_second_gradients(case, is_constant):
    return second_gradients(case, case._loop, torch.float64, is_constant)


@pytest.mark.parametrize("walk", ["reference", *WALKS])
@pytest.mark.parametrize("use", USES)
def test_differentiated_twice(use, walk, monkeypatch):
    """With an incoming gradient that is a constant, as of a sum, and one that is not."""
    walk_by(walk, monkeypatch)
    backend = walk if walk == "reference" else "grouped"
    # grouped_mm takes no float64
    dtype = torch.float32 if walk.startswith("sorted_rows") else torch.float64
    for shape in ((6, 8, 4, 2, 4, 2, "random"), (3, 8, 4, 4, 4, 1, "all")):
        for case in variants(shape, use):
            function = case.projected(backend, shape[-1] == "all")
            for is_constant in (True, False):
                found = second_gradients(case, function, dtype, is_constant)
                for name, exact in exact_second_gradients(case, is_constant).items():
                    assert_close(found[name], exact, f"{name}, {case}")


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("use", USES)
def test_only_what_is_asked_for_is_differentiated(use, walk, monkeypatch):
    """Each gradient alone is the one that comes with all others."""
    walk_by(walk, monkeypatch)
    for case in variants(SHAPES["aligned for grouped_mm"], use):
        together = case.run(case.projected("grouped"), torch.float32)
        index, inputs, upstream = case.inputs
        for name in inputs:
            leaves = {n: t.float().requires_grad_(n == name) for n, t in inputs.items()}
            out = case.projected("grouped")(index, leaves)
            (grad,) = torch.autograd.grad(out, leaves[name], upstream.float())
            torch.testing.assert_close(grad, together[name])


@pytest.mark.parametrize("shape", ["K = E", "E = 1"])
def test_only_what_is_asked_for_is_differentiated_where_every_expert_is_chosen(shape):
    for use in USES:
        for case in variants(SHAPES[shape], use):
            index, inputs, upstream = case.inputs
            for name in inputs:
                leaves = {n: t.float().requires_grad_(n == name) for n, t in inputs.items()}
                out = case.projected("grouped", True)(index, leaves)
                (grad,) = torch.autograd.grad(out, leaves[name], upstream.float())
                assert_close(grad, case.exact[name], f"{name}, {case}")


def test_plans_of_a_slot_order_are_made_once(monkeypatch):
    monkeypatch.setattr(expert_loop, "_PIECE", 5)
    index = torch.randint(0, 6, (29, 4), generator=torch.Generator().manual_seed(1))
    order = ExpertPermutation(index, 7)
    flat = index.reshape(-1)
    assert (flat[order.order].diff() >= 0).all()
    assert torch.equal(order.offsets.long(), torch.bincount(flat, minlength=7).cumsum(0))
    rows = order.plan(SortedRows, 1)
    assert order.plan(SortedRows, 1) is rows and order.plan(SortedRows, 2) is not rows
    loop = order.plan(ExpertLoop, 1)
    assert loop.unchosen == [6] and all(1 <= len(rows) <= 7 for rows in loop.wide_rows)


@pytest.mark.parametrize(
    "sizes, pays, pays_in_bfloat16",
    [
        ((512, 4, 8, 48, 128), True, True),  # small experts: the loop's steps cost more
        ((2048, 8, 32, 128, 512), False, False),
        ((1, 8, 32, 128, 512), False, False),  # 24 of 32 matrices need not be read
        ((16, 8, 32, 128, 512), True, True),
        (
            (4000, 4, 8, 48, 128),
            False,
            True,
        ),  # products are cheaper, new numbers of rows dearer
        ((8192, 8, 32, 256, 1024), False, False),
    ],
)
def test_when_computing_every_expert_pays(sizes, pays, pays_in_bfloat16):
    tokens, per_token, *shape = sizes
    for dtype, expected in ((torch.float32, pays), (torch.bfloat16, pays_in_bfloat16)):
        order = ExpertPermutation(torch.zeros(tokens, per_token, dtype=torch.int64), shape[0])
        weight = torch.empty(shape, dtype=dtype)
        product = projection.Product(
            weight.new_empty(tokens, shape[2]), weight, None, None, order, True, 1
        )
        assert (not every_expert.unsupported_reason(product)) == expected


@pytest.mark.parametrize(
    "major, is_bf16, taken",
    [(9, True, True), (8, True, False), (10, True, False), (9, False, False)],
)
def test_grouped_mm_is_called_only_where_it_is_a_kernel(major, is_bf16, taken, monkeypatch):
    """Hopper in bfloat16: torch loops elsewhere, and on Blackwell empty groups get wrong gradients."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(sorted_rows, "HAS_GROUPED_MM", True)
    properties = type("Properties", (), {"major": major})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    dtype = torch.bfloat16 if is_bf16 else torch.float16
    rows, weight = (
        torch.zeros(size, dtype=dtype).as_subclass(OnGpu) for size in ((4, 16), (2, 8, 16))
    )
    assert (not sorted_rows.unsupported_reason(rows, weight)) == taken


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@pytest.mark.parametrize("use", USES)
def test_autocast_gives_what_a_matmul_gives(use, backend):
    (case, *_) = variants(SHAPES["ordinary"], use)
    index, inputs, _ = case.inputs
    leaves = {name: t.float().requires_grad_() for name, t in inputs.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = case.projected(backend)(index, leaves)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), case.exact["output"], atol=0.1, rtol=0.05)
    out.float().sum().backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves.values())


@pytest.mark.parametrize("walk", ["expert_loop", "every_expert", "placed_rows"])
def test_in_half_precision_a_sum_of_slots_is_rounded_once(walk, monkeypatch):
    """256 + 1 is 256 in bfloat16, and so seven times; but the sum of all eight is 264."""
    walk_by(walk, monkeypatch)
    order = ExpertPermutation(torch.arange(8).expand(3, -1), 8)
    gate = torch.tensor([256.0] + [1.0] * 7)
    slots = torch.eye(4)[:1].expand(24, -1).bfloat16()
    weight = torch.ones(8, 4, 16).bfloat16()
    out = project(
        slots.contiguous(), weight, order, is_up=False, gates=gate.repeat(3), backend="grouped"
    )
    assert out.shape == (3, 16) and (out == 264).all()


def test_a_gate_in_float32_is_not_rounded_to_the_slots_half_precision():
    """Where every expert is chosen, in pieces of rows: the product is rounded, and nothing before it."""
    slots = torch.rand(3000, 4).bfloat16()
    gate = torch.rand(3000)
    exact = (slots.float() * gate[:, None]).bfloat16()
    assert torch.equal(dense._times_gate(slots, gate), exact)
    assert not torch.equal(slots * gate.bfloat16()[:, None], exact), "the case tells nothing"


@pytest.mark.thorough(keep="MoA outputs-all")
@pytest.mark.parametrize("kind", ["random", "all"])
@pytest.mark.parametrize("use", [use for use in USES if USES[use].gated])
def test_gates_in_float32_beside_half_precision_leave_its_dtype(use, kind):
    """As in a layer in bfloat16, whose router is in float32: eager, traced, and differentiated twice."""
    (case, *_) = variants((9, 8, 4, 4 if kind == "all" else 2, 4, 1, kind), use, torch.bfloat16)
    index, inputs, _ = case.inputs
    dtypes = {"gate": torch.float32}
    leaves = {
        name: t.to(dtypes.get(name, torch.bfloat16)).requires_grad_()
        for name, t in inputs.items()
    }
    function = case.projected("grouped", kind == "all")
    traced = torch.compile(function, backend="aot_eager", fullgraph=True)
    for out in (function(index, leaves), traced(index, leaves)):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), case.exact["output"], atol=0.1, rtol=0.05)
    first = torch.autograd.grad(
        function(index, leaves).sum(), leaves.values(), create_graph=True
    )
    assert [grad.dtype for grad in first] == [leaf.dtype for leaf in leaves.values()]
    twice = torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves["rows"])
    assert twice[0].isfinite().all()
