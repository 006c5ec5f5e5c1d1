"""Print how many Python functions a step of a layer calls, kernels stubbed: {name: calls} as JSON.

TRITON_INTERPRET=1 loads Triton without a GPU; launches that do nothing are in place of all kernels.
"""

import json
import sys

import torch
from fairseq.modules import MultiheadAttention

from moa_fairseq.layers.experts.triton import kernels, routing, weight_grad
from moa_fairseq.layers.moa import MixtureOfAttention
from moa_fairseq.plugin.fairseq_call import with_fairseq_call

C = 32
T = 6
B = 4
TUNED = ("product_kernel", "gate_kernel", "outer_kernel")


class Config:
    kwargs = dict.fromkeys(
        ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_D", "BLOCK_C", "BLOCK_R"), 16
    )
    num_warps = 4
    num_stages = 3


class Kernel:
    best_config = Config

    def __init__(self, name):
        self.fn = self
        self.name = name
        if name in TUNED:
            self.configs = [Config]

    def __getitem__(self, grid):
        def launch(*args, **options):
            if callable(grid):
                grid({**Config.kwargs, **options})
            if self.name == "route_kernel" and args[6] is not None:
                args[6].copy_(
                    torch.arange(args[6].size(1))
                )  # the only numbers that are addresses

        return launch


def calls(attention):
    x = torch.randn(T, B, C, dtype=torch.bfloat16, requires_grad=True)
    module = attention.bfloat16()
    upstream = torch.randn_like(x)
    events = []

    def step():
        out = module(x, x, x, need_weights=False)[0]
        torch.autograd.grad(out, [x, *module.parameters()], upstream)

    with torch.autograd.set_multithreading_enabled(False):
        step()
        sys.setprofile(lambda frame, event, argument: events.append(event))
        step()
        sys.setprofile(None)
    return events.count("call")


for module in (kernels, routing, weight_grad):
    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        setattr(module, name, Kernel(name))
found = {"dense": calls(MultiheadAttention(C, 8, self_attention=True))}
for experts in (8, 32):
    sizes = dict(
        num_experts=experts, experts_per_token=8, expert_dim=16, expert_backend="triton"
    )
    found[f"8K{experts}E"] = calls(
        with_fairseq_call(MixtureOfAttention)(C, self_attention=True, **sizes)
    )
print(json.dumps(found))
