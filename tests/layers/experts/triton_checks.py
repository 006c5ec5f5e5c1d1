"""The Triton backend against the float64 reference: forward and every gradient.

Run by test_triton.py in a process of its own: on the GPU if there is one, else under Triton's interpreter,
which must be chosen (TRITON_INTERPRET=1) before Triton loads. By hand, on a machine with a GPU:
`python -m pytest tests/layers/experts/triton_checks.py`.
"""

import functools
import os

import pytest
import torch
from projection_cases import SHAPES, USES, choose, variants
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moa_fairseq.layers.experts import ExpertPermutation, project
from moa_fairseq.layers.experts import triton as triton_backend
from moa_fairseq.layers.experts.validate import complaints
from moa_fairseq.layers.moa import MixtureOfAttention

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = "cpu" if INTERPRETED else "cuda"
HAS_BF16 = INTERPRETED or torch.cuda.get_device_capability() >= (8, 0)
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_BF16

SHAPES = {
    **SHAPES,
    "several tiles per expert": (30, 20, 3, 2, 36, 1, "random"),
    "several tiles per expert, two heads": (30, 36, 3, 2, 20, 2, "random"),
}
if DEVICE == "cuda":
    SHAPES["of a real layer"] = (1000, 512, 32, 8, 128, 1, "random")
    SHAPES["a real layer with one hot expert"] = (700, 512, 16, 1, 256, 1, "first")
    SHAPES["SwitchHead's of 262M parameters"] = (600, 1024, 8, 4, 132, 2, "random")
TILED = [
    name
    for name in SHAPES
    if "several tiles" in name or "real layer" in name or "SwitchHead" in name
]
UGLIEST = ("one token", "no token", "an expert nobody chose", "all tokens on one expert")


def is_told_apart(shape, use):
    """Whether it is worth the interpreter's time: MoA has one head, SwitchHead several."""
    return (
        DEVICE == "cuda"
        or shape in UGLIEST
        or (SHAPES[shape][5] > 1) == use.startswith("SwitchHead")
    )


PAIRS = [
    (shape, use)
    for shape in SHAPES
    for use in USES
    if is_told_apart(shape, use) and shape not in ("ordinary", "aligned for grouped_mm")
]


def compare(case, **options):
    exact = (
        case.exact if DEVICE == "cpu" else case.run(case.projected("reference"), torch.float64)
    )
    if options:
        exact = case.run(case.projected("reference"), torch.float64, **options)
    plain = case.run(case.projected("reference"), case.dtype, DEVICE, **options)
    fast = case.run(case.projected("triton"), case.dtype, DEVICE, **options)
    assert fast["output"].dtype == case.dtype
    found = [
        {name: t.cpu() for name, t in one.items() if t.numel()} for one in (fast, plain, exact)
    ]
    assert found[0].keys() == found[2].keys() and complaints(*found) == []
    assert all(fast[name].shape == truth.shape for name, truth in exact.items())
    return fast


@pytest.mark.parametrize("shape, use", PAIRS)
def test_float32_equals_the_reference(shape, use):
    """The interpreter is slow: each variant only for sizes that fit no tile, else the use as it is."""
    every = DEVICE == "cuda" or shape.startswith("prime")
    for case in variants(SHAPES[shape], use)[: None if every else 1]:
        compare(case)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("shape, use", [pair for pair in PAIRS if pair[0] in TILED])
def test_sixteen_bit_is_as_good_as_the_obvious_computation(shape, dtype, use):
    compare(variants(SHAPES[shape], use, dtype)[0])


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "reshape",
    [
        lambda upstream: upstream[:1].expand_as(upstream),
        lambda upstream: upstream.t().contiguous().t(),
    ],
    ids=["expanded", "strided"],
)
def test_upstream_gradients_of_any_layout(reshape, use):
    compare(variants((11, 12, 3, 2, 4, 2, "random"), use)[0], reshape=reshape)


@pytest.mark.parametrize(
    "shape", ["prime sizes, no multiple of a tile", "all tokens on one expert"]
)
@pytest.mark.parametrize("use", ["MoA queries", "SwitchHead destination"])
def test_experts_with_many_rows_are_cut_into_chunks(use, shape, monkeypatch):
    from moa_fairseq.layers.experts.triton import launch

    monkeypatch.setattr(launch, "rows_per_chunk", lambda *sizes: 16)
    case = variants(SHAPES[shape], use)[0]
    first = compare(case)
    again = case.run(case.projected("triton"), torch.float32, DEVICE)
    assert all(torch.equal(first[key], again[key]) for key in first), "not deterministic"


@pytest.mark.parametrize("use", USES)
def test_the_model_dimension_is_done_in_steps_when_slots_are_many(use, monkeypatch):
    from moa_fairseq.layers.experts.triton import launch

    monkeypatch.setattr(launch, "_cache_bytes", lambda tensor: 0)
    monkeypatch.setattr(launch, "_COLUMN_TILE", 16)
    assert launch.columns_at_once(40, 20, 36, 4, 0) == 32  # 32 + 4: the last step is narrower
    compare(variants(SHAPES["several tiles per expert, two heads"], use)[0])


def test_chunks_and_steps_stay_within_their_bounds():
    from moa_fairseq.layers.experts.triton.launch import columns_at_once, rows_per_chunk

    h200 = 60 * 2**20
    assert columns_at_once(8192 * 8, 128, 512, 2, h200) == 512  # 64 MiB: close enough
    # The buffer is as large as the slots
    assert columns_at_once(16384 * 8, 128, 512, 2, h200) == 128
    assert columns_at_once(16384 * 8, 100, 512, 2, h200) == 128
    assert columns_at_once(320, 128, 512, 4, 0) == 128
    assert columns_at_once(8192 * 16, 64, 36, 2, 0) == 36
    assert rows_per_chunk(8192 * 8, 64, 4, 132) == 4096  # four times an expert's share
    assert rows_per_chunk(8192 * 8, 9, 4, 132) == 1024  # 264 programs
    assert rows_per_chunk(0, 9, 4, 132) == 256


@pytest.mark.parametrize(
    "counts", [[40, 0, 17, 16, 1], [0, 0, 74, 0, 0], [17, 17, 17, 17, 6], [14, 15, 15, 15, 15]]
)
def test_only_experts_that_are_cut_leave_parts(counts, monkeypatch):
    """Parts of one chunk each, side by side, and no more room for them than the most there can be."""
    from moa_fairseq.layers.experts.triton import launch

    monkeypatch.setattr(launch, "rows_per_chunk", lambda *sizes: 16)
    index = (
        torch.repeat_interleave(torch.arange(5), torch.tensor(counts)).unsqueeze(1).to(DEVICE)
    )
    order = ExpertPermutation(index, 5)
    left = torch.randn(74, 12, device=DEVICE)
    right = torch.randn(74, 20, device=DEVICE)
    cut = sum(-(-count // 16) for count in counts if count > 16)
    _, blocks, parts = launch._chunks(74, 5, 1, left)
    assert cut <= parts <= blocks
    got = launch.outer(left, right, order.order, order.offsets, 1, 1)
    for expert, rows in enumerate(index[:, 0] == e for e in range(5)):
        torch.testing.assert_close(
            got[expert], left[rows].t() @ right[rows], atol=1e-4, rtol=1e-4
        )


def test_a_tuned_kernel_is_launched_plainly_from_then_on():
    """By a table of its own: the autotuner is asked once for each dtype and size."""
    from types import SimpleNamespace

    from moa_fairseq.layers.experts.triton import table

    calls = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda **arguments: calls.append((self.name, arguments))

    tuned = Kernel("tuner")
    config = SimpleNamespace(kwargs={"BLOCK": 32}, num_warps=8, num_stages=3)
    tuned.configs, tuned.fn, tuned.best_config = [config], Kernel("plain"), config
    x = torch.randn(3, device=DEVICE)
    for tensor, size in ((x, 4), (x, 4), (x.double(), 4), (x, 5), (x, 5)):
        table.start(tuned, lambda meta: (1,), x=tensor, bias=None, first_column=size, SIZE=size)
    assert [name for name, _ in calls] == ["tuner", "plain", "tuner", "tuner", "plain"]
    assert calls[1][1] == {"x": x, "bias": None, "first_column": 4, "SIZE": 4, "BLOCK": 32} | {
        "num_warps": 8,
        "num_stages": 3,
    }


@pytest.mark.parametrize("use", ["SwitchHead source", "SwitchHead destination"])
def test_nothing_as_large_as_every_slot_of_the_models_width_is_stored(use, monkeypatch):
    """Every tensor that a launch makes, in all the parts of a forward and a backward pass."""
    from moa_fairseq.layers.experts.triton import launch

    monkeypatch.setattr(launch, "_cache_bytes", lambda tensor: 0)
    monkeypatch.setattr(launch, "_COLUMN_TILE", 16)
    largest = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest.append(result.untyped_storage().nbytes() // 4)
            return result

    def watched(launcher):
        @functools.wraps(launcher)
        def run(*arguments):
            with Sizes():
                return launcher(*arguments)

        return run

    for name in ("products", "gate_grads", "outer", "sum_rows"):
        monkeypatch.setattr(launch, name, watched(getattr(launch, name)))
    # so many that no partial weight gradient is the largest
    tokens = 72
    model_dim = 96
    k = 4
    heads = 2
    case = variants((tokens, model_dim, 5, k, 16, heads, "random"), use)[0]
    case.run(case.projected("triton"), torch.float32, DEVICE)
    assert tokens * model_dim <= max(largest) <= tokens * heads * k * model_dim / 2


def test_what_the_kernels_do_not_take_goes_elsewhere():
    x = torch.randn(3, 8, device=DEVICE)
    assert triton_backend.takes(x, x)
    assert not triton_backend.takes(x.double(), x.double())
    assert not triton_backend.takes(x.half(), x)
    index = torch.tensor([[0, 2], [1, 2], [0, 1]], device=DEVICE)
    weight = torch.randn(3, 4, 8, device=DEVICE, dtype=torch.float64)
    arguments = (x.double(), weight, ExpertPermutation(index, 3))
    triton, reference = (
        project(*arguments, is_up=True, backend=name) for name in ("triton", "reference")
    )
    torch.testing.assert_close(triton, reference)


def _both(x, weight, out_weight, gate, index, num_experts):
    """Both directions of SwitchHead with two heads, as a layer uses them: x [N, C] → [N, C]."""
    order = ExpertPermutation(index, num_experts)
    options = dict(gates=gate, fan=2, backend="triton")
    heads = project(x, weight, order, is_up=True, **options).tanh()
    return project(heads, out_weight, order, is_up=False, **options)


def _arguments(tokens=9, model_dim=20, num_experts=4, k=2, dim=12, dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    experts = 2 * num_experts
    sizes = (
        (tokens, model_dim),
        (experts, dim, model_dim),
        (experts, dim, model_dim),
        (tokens, 2 * k),
    )
    tensors = [
        torch.randn(size, generator=g).to(DEVICE, dtype).requires_grad_() for size in sizes
    ]
    return [*tensors, choose(tokens, num_experts, k, 2, "random", g).to(DEVICE), experts]


@pytest.mark.parametrize("use", USES)
def test_operators_keep_the_contract_of_torch(use):
    for case in variants((9, 20, 4, 2, 12, 2, "random"), use):
        index, inputs, _ = case.inputs
        leaves = {
            name: t.to(DEVICE, torch.float32).requires_grad_() for name, t in inputs.items()
        }
        gate = leaves["gate"].detach().flatten().requires_grad_() if "gate" in leaves else None
        order = ExpertPermutation(index.to(DEVICE), leaves["weight"].size(0))
        tensors = (leaves["rows"], leaves["weight"], leaves.get("bias"), gate)
        routing = (order.expert, order.order, order.offsets)
        torch.library.opcheck(
            triton_backend.expert_project, (*tensors, *routing, case.is_up, *case.slots)
        )


def test_eager_code_calls_no_operator_of_torch(monkeypatch):
    """They cost the host more than the kernels take."""
    monkeypatch.setattr(triton_backend, "expert_project", None)
    monkeypatch.setattr(triton_backend, "_OPERATORS", None)
    x, *others = _arguments()
    _both(x, *others).sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [DTYPES[0], DTYPES[-1]], ids=str)
def test_compiles_into_one_graph_for_any_number_of_tokens(dtype):
    compiled = torch.compile(_both, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (9, 14):
        arguments = _arguments(tokens, dtype=dtype)
        leaves = [a for a in arguments if torch.is_tensor(a) and a.requires_grad]
        expected = _both(*arguments)
        got = compiled(*arguments)
        torch.testing.assert_close(got, expected)
        upstream = torch.randn_like(expected)
        for a, b in zip(
            torch.autograd.grad(got, leaves, upstream),
            torch.autograd.grad(expected, leaves, upstream),
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.skipif(not HAS_BF16, reason="this GPU has no bfloat16")
def test_autocast_gives_what_a_matmul_gives():
    arguments = _arguments()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = _both(*arguments)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), _both(*arguments), atol=0.1, rtol=0.05)
    out.float().sum().backward()
    assert all(a.grad.dtype == torch.float32 for a in arguments[:4])


def test_gradient_checkpointing_changes_nothing():
    arguments = _arguments()
    leaves = arguments[:4]
    plain = torch.autograd.grad(_both(*arguments).square().sum(), leaves)
    out = checkpoint(_both, *arguments, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.square().sum(), leaves), plain):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_only_what_is_asked_for_is_differentiated():
    x, weight, out_weight, gate, index, num_experts = _arguments()
    out = _both(x.detach(), weight.detach(), out_weight, gate.detach(), index, num_experts)
    out.sum().backward()
    assert (
        out_weight.grad is not None
        and x.grad is None
        and weight.grad is None
        and gate.grad is None
    )


def test_a_second_derivative_is_refused_not_wrong():
    x, *others = _arguments()
    with pytest.raises(RuntimeError, match=r"twice|autograd"):
        (grad,) = torch.autograd.grad(_both(x, *others).square().sum(), x, create_graph=True)
        grad.sum().backward()


@pytest.mark.parametrize("bias", [False, True])
def test_a_whole_attention_in_data_parallel_equals_the_reference_backend(bias, tmp_path):
    outcomes = []
    x, upstream = torch.randn(2, 3, 7, 20, generator=torch.Generator().manual_seed(1)).to(
        DEVICE
    )
    padding = (torch.arange(7) >= torch.tensor([[7], [4], [7]])).to(DEVICE)
    torch.distributed.init_process_group(
        "gloo", f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for backend in ("reference", "triton"):
            torch.manual_seed(2)
            module = MixtureOfAttention(
                20,
                num_experts=5,
                experts_per_token=2,
                expert_dim=12,
                expert_bias=bias,
                self_attention=True,
                expert_backend=backend,
            )
            inputs = x.clone().requires_grad_()
            wrapped = torch.nn.parallel.DistributedDataParallel(module.to(DEVICE))
            out = wrapped(inputs, padding=padding)
            out.backward(upstream)
            outcomes.append([out.detach(), inputs.grad, *(p.grad for p in module.parameters())])
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(*outcomes, atol=1e-5, rtol=1e-4)
