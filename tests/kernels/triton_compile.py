"""Compiles the Triton kernels for GPUs that need not be there, down to machine code.

    python tests/kernels/triton_compile.py 70 80 86 90                one configuration of each kernel
    python tests/kernels/triton_compile.py --all-configs 70 80 86 90  everything that could be timed there

Prints a JSON object per compiled kernel: shared memory in bytes beside the GPU's limit, registers, bytes
spilled, and which matrix instructions it uses. Exits with 1 if one is over the limit. The interpreter must
be off (it replaces the compiler for the whole process). Compiles are kept in Triton's cache.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moa_fairseq.kernels import triton_kernels as kernels
from moa_fairseq.kernels import triton_tuning as tuning
from moa_fairseq.kernels import triton_weight_grad as weight_grad

# name → dtype, whether its products may use TF32
DTYPES = {
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
    "tf32": (torch.float32, True),
    "fp32": (torch.float32, False),
}
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
# C, D: a layer's; and no multiples of anything, with biases
SIZES = {"512 × 128": (512, 128, False), "36 × 20 with bias": (36, 20, True)}
ROUTING = {"order": "*i64", "offsets": "*i32", "num_experts": "i32", "rows_per_expert": "i32"}


def signatures(name, model_dim, dim, bias):
    """{kernel: (runtime arguments, compile-time arguments)}; an absent bias is the constant None."""
    dtype, tf32 = DTYPES[name]
    data = POINTERS[dtype]
    maybe = {"bias": data} if bias else {}
    common = {"TF32": tf32, "EXPERTS_POW2": 32}
    rows = {"INNER": model_dim, "OUTER": dim, "PER_TOKEN": 8, **common}
    columns = {"INNER": dim, "MODEL_DIM": model_dim, "OUTER": model_dim, **common}
    outer = {"PER_TOKEN": 8, "EXPERT_DIM": dim, "MODEL_DIM": model_dim, **common}
    expand = dict(rows=data, weight=data, **maybe, out=data, **ROUTING)
    gated = dict(slots=data, gate="*fp32", grad_slots=data, grad_gate="*fp32")
    project = dict(rows=data, weight=data, **maybe, out=data, first_column="i32", **ROUTING)
    left_right = dict(left=data, right=data, out=data, partial="*fp32", order="*i64", offsets="*i32")
    left_right.update(chunk="i32", num_experts="i32", rows_per_chunk="i32")
    sums = {"sums": "*fp32", "partial_sums": "*fp32"} if bias else {}
    return {
        "expand": (kernels.expand_kernel, expand, rows),
        "grad_slots": (kernels.grad_slots_kernel, {**expand, **gated}, rows),
        "project": (kernels.project_kernel, {**project, "gate": "*fp32"}, columns),
        "reduce": (kernels.project_kernel, project, columns),
        "outer of dispatch": (
            weight_grad.outer_kernel,
            {**left_right, **sums},
            {**outer, "SUM_RIGHT": False},
        ),
        "outer of combine": (
            weight_grad.outer_kernel,
            {**left_right, **sums, "gate": "*fp32"},
            {**outer, "SUM_RIGHT": True},
        ),
        "sum_slots": (
            kernels.sum_slots_kernel,
            dict(slots=data, out=data, num_tokens="i32", first_column="i32"),
            dict(PER_TOKEN=8, WIDTH=128, MODEL_DIM=model_dim, BLOCK_T=8, BLOCK_C=128),
        ),
        "sum_chunks": (
            weight_grad.sum_chunks_kernel,
            dict(partial="*fp32", out=data, offsets="*i32", chunk="i32"),
            dict(SIZE=model_dim * dim, BLOCK=1024),
        ),
    }


def configs_for(kernel, arch, dtype, meta, every):
    """The configurations that the backend would time on this GPU, as the backend prunes them."""
    if not hasattr(kernel, "configs"):
        return [triton.Config({}, num_warps=4)]
    sample = SimpleNamespace(device=arch, element_size=lambda: dtype.itemsize)
    found = []
    if kernel is weight_grad.outer_kernel:
        found = tuning.prune_outer(kernel.configs, {"left": sample}, **meta)
    else:
        for height in tuning.ROW_CLASSES:
            found += tuning.prune_rows(kernel.configs, {"rows": sample, "rows_per_expert": height}, **meta)
    found = list(dict.fromkeys(found))
    return found if every else found[-1:]  # the last: the largest tiles


def compile_one(kernel, runtime, meta, config, arch):
    """The compiled kernel; its pointers and sizes are multiples of 16, as torch's are."""
    function = kernel.fn if hasattr(kernel, "configs") else kernel
    constants = {**meta, **config.kwargs}
    signature = {name: runtime.get(name, "constexpr") for name in function.arg_names}
    absent = {name: None for name in function.arg_names if name not in runtime and name not in constants}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if runtime.get(name, "").startswith("*") or (name in ("first_column", "chunk") and name in runtime)
    }
    source = ASTSource(function, signature, {**constants, **absent}, aligned)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(cubin):
    """(registers, bytes of local memory) by cuobjdump, which the Triton wheel brings; None without it."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (None, None)


def report(label, kernel, runtime, meta, config, arch, name):
    compiled = compile_one(kernel, runtime, meta, config, arch)
    registers, stack = resources(compiled.asm["cubin"])
    limit = tuning.shared_limit(divmod(arch, 10))
    instruction = re.search(r"(wgmma\.mma_async|mma\.sync|fma\.rn\.f32)", compiled.asm["ptx"])
    return {
        "kernel": label,
        "arch": arch,
        "dtype": name,
        "config": {**config.kwargs, "warps": config.num_warps, "stages": config.num_stages},
        "shared": compiled.metadata.shared,
        "limit": limit,
        "fits": compiled.metadata.shared <= limit,
        "registers": registers,
        "stack": stack,
        "instruction": instruction and instruction[1],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arch", type=int, nargs="+", help="compute capability times ten: 70 80 86 90")
    parser.add_argument("--all-configs", action="store_true")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    args = parser.parse_args()
    if tuning.INTERPRETED:
        sys.exit("TRITON_INTERPRET=1 replaces the compiler: unset it.")
    tuning._limit_of = lambda arch: tuning.shared_limit(divmod(arch, 10))
    too_large = False
    for arch, name, size in itertools.product(args.arch, args.dtypes, args.sizes):
        if arch < 80 and name in ("bf16", "tf32"):
            continue
        for label, (kernel, runtime, meta) in signatures(name, *SIZES[size]).items():
            for config in configs_for(kernel, arch, DTYPES[name][0], meta, args.all_configs):
                line = {"size": size, **report(label, kernel, runtime, meta, config, arch, name)}
                too_large |= not line["fits"]
                print(json.dumps(line, ensure_ascii=False), flush=True)
    sys.exit(too_large)


if __name__ == "__main__":
    main()
