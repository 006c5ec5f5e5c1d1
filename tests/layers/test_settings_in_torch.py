"""Rotary settings, norms and windows under what else torch does with a module, in every family."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_common_settings import FAMILIES, SETTINGS, TAKEN, B, T, build
from torch import nn

from moa_fairseq.layers.torch_compat import without_fused_attention

NAMES = ("dynamic", "norm after rope", "norm of all heads", "all")
PAIRS = [pair for pair in TAKEN if pair[1] in NAMES]
every_pair = pytest.mark.parametrize(("family", "name"), PAIRS)


def inputs(module, *shape, dtype=torch.float64):
    return torch.randn(*(shape or (B, T)), module.embed_dim, dtype=dtype)


def relative_error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every_pair
def test_gradients_of_each_sequence_by_torch_func(family, name):
    module = build(family, name)
    x = inputs(module, B, 2, T)
    upstream = inputs(module, 2, T)
    weights = {key: weight for key, weight in module.named_parameters() if weight.requires_grad}

    def loss(weights, x):
        return (
            torch.func.functional_call(module, weights, (x,), {"causal": True}) * upstream
        ).sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(None, 0))(weights, x)
    of_weights = torch.func.grad(loss)(weights, x[0])
    leaf = x.clone().requires_grad_()
    total = sum((module(part, causal=True) * upstream).sum() for part in leaf)
    torch.testing.assert_close(found, torch.autograd.grad(total, leaf)[0])
    whole = (module(x[0], causal=True) * upstream).sum()
    expected = torch.autograd.grad(
        whole, list(weights.values()), allow_unused=True, materialize_grads=True
    )
    for key, gradient in zip(weights, expected):
        torch.testing.assert_close(of_weights[key], gradient)
    with without_fused_attention():
        _, tangent = torch.func.jvp(lambda x: module(x, causal=True), (x[0],), (x[1],))
    torch.testing.assert_close((tangent * upstream).sum(), (found[0] * x[1]).sum())


@pytest.mark.thorough(keep=("all-MoA]", "MoA-all]", "SwitchHead-norm after rope]"), one_in=2)
@every_pair
def test_exported_with_any_length(family, name):
    module = build(family, name)
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(
        module,
        (inputs(module),),
        {"causal": True},
        dynamic_shapes={"x": {1: length}, "causal": None},
    ).module()
    for tokens in (2, T, 30):
        x = inputs(module, B, tokens)
        torch.testing.assert_close(exported(x, causal=True), module(x, causal=True))


@torch.no_grad()
@every_pair
def test_made_on_the_meta_device(family, name):
    module = build(family, name)
    with torch.device("meta"):
        other = FAMILIES[family][0](self_attention=True, **SETTINGS[name]).eval()
        assert other(torch.empty(B, T, other.embed_dim), causal=True).shape == (
            B,
            T,
            other.embed_dim,
        )
    other.load_state_dict(module.state_dict(), assign=True)
    x = inputs(module)
    assert torch.equal(other(x, causal=True), module(x, causal=True))


@torch.no_grad()
@every_pair
def test_autocast_whole_and_step_by_step(family, name):
    """Angles, norms and routers stay wide; what the bfloat16 of a product loses is all that is lost."""
    module = build(family, name)
    narrow = copy.deepcopy(module).float()
    x = inputs(module)
    exact = module(x, causal=True)
    cache = narrow.new_cache()
    steps = []
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(narrow(x.float(), causal=True), exact) < 0.03
        for t in range(T):
            steps.append(narrow(x[:, t : t + 1].float(), cache=cache))
    assert name == "dynamic" or relative_error(torch.cat(steps, 1), exact) < 0.03


class Int8(nn.Module):
    """A linear map whose weights are stored in 8 bits, with a factor for each row, and have no `weight`."""

    def __init__(self, linear):
        super().__init__()
        self.in_features = linear.in_features
        factor = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("factor", factor)
        self.register_buffer("codes", (linear.weight.detach() / factor).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.codes * self.factor, self.bias)


@torch.no_grad()
@every_pair
def test_quantised_linear_maps(family, name):
    """What stands in the place of a projection, router or gate is called; nothing reads its weight."""
    module = build(family, name)
    quantised = copy.deepcopy(module)
    for path, part in list(module.named_modules()):
        if isinstance(part, nn.Linear):
            parent, _, own = path.rpartition(".")
            stand_in = Int8(part)
            setattr(quantised.get_submodule(parent), own, stand_in)
            part.weight.copy_(stand_in.codes * stand_in.factor)
    x = inputs(module)
    torch.testing.assert_close(quantised(x, causal=True), module(x, causal=True))
    cache = quantised.new_cache()
    steps = [quantised(x[:, t : t + 1], cache=cache) for t in range(T)]
    if name != "dynamic":
        torch.testing.assert_close(torch.cat(steps, 1), module(x, causal=True))


@every_pair
def test_eight_threads_have_the_results_of_one(family, name):
    """Steps with a cache each, and gradients, of one module."""
    module = build(family, name)
    texts = [inputs(module) for _ in range(8)]

    def run(x):
        with torch.no_grad():
            cache = module.new_cache()
            steps = torch.cat(
                [module(x[:, t : t + 2], causal=True, cache=cache) for t in range(0, T, 2)], 1
            )
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(leaf, causal=True).square().sum(), leaf)
        return steps, gradient

    expected = [run(x) for x in texts]
    with ThreadPoolExecutor(8) as threads:
        torch.testing.assert_close(list(threads.map(run, texts)), expected)


def gradients_by_two(rank, folder):
    """One of two processes: half of each batch, by DistributedDataParallel, against the whole batch."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    for family, name in PAIRS:
        module = build(family, name)
        whole = copy.deepcopy(module)
        wrapped = nn.parallel.DistributedDataParallel(module)
        torch.manual_seed(2)
        for _ in range(
            2
        ):  # the second pass fails where a parameter of the first had no gradient
            x = inputs(module, 2 * B, T)
            wrapped(x.chunk(2)[rank], causal=True).square().sum().mul(2).backward()
            whole(x, causal=True).square().sum().backward()
        for one, other in zip(module.parameters(), whole.parameters()):
            if other.grad is not None:
                torch.testing.assert_close(one.grad, other.grad)
    torch.distributed.destroy_process_group()


def test_two_processes_have_the_gradients_of_one(tmp_path):
    torch.multiprocessing.start_processes(
        gradients_by_two, args=(tmp_path,), nprocs=2, start_method="fork"
    )


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:must run observer")
@every_pair
def test_torchs_own_quantisation_of_projections(family, name):
    """quantize_dynamic, whose `weight` is a method, of all linear maps but routers."""
    module = build(family, name).float()
    linear = [path for path, part in module.named_modules() if isinstance(part, nn.Linear)]
    chosen = {path for path in linear if "router" not in path}
    quantised = torch.ao.quantization.quantize_dynamic(
        module, dict.fromkeys(chosen, torch.ao.quantization.default_dynamic_qconfig)
    )
    x = inputs(module, dtype=torch.float32)
    exact = module(x, causal=True).double()
    assert relative_error(quantised(x, causal=True), exact) < 0.1
