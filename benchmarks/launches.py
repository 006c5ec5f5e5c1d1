"""Kernel launches and bytes moved of one attention layer on a GPU, counted on the CPU.

    python benchmarks/launches.py                  count this code
    python benchmarks/launches.py --before NAME    keep the counts as those of commit NAME, to compare with

A small batch's time on a GPU is the number of its launches, and that can be counted without one: the real
modules run on the CPU in bfloat16 under a dispatch mode that sees every operation of torch, forward and
backward. Operations that only look at memory in another way or reserve it are left out; one that torch
makes of several kernels counts as often as `KERNELS_OF` says; custom operators are what launches Triton's
kernels, and do not count themselves. The kernels of Triton are replaced by a stand-in that counts a launch
and computes nothing, so what the Triton rows hold is garbage, and no shape depends on it. Bytes: each
tensor that an operation reads or writes once, whatever it does with it.

Sizes that depend on the GPU are those of an H200 (132 processors, 60 MB of second-level cache).
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton without a GPU; read when it loads

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _bench import RESULTS
from attention import SIZES, DenseAttention, dense_twin, mixture_macs
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from moa_fairseq.experiments.recipes.hardware import detect_hardware
from moa_fairseq.experiments.records.provenance import provenance
from moa_fairseq.files import atomic_write
from moa_fairseq.files.utf8 import use_utf8
from moa_fairseq.layers.experts import projection
from moa_fairseq.layers.moa import MixtureOfAttention
from moa_fairseq.plugin.fairseq_call import with_fairseq_call

try:
    from moa_fairseq.layers.experts.triton import kernels, launch, weight_grad
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    command = "pip install --no-deps --require-hashes -r scripts/requirements-triton.txt"
    raise SystemExit(f"launches.py: error: Triton is not installed. Run: {command}") from error
try:
    from moa_fairseq.layers.experts.triton import routing
except ImportError:  # an older commit
    routing = None

STOOD_FOR = [module for module in (kernels, weight_grad, routing) if module]
C = 512
# 8,192 tokens
LENGTH = 32
BATCH = 256
PROCESSORS = 132
CACHE = 60 * 2**20
# Radix sort: indices, histogram, scan, a copy, and a pass for each byte of the keys. Some copy, then change.
KERNELS_OF: dict[str, Callable[[Tensor], int]] = {
    "aten.topk": lambda x: 3,
    "aten.sort": lambda x: 4 + x.element_size(),
    "aten.masked_fill": lambda x: 2,
    "aten.scatter": lambda x: 2,
    "aten.scatter_add": lambda x: 2,
}
_RESERVES = (
    "aten.empty",
    "aten.new_empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty_strided",
)
_RESERVES += ("aten.scalar_tensor",)  # a number, on the host
NAMES = (
    "fairseq dense",
    "dense of 8K8E128D",
    "8K8E128D",
    "8K8E128D, padding",
    "8K32E128D",
    "8K32E256D",
)
NAMES += ("16K32E256D", "8K32E128D, biases and padding", "8K32E128D grouped", "8K32E256D grouped")
NAMES += ("16K32E256D grouped",)


class LaunchCounter(TorchDispatchMode):
    """launches: how often each kernel runs; bytes: what they read and write; waits: reads on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter = Counter()
        self.bytes = self.waits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        before = {t.untyped_storage().data_ptr() for t in inputs}
        result = function(*args, **(kwargs or {}))
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        name = str(function.overloadpacket)
        if name == "aten._local_scalar_dense":
            self.waits += 1
        writes = function._schema.is_mutable or any(
            t.untyped_storage().data_ptr() not in before for t in outputs
        )
        if writes and name not in _RESERVES and not name.startswith("moa_fairseq."):
            self.count(
                name, [*inputs, *outputs], KERNELS_OF.get(name, lambda x: 1)(*inputs[:1] or [None])
            )
        return result

    def count(self, name: str, tensors: list[Tensor], launches: int = 1) -> None:
        self.launches[name] += launches
        self.bytes += sum({_place(t): _size(t) for t in tensors}.values())


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tuple(tensor.shape)


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor, what is expanded counted once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


_counters: list[LaunchCounter] = []


class Proxy:
    """In a Triton kernel's place: counts each launch, computes nothing."""

    def __init__(self, name: str):
        self.name = name

    def __getitem__(self, grid: Any) -> Callable:
        def run(*args: Any, **kwargs: Any) -> None:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            for counter in _counters:
                counter.count(self.name, tensors)
            with _disable_current_modes():
                for tensor in tensors:
                    if self.name == "route_kernel" and tensor.dtype == torch.int64:
                        # Chosen experts: the only valid numbers
                        tensor.copy_(torch.arange(tensor.size(1)))

        return run


def stand_in() -> None:
    """Replace every Triton kernel, and what is asked about the GPU."""
    for module in STOOD_FOR:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Proxy(name))
    # what a Hopper GPU takes
    by_sorting = projection._GROUPED_MM._replace(
        unsupported_reason=projection._EVERY_EXPERT.unsupported_reason
    )
    projection._WAYS = {**projection._WAYS, "grouped": (by_sorting,)}
    launch._processors = lambda tensor: PROCESSORS
    launch._cache_bytes = lambda tensor: CACHE


def build(name: str) -> nn.Module:
    if name == "fairseq dense":
        return MultiheadAttention(C, 8, self_attention=True)
    size = name.removeprefix("dense of ").split(",")[0].split()[0]
    per_token, experts, dim = SIZES[size]
    if name.startswith("dense"):
        macs = mixture_macs(LENGTH * BATCH, LENGTH, per_token, experts, dim)
        return dense_twin(LENGTH * BATCH, LENGTH, macs)[0]
    backend = "grouped" if name.endswith("grouped") else "triton"
    options = dict(expert_bias="biases" in name, self_attention=True, expert_backend=backend)
    sizes = dict(num_experts=experts, experts_per_token=per_token, expert_dim=dim)
    return with_fairseq_call(MixtureOfAttention)(C, **sizes, **options)


def measure(name: str) -> dict[str, Any]:
    """Launches and megabytes of one layer's forward and backward pass."""
    torch.manual_seed(0)
    module = build(name).bfloat16()
    x = torch.randn(LENGTH, BATCH, C, dtype=torch.bfloat16, requires_grad=True)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[::2, -8:] = True
    options = {"key_padding_mask": padding} if "padding" in name else {}
    found: dict[str, Any] = {}
    out: Tensor | None = None
    upstream = torch.randn_like(x)
    for part in ("forward", "backward"):
        with LaunchCounter() as counter:
            _counters.append(counter)
            if part == "backward":
                torch.autograd.grad(out, [x, *module.parameters()], upstream)
            else:
                out = module(x) if isinstance(module, DenseAttention) else None
                if out is None:
                    out = module(x, x, x, need_weights=False, **options)[0]
            _counters.clear()
        total = sum(counter.launches.values())
        found[part] = {
            "launches": total,
            "megabytes": round(counter.bytes / 1e6),
            "waits": counter.waits,
        }
        found[part]["kernels"] = dict(counter.launches.most_common())
    return found


def main() -> None:
    use_utf8()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--before", metavar="COMMIT", help="keep these counts as those of an older commit"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of launches.json")
    parser.add_argument("--kernels", action="store_true", help="print which kernels, too")
    parser.add_argument(
        "--only", choices=NAMES, nargs="+", help="count these layers and write nothing"
    )
    args = parser.parse_args()
    made_by = provenance()
    stand_in()
    rows = {}
    for name in args.only or NAMES:
        rows[name] = found = measure(name)
        parts = "   ".join(
            f"{p} {found[p]['launches']:3d}, {found[p]['megabytes']:5d} MB" for p in found
        )
        print(f"{name:32s} {parts}", flush=True)
        if args.kernels:
            print(*(f"    {part}: {found[part]['kernels']}" for part in found), sep="\n")
    if args.only:
        return
    path = args.output / "launches.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    payload = {
        "benchmark": "launches",
        "command": "python benchmarks/launches.py",
        **made_by,
        "hardware": f"counted on {detect_hardware().describe()} for {PROCESSORS} processors",
        "dtype": "bfloat16",
        "width": C,
        "T": LENGTH,
        "B": BATCH,
        "kernels_of": {"aten.topk": "3", "aten.sort": "4 and one for each byte of a key"},
        "before": {"commit": args.before, "rows": rows} if args.before else kept.get("before"),
        "rows": rows,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        json.dump(payload, stream, indent=1)
        stream.write("\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
