"""The Triton backend against the float64 reference: forward and every gradient.

Run by test_triton.py in a process of its own: on the GPU if there is one, else under Triton's interpreter,
which must be chosen (TRITON_INTERPRET=1) before Triton loads. By hand, on a machine with a GPU:
`python -m pytest tests/kernels/triton_checks.py`.
"""

import os

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moa_fairseq.attention.moa import MixtureOfAttention
from moa_fairseq.kernels import expert_bank, triton_bank
from moa_fairseq.kernels.slot_order import SlotOrder

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = "cpu" if INTERPRETED else "cuda"
HAS_BF16 = INTERPRETED or torch.cuda.get_device_capability() >= (8, 0)
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_BF16
HAS_OPERATORS = hasattr(torch.library, "custom_op")

# N, C, E, K, D, which experts the tokens choose
SHAPES = {
    "several tiles per expert": (40, 48, 5, 3, 40, "random"),
    "no size a multiple of anything: D = 20, C = 36": (19, 36, 6, 2, 20, "random"),
    "one token": (1, 16, 5, 2, 8, "random"),
    "no token": (0, 16, 5, 2, 8, "random"),
    "an expert nobody chose": (23, 16, 6, 2, 8, "skip the last"),
    "all tokens on one expert": (37, 16, 6, 1, 8, "first"),
    "K = 1": (11, 12, 3, 1, 4, "random"),
    "fewer tokens than experts": (3, 20, 19, 2, 12, "random"),
    "primes": (31, 13, 7, 3, 11, "random"),
}
if DEVICE == "cuda":
    SHAPES["of a real layer"] = (1000, 512, 32, 8, 128, "random")
    SHAPES["a real layer with one hot expert"] = (700, 512, 16, 1, 256, "first")


def choose(tokens, num_experts, per_token, kind, generator):
    if kind == "first":
        return torch.zeros(tokens, per_token, dtype=torch.long)
    usable = num_experts - 1 if kind == "skip the last" else num_experts
    return torch.rand(tokens, usable, generator=generator).topk(per_token, dim=-1).indices


class Case:
    """Random inputs of one shape, in float64 on the CPU; `run` computes one function of them in some way."""

    def __init__(self, tokens, model_dim, num_experts, per_token, dim, kind="random", seed=0):
        g = torch.Generator().manual_seed(seed + tokens + 31 * num_experts)
        self.num_experts = num_experts
        self.index = choose(tokens, num_experts, per_token, kind, g)
        gate = torch.rand(tokens, per_token, generator=g)
        gate[: tokens // 3] = 0.0  # padding
        weight = torch.randn(num_experts, dim, model_dim, generator=g) / dim**0.5
        self.inputs = {
            "dispatch": {
                "x": torch.randn(tokens, model_dim, generator=g),
                "weight": weight,
                "bias": torch.randn(num_experts, dim, generator=g),
            },
            "combine": {
                "slots": torch.randn(tokens, per_token, dim, generator=g),
                "gate": gate,
                "weight": weight,
                "bias": torch.randn(num_experts, model_dim, generator=g),
            },
        }
        self.upstream = {
            "dispatch": torch.randn(tokens, per_token, dim, generator=g),
            "combine": torch.randn(tokens, model_dim, generator=g),
        }

    def run(self, name, backend, dtype, bias=True, reshape=lambda upstream: upstream, device=DEVICE):
        """{"output": …, "x": its gradient, …} of function `name`, computed in dtype by the backend."""
        inputs = {
            key: value.to(device, dtype).requires_grad_()
            for key, value in self.inputs[name].items()
            if bias or key != "bias"
        }
        index = self.index.to(device)
        order = SlotOrder.from_index(index, self.num_experts) if backend != "reference" else None
        first = inputs.pop("x") if name == "dispatch" else inputs.pop("slots")
        gate = [inputs.pop("gate")] if name == "combine" else []
        function = getattr(expert_bank, name)
        output = function(first, index, *gate, order, inputs["weight"], inputs.get("bias"), backend=backend)
        leaves = [first, *gate, *inputs.values()]
        upstream = reshape(self.upstream[name].to(device, dtype))
        grads = torch.autograd.grad(output, leaves, upstream, allow_unused=not self.index.numel())
        names = ["grad of input", *["grad of gate"] * len(gate), *(f"grad of {key}" for key in inputs)]
        return dict(zip(["output", *names], [output.detach(), *grads]))


def rounded(case, dtype):
    """The case with inputs that dtype represents exactly, so that only the computation differs."""
    for inputs in case.inputs.values():
        for key, value in inputs.items():
            inputs[key] = value.to(dtype).double()
    case.upstream = {key: value.to(dtype).double() for key, value in case.upstream.items()}
    return case


def assert_as_good_as(fast, plain, exact):
    """Errors of `fast` are at most twice those of the obvious computation in the same dtype, per tensor."""
    assert fast.keys() == exact.keys()
    for name, truth in exact.items():
        if truth is None or not truth.numel():
            continue
        truth = truth.cpu()
        got, simple = fast[name].cpu().double(), plain[name].cpu().double()
        assert got.shape == truth.shape and torch.isfinite(got).all(), name
        error, allowed = (got - truth).abs().max().item(), (simple - truth).abs().max().item()
        # the obvious computation can be lucky: one rounding of the largest value, in float32 (whose sums
        # are rounded, too) a few
        roundings = 8 if fast[name].dtype == torch.float32 else 1
        tiny = roundings * truth.abs().max().item() * torch.finfo(fast[name].dtype).eps
        assert error <= 2 * allowed + tiny, f"{name}: off by {error:.2e}, the plain computation {allowed:.2e}"


def compare(case, name, dtype, **options):
    case = rounded(case, dtype)
    exact = case.run(name, "reference", torch.float64, device="cpu", **options)
    plain = case.run(name, "reference", dtype, **options)
    fast = case.run(name, "triton", dtype, **options)
    assert fast["output"].dtype == dtype
    assert_as_good_as(fast, plain, exact)
    return fast


@pytest.mark.parametrize("name", ["dispatch", "combine"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_float32_equals_the_reference(shape, name):
    compare(Case(*shape), name, torch.float32)


@pytest.mark.parametrize("name", ["dispatch", "combine"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("shape", list(SHAPES.values())[:2] + list(SHAPES.values())[9:])
def test_sixteen_bit_is_as_good_as_the_obvious_computation(shape, dtype, name):
    compare(Case(*shape), name, dtype)


@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_without_bias(name):
    compare(Case(21, 24, 4, 2, 20), name, torch.float32, bias=False)


@pytest.mark.parametrize("name", ["dispatch", "combine"])
@pytest.mark.parametrize(
    "reshape",
    [
        lambda upstream: upstream[:1].expand_as(upstream),
        lambda upstream: upstream.transpose(0, 1).contiguous().transpose(0, 1),
    ],
    ids=["expanded", "strided"],
)
def test_upstream_gradients_of_any_layout(reshape, name):
    compare(Case(21, 24, 4, 2, 20), name, torch.float32, reshape=reshape)


@pytest.mark.parametrize("kind", ["random", "first"])
@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_experts_with_many_rows_are_cut_into_chunks(name, kind, monkeypatch):
    from moa_fairseq.kernels import triton_launch

    monkeypatch.setattr(triton_launch, "_MIN_CHUNK", 16)
    monkeypatch.setattr(triton_launch, "_CHUNK_UNIT", 16)
    monkeypatch.setattr(triton_launch, "rows_per_chunk", lambda *sizes: 16)
    per_token = 1 if kind == "first" else 3
    first = compare(Case(41, 20, 5, per_token, 12, kind), name, torch.float32)
    again = Case(41, 20, 5, per_token, 12, kind).run(name, "triton", torch.float32)
    assert all(torch.equal(first[key], again[key]) for key in first), "not deterministic"


@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_the_model_dimension_is_done_in_steps_when_slots_are_many(name, monkeypatch):
    from moa_fairseq.kernels import triton_launch

    monkeypatch.setattr(triton_launch, "_FREE_ELEMENTS", 0)
    monkeypatch.setattr(triton_launch, "_COLUMN_TILE", 16)
    assert triton_launch.columns_at_once(40, 20, 44) == 32  # 32 + 12: the last step is narrower
    compare(Case(20, 44, 5, 2, 20), name, torch.float32)


def test_chunks_and_steps_stay_within_their_bounds():
    from moa_fairseq.kernels.triton_launch import columns_at_once, rows_per_chunk

    assert columns_at_once(8192 * 8, 128, 512) == 128  # the buffer is as large as the slots
    assert columns_at_once(8192 * 8, 100, 512) == 128
    assert columns_at_once(320, 128, 512) == 512
    assert columns_at_once(8192 * 16, 64, 36) == 36
    assert rows_per_chunk(8192 * 8, 64, 4, 132) == 2048  # twice an expert's share
    assert rows_per_chunk(8192 * 8, 9, 4, 132) == 1024  # 264 programs
    assert rows_per_chunk(0, 9, 4, 132) == 256


def test_padding_costs_nothing_but_zeros():
    case = Case(12, 16, 4, 2, 8)
    case.inputs["combine"]["gate"] = torch.zeros(12, 2)
    result = case.run("combine", "triton", torch.float32)
    for name in ("output", "grad of input", "grad of weight", "grad of bias"):
        assert (result[name] == 0).all(), name
    assert result["grad of gate"].abs().sum() > 0


def test_an_expert_without_rows_gets_a_zero_gradient():
    index = torch.zeros(5, 1, dtype=torch.long, device=DEVICE)
    weight = torch.randn(3, 4, 8, device=DEVICE, requires_grad=True)
    order = SlotOrder.from_index(index, 3)
    out = expert_bank.dispatch(torch.randn(5, 8, device=DEVICE), index, order, weight, None, "triton")
    out.sum().backward()
    assert weight.grad[0].abs().sum() > 0
    assert (weight.grad[1:] == 0).all()


def test_what_the_kernels_do_not_take_goes_elsewhere():
    x = torch.randn(3, 8, device=DEVICE)
    assert triton_bank.takes(x, x)
    assert not triton_bank.takes(x.double(), x.double())
    assert not triton_bank.takes(x.half(), x)
    index = torch.tensor([[0, 2], [1, 2], [0, 1]], device=DEVICE)
    weight = torch.randn(3, 4, 8, device=DEVICE, dtype=torch.float64)
    order = SlotOrder.from_index(index, 3)
    out = expert_bank.dispatch(x.double(), index, order, weight, None, "triton")
    torch.testing.assert_close(out, expert_bank.dispatch(x.double(), index, None, weight, None, "reference"))


def _both(x, weight, out_weight, gate, index, num_experts):
    """Both directions, as a layer uses them: x [N, C] → [N, C]."""
    order = SlotOrder.from_index(index, num_experts)
    slots = expert_bank.dispatch(x, index, order, weight, None, "triton")
    return expert_bank.combine(slots.tanh(), index, gate, order, out_weight, None, "triton")


def _arguments(tokens=9, model_dim=20, num_experts=4, per_token=2, dim=12, dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    sizes = (
        (tokens, model_dim),
        (num_experts, dim, model_dim),
        (num_experts, dim, model_dim),
        (tokens, per_token),
    )
    tensors = [torch.randn(size, generator=g).to(DEVICE, dtype).requires_grad_() for size in sizes]
    return [*tensors, choose(tokens, num_experts, per_token, "random", g).to(DEVICE), num_experts]


@pytest.mark.skipif(not HAS_OPERATORS, reason="torch < 2.4 has no custom operators")
def test_operators_keep_the_contract_of_torch():
    x, weight, _, gate, index, num_experts = _arguments()
    order = SlotOrder.from_index(index, num_experts)
    bias = torch.randn(num_experts, weight.size(1), device=DEVICE, requires_grad=True)
    out_bias = torch.randn(num_experts, weight.size(2), device=DEVICE, requires_grad=True)
    slots = torch.randn(*index.shape, weight.size(1), device=DEVICE, requires_grad=True)
    where = (order.order, order.offsets)
    torch.library.opcheck(triton_bank.expert_dispatch, (x, weight, bias, *where, 2))
    torch.library.opcheck(triton_bank.expert_dispatch, (x, weight, None, *where, 2))
    torch.library.opcheck(triton_bank.expert_combine, (slots, gate, weight, out_bias, *where))


@pytest.mark.skipif(not HAS_OPERATORS, reason="torch < 2.4 has no custom operators")
@pytest.mark.parametrize("dtype", [DTYPES[0], DTYPES[-1]], ids=str)
def test_compiles_into_one_graph_for_any_number_of_tokens(dtype):
    compiled = torch.compile(_both, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (9, 14):
        arguments = _arguments(tokens, dtype=dtype)
        leaves = [a for a in arguments if torch.is_tensor(a) and a.requires_grad]
        expected, got = _both(*arguments), compiled(*arguments)
        torch.testing.assert_close(got, expected)
        upstream = torch.randn_like(expected)
        for a, b in zip(
            torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(expected, leaves, upstream)
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
    assert out_weight.grad is not None and x.grad is None and weight.grad is None and gate.grad is None


@pytest.mark.skipif(not HAS_OPERATORS, reason="a torch Function refuses in its own words")
def test_a_second_derivative_is_refused_not_wrong():
    x, weight, *_, index, num_experts = _arguments()
    order = SlotOrder.from_index(index, num_experts)
    out = expert_bank.dispatch(x, index, order, weight, None, "triton")
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        grad.sum().backward()


def test_distributed_data_parallel_changes_nothing(tmp_path):
    torch.manual_seed(3)
    module = MixtureOfAttention(20, 5, 2, 12, self_attention=True, backend="triton").to(DEVICE)
    x = torch.randn(7, 3, 20, device=DEVICE)

    def gradients(wrapped):
        module.zero_grad()
        wrapped(x, x, x, need_weights=False)[0].square().sum().backward()
        return {name: p.grad.clone() for name, p in module.named_parameters()}

    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = gradients(torch.nn.parallel.DistributedDataParallel(module))
    finally:
        torch.distributed.destroy_process_group()
    for name, expected in gradients(module).items():
        torch.testing.assert_close(parallel[name], expected, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("bias", [False, True])
def test_whole_attention_equals_the_reference_backend(bias):
    torch.manual_seed(2)
    options = dict(embed_dim=20, num_experts=5, experts_per_token=2, expert_dim=12, bias=bias)
    modules = {
        backend: MixtureOfAttention(**options, self_attention=True, backend=backend).to(DEVICE)
        for backend in ("reference", "triton")
    }
    modules["triton"].load_state_dict(modules["reference"].state_dict())
    x = torch.randn(7, 3, 20, device=DEVICE)
    padding = torch.zeros(3, 7, dtype=torch.bool, device=DEVICE)
    padding[1, 4:] = True
    upstream = torch.randn(7, 3, 20, device=DEVICE)
    outcomes = {}
    for backend, module in modules.items():
        inputs = x.clone().requires_grad_()
        out, _ = module(inputs, inputs, inputs, key_padding_mask=padding, need_weights=False)
        out.backward(upstream)
        grads = {name: p.grad for name, p in module.named_parameters()}
        outcomes[backend] = {"out": out.detach(), "x": inputs.grad, **grads}
    for name, expected in outcomes["reference"].items():
        torch.testing.assert_close(outcomes["triton"][name], expected, atol=1e-5, rtol=1e-4, msg=name)
