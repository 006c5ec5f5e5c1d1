"""Compiles the Triton kernels for GPUs that need not be there, down to machine code.

    python tests/layers/experts/triton_compile.py 70 80 86 90         one configuration of each kernel
    python tests/layers/experts/triton_compile.py --all-configs 70    everything that could be timed there

Prints a JSON object per compiled kernel: shared memory in bytes beside the GPU's limit, registers, bytes
spilled, which matrix instructions it uses, and how often two hazards of Hopper's asynchronous ones stand in
its code (`hazards`). Exits with 1 if one is over the limit or has such a hazard. The interpreter must be off
(it replaces the compiler for the whole process). Compiles are kept in Triton's cache.
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

from moa_fairseq.layers.experts.triton import (
    kernels,
    launch_routing,
    routing,
    tuning,
    weight_grad,
)

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
    """{kernel: (runtime arguments, compile-time arguments)}; an absent bias is the constant None.

    The fans are those of MoA with 8 experts per token and of SwitchHead with 2 heads of 4.
    """
    dtype, tf32 = DTYPES[name]
    data = POINTERS[dtype]
    gates = {"gate": "*fp32"}
    maybe = {"bias": data} if bias else {}
    common = {"TF32": tf32, "EXPERTS_POW2": 32, "EXPERT_DIM": dim, "MODEL_DIM": model_dim}
    product = dict(rows=data, weight=data, out=data, first_column="i32", **ROUTING)
    into_experts = {**common, "INTO_EXPERTS": True, "OUTER": dim}
    into_model = {**common, "INTO_EXPERTS": False, "OUTER": model_dim}
    gate = dict(
        rows=data, weight=data, narrow=data, grad_gate="*fp32", gated=data, **gates, **ROUTING
    )
    chunks = dict(partial="*fp32", order="*i64", offsets="*i32", chunk="i32", num_experts="i32")
    outer = dict(left=data, right=data, out=data, rows_per_chunk="i32", **chunks)
    sum_rows = dict(rows=data, out="*fp32", **chunks)
    tile = dict(EXPERTS_POW2=32, BLOCK_C=128, BLOCK_R=32)
    return {
        "queries": (
            kernels.product_kernel,
            {**product, **maybe},
            {**into_experts, "PER_ROW": 8},
        ),
        "outputs": (
            kernels.product_kernel,
            {**product, **maybe, **gates},
            {**into_model, "PER_ROW": 1},
        ),
        "gradient of queries": (kernels.product_kernel, product, {**into_model, "PER_ROW": 1}),
        "source": (
            kernels.product_kernel,
            {**product, **gates},
            {**into_experts, "PER_ROW": 8},
        ),
        "destination": (
            kernels.product_kernel,
            {**product, **gates},
            {**into_model, "PER_ROW": 4},
        ),
        "gate of outputs": (
            kernels.gate_kernel,
            {**gate, "gated_product": data},
            {**common, "PER_WIDE": 8, "PER_NARROW": 1},
        ),
        "gate of source": (
            kernels.gate_kernel,
            {**gate, **maybe},
            {**common, "PER_WIDE": 8, "PER_NARROW": 4},
        ),
        "outer": (weight_grad.outer_kernel, outer, {**common, "PER_LEFT": 1, "PER_RIGHT": 8}),
        "sum_slots": (
            kernels.sum_slots_kernel,
            dict(slots=data, out=data, num_sums="i32", first_column="i32"),
            dict(PER_SUM=8, WIDTH=128, FULL_WIDTH=model_dim, BLOCK_T=8, BLOCK_C=128),
        ),
        "sum_rows": (
            weight_grad.sum_rows_kernel,
            sum_rows,
            {**tile, "PER_ROW": 1, "WIDTH": dim},
        ),
        "sum_rows of outputs": (
            weight_grad.sum_rows_kernel,
            {**sum_rows, **gates},
            {**tile, "PER_ROW": 8, "WIDTH": model_dim},
        ),
        "sum_chunks": (
            weight_grad.sum_chunks_kernel,
            dict(partial="*fp32", out=data, offsets="*i32", chunk="i32"),
            dict(SIZE=model_dim * dim, BLOCK=1024, EXPERTS_POW2=32),
        ),
        **routing_signatures(data, model_dim),
    }


def routing_signatures(data, model_dim):
    """As `signatures`: a router of 8 of 32 experts, and the sorting of its slots."""
    tokens = {"num_tokens": "i32"}
    counts = "*i32"
    floats = dict.fromkeys(("logits", "probs", "gate"), "*fp32")
    route = dict(x=data, weight=data, padding="*u8", **floats, index="*i64", **tokens)
    grads = dict.fromkeys(("grad_logits", "grad_probs", "grad_gate", "probs"), "*fp32")
    route_grad = dict(**grads, index="*i64", padding="*u8", out=data, **tokens)
    sizes = dict(EXPERTS=32, EXPERTS_POW2=32)
    block_m, block_k = launch_routing._ROUTE_TILE
    block = launch_routing._tokens_per_block(32)
    choice = dict(PER_TOKEN=8, NORMALIZES=True, **sizes)
    sort = dict(PER_TOKEN=8, BLOCK_T=block, **sizes)
    slots = dict(
        slots=data, gate="*fp32", product=data, gated=data, grad_gate="*fp32", num_slots="i32"
    )
    return {
        "route": (
            routing.route_kernel,
            route,
            {**choice, "MODEL_DIM": model_dim, "BLOCK_M": block_m, "BLOCK_K": block_k},
        ),
        "route_grad": (
            routing.route_grad_kernel,
            route_grad,
            {**choice, "DETACHED": False, "BLOCK_M": block},
        ),
        "route_count": (
            routing.count_kernel,
            dict(index="*i64", counts=counts, **tokens),
            sort,
        ),
        "route_scan": (
            routing.scan_kernel,
            dict(counts=counts, offsets=counts, num_blocks="i32"),
            {**sizes, "BLOCK_B": launch_routing._SCAN_BLOCKS},
        ),
        "route_place": (
            routing.place_kernel,
            dict(index="*i64", begins=counts, order="*i64", **tokens),
            sort,
        ),
        "gate_slots": (
            routing.gate_slots_kernel,
            slots,
            dict(WIDTH=128, BLOCK_S=32, BLOCK_C=128),
        ),
    }


def configs_for(kernel, arch, dtype, meta, every):
    """The configurations that the backend would time on this GPU, as the backend prunes them."""
    if not hasattr(kernel, "configs"):
        return [triton.Config({}, num_warps=4, num_stages=3)]
    sample = SimpleNamespace(device=arch, element_size=lambda: dtype.itemsize)
    found = []
    if kernel is weight_grad.outer_kernel:
        found = tuning.prune_outer(kernel.configs, {"left": sample}, **meta)
    else:
        for height in tuning.ROW_CLASSES:
            found += tuning.prune_rows(
                kernel.configs, {"rows": sample, "rows_per_expert": height}, **meta
            )
    found = list(dict.fromkeys(found))
    return found if every else found[-1:]  # the last: the largest tiles


def compile_one(kernel, runtime, meta, config, arch):
    """The compiled kernel; its pointers and sizes are multiples of 16, as torch's are."""
    function = kernel.fn if hasattr(kernel, "configs") else kernel
    constants = {**meta, **config.kwargs}
    signature = {name: runtime.get(name, "constexpr") for name in function.arg_names}
    absent = {
        name: None
        for name in function.arg_names
        if name not in runtime and name not in constants
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if runtime.get(name, "").startswith("*")
        or (name in ("first_column", "chunk") and name in runtime)
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
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (None, None)


# Triton's GPU code: another name for a buffer, a matrix instruction and its operands, a wait for it
VIEW = re.compile(r"\s*(%[\w#]+) = ttg\.memdesc_(?:trans|subslice|reinterpret)\S* (%[\w#]+)")
PRODUCT = re.compile(r"\s*(%\w+)(?::\d+)? = ttng\.warp_group_dot (%[\w#]+), (%[\w#]+),")
WAIT = re.compile(r"\s*%\w+(?::\d+)? = ttng\.warp_group_dot_wait (%\w+).*pendings = (\d+)")


def loops(code):
    """The lines of each loop, an inner one before the one around it."""
    stack = []
    for line in code.splitlines():
        if "scf.for" in line:
            stack.append([])
        if stack:
            stack[-1].append(line)
            if re.match(r"\s*scf\.yield", line) and _indent(line) == _indent(stack[-1][0]) + 2:
                yield stack.pop()


def _indent(line):
    return len(line) - len(line.lstrip())


def hazards(code):
    """(overwritten, from_registers): how often a pipelined loop of Triton's GPU code has either hazard.

    overwritten: the next tile is copied into the shared memory that a matrix instruction of the same
    iteration, not yet waited for, still reads. from_registers: such an instruction has its left operand in
    registers, which the next iteration may fill again before they were read.
    """
    overwritten = from_registers = 0
    for body in loops(code):
        alias = {}
        products = {}
        waits = {}
        for line in body:
            if found := VIEW.match(line):
                alias[found[1]] = alias.get(found[2], found[2])
            if found := PRODUCT.match(line):
                operands = {alias.get(found[2], found[2]), alias.get(found[3], found[3])}
                products[found[1]] = operands, "dot_op" in line, "isAsync = true" in line
            if found := WAIT.match(line):
                waits[found[1]] = int(found[2])
        flying = [p for name, p in products.items() if p[2] and waits.get(name, 1) > 0]
        from_registers += sum(registers for _, registers, _ in flying)
        read = set().union(*(operands for operands, *_ in flying))
        for line in body:
            if found := re.search(r"async_copy_global_to_local %[\w#]+, (%[\w#]+)", line):
                overwritten += alias.get(found[1], found[1]) in read
    return overwritten, from_registers


def is_product(kernel):
    """Whether it has a pipelined loop with a matrix product."""
    return hasattr(kernel, "configs") or kernel is routing.route_kernel


def report(label, kernel, runtime, meta, config, arch, name):
    compiled = compile_one(kernel, runtime, meta, config, arch)
    registers, stack = resources(compiled.asm["cubin"])
    limit = tuning.shared_limit(divmod(arch, 10))
    instruction = re.search(r"(wgmma\.mma_async|mma\.sync|fma\.rn\.f32)", compiled.asm["ptx"])
    return {
        "kernel": label,
        "is_product": is_product(kernel),
        "arch": arch,
        "dtype": name,
        "config": {**config.kwargs, "warps": config.num_warps, "stages": config.num_stages},
        "shared": compiled.metadata.shared,
        "limit": limit,
        "fits": compiled.metadata.shared <= limit,
        "registers": registers,
        "stack": stack,
        "instruction": instruction and instruction[1],
        "hazards": hazards(compiled.asm["ttgir"]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "arch", type=int, nargs="+", help="compute capability times ten: 70 80 86 90"
    )
    parser.add_argument("--all-configs", action="store_true")
    parser.add_argument(
        "--products-only", action="store_true", help="leave out kernels without a dot"
    )
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="only those")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    args = parser.parse_args()
    if tuning.INTERPRETED:
        sys.exit("TRITON_INTERPRET=1 replaces the compiler: unset it.")
    tuning._limit_of = lambda arch: tuning.shared_limit(divmod(arch, 10))
    bad = False
    for arch, name, size in itertools.product(args.arch, args.dtypes, args.sizes):
        if arch < 80 and name in ("bf16", "tf32"):
            continue
        for label, (kernel, runtime, meta) in signatures(name, *SIZES[size]).items():
            if args.products_only and not is_product(kernel):
                continue
            if args.kernels and label not in args.kernels:
                continue
            for config in configs_for(kernel, arch, DTYPES[name][0], meta, args.all_configs):
                line = {
                    "size": size,
                    **report(label, kernel, runtime, meta, config, arch, name),
                }
                bad |= not line["fits"] or any(line["hazards"])
                print(json.dumps(line, ensure_ascii=False), flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
