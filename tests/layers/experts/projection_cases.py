"""Uses, ugly shapes and an exact loop for the tests of `project`, whichever backend they are about."""

import functools
from dataclasses import dataclass

import torch

from moa_fairseq.layers.experts import ExpertPermutation, project
from moa_fairseq.layers.experts.validate import USES

# N, C, E (of each head), k, D, H, which experts the tokens choose
SHAPES = {
    "ordinary": (37, 16, 5, 2, 8, 1, "random"),
    "aligned for grouped_mm": (64, 32, 4, 2, 16, 2, "random"),
    "one token": (1, 16, 5, 2, 8, 2, "random"),
    "no token": (0, 16, 5, 2, 8, 2, "random"),
    "an expert nobody chose": (23, 16, 6, 2, 8, 1, "skip the last"),
    "all tokens on one expert": (23, 16, 6, 1, 8, 2, "first"),
    "K = 1": (11, 12, 3, 1, 4, 1, "random"),
    "K = E": (19, 16, 4, 4, 8, 1, "all"),
    "K = E in each of two heads": (9, 16, 3, 3, 8, 2, "all"),
    "E = 1": (7, 8, 1, 1, 4, 1, "all"),
    "E = 1 in each of three heads": (7, 8, 1, 1, 4, 3, "all"),
    "prime sizes, no multiple of a tile": (31, 13, 7, 3, 11, 1, "random"),
    "prime sizes, three heads": (17, 13, 5, 4, 11, 3, "random"),
    "fewer tokens than experts": (3, 8, 16, 2, 4, 1, "random"),
}


def choose(tokens, num_experts, k, heads, kind, generator):
    """Chosen experts [N, H·k], head by head; those of head h are numbered from h · num_experts."""
    if kind == "all":
        chosen = torch.arange(num_experts).expand(tokens, heads, -1)
    elif kind == "first":
        chosen = torch.zeros(tokens, heads, k, dtype=torch.long)
    else:
        usable = num_experts - 1 if kind == "skip the last" else num_experts
        chosen = torch.rand(tokens, heads, usable, generator=generator).topk(k, dim=-1).indices
    return (chosen + num_experts * torch.arange(heads).view(1, heads, 1)).reshape(
        tokens, heads * k
    )


@dataclass(frozen=True)
class Case:
    """Random inputs of one use and shape, in float64 on the CPU, rounded to what `dtype` represents."""

    shape: tuple
    use: str
    gated: bool
    bias: bool
    dtype: torch.dtype = torch.float32

    @property
    def is_up(self):
        return USES[self.use].is_up

    @property
    def fan(self):
        return USES[self.use].fan(self.shape[3])

    @property
    def slots(self):
        """(slots of a row, slots of a sum)"""
        *_, k, _, heads, _ = self.shape
        return (heads * k, self.fan) if self.is_up else (self.fan, heads * k)

    @functools.cached_property
    def inputs(self):
        tokens, model_dim, experts, k, dim, heads, kind = self.shape
        g = torch.Generator().manual_seed(tokens + 31 * experts)
        index = choose(tokens, experts, k, heads, kind, g)
        per_row, per_sum = self.slots
        width, out_width = (model_dim, dim) if self.is_up else (dim, model_dim)
        gate = torch.rand(tokens, heads * k, generator=g)
        gate[: tokens // 3] = 0.0  # padding
        found = {
            "rows": torch.randn(index.numel() // per_row, width, generator=g),
            "weight": torch.randn(heads * experts, dim, model_dim, generator=g) / dim**0.5,
            **({"gate": gate} if self.gated else {}),
            **(
                {"bias": torch.randn(heads * experts, out_width, generator=g)}
                if self.bias
                else {}
            ),
        }
        found["upstream"] = torch.randn(index.numel() // per_sum, out_width, generator=g)
        found = {name: tensor.to(self.dtype).double() for name, tensor in found.items()}
        return index, found, found.pop("upstream")

    def run(self, function, dtype, device="cpu", reshape=lambda upstream: upstream):
        """{"output": …, "rows": its gradient, "weight": …} of function(index, leaves), computed in dtype."""
        index, inputs, upstream = self.inputs
        leaves = {
            name: t.detach().to(device, dtype).requires_grad_() for name, t in inputs.items()
        }
        output = function(index.to(device), leaves)
        if not output.requires_grad:  # the exact loop without slots
            return {
                "output": output,
                **{name: torch.zeros_like(leaf) for name, leaf in leaves.items()},
            }
        grads = torch.autograd.grad(
            output, leaves.values(), reshape(upstream.to(device, dtype))
        )
        return {"output": output.detach(), **dict(zip(leaves, grads))}

    @functools.cached_property
    def exact(self):
        """Slot by slot in float64: a loop nobody can doubt."""
        return self.run(self._loop, torch.float64)

    def _loop(self, index, leaves):
        per_row, per_sum = self.slots
        rows, weight, gate, bias = (
            leaves.get(name) for name in ("rows", "weight", "gate", "bias")
        )
        sums = [[] for _ in range(index.numel() // per_sum)]
        for slot, expert in enumerate(index.flatten().tolist()):
            matrix = weight[expert] if self.is_up else weight[expert].t()
            value = matrix @ rows[slot // per_row]
            value = value if bias is None else value + bias[expert]
            sums[slot // per_sum].append(
                value if gate is None else gate.flatten()[slot] * value
            )
        if not sums:
            return rows.new_zeros(0, weight.size(1 if self.is_up else 2))
        return torch.stack([sum(slots) for slots in sums])

    def projected(self, backend, in_order=False):
        """What `run` computes by `project`."""

        def function(index, leaves):
            order = ExpertPermutation(index, leaves["weight"].size(0), in_order)
            rows, weight, gates, bias = (
                leaves.get(name) for name in ("rows", "weight", "gate", "bias")
            )
            options = dict(is_up=self.is_up, fan=self.fan, backend=backend)
            return project(rows, weight, order, gates=gates, bias=bias, **options)

        return function


@functools.cache
def case(*arguments):
    return Case(*arguments)


def variants(shape, use, dtype=torch.float32):
    """With the use's own gate and biases; without biases; and with a gate where it has none, or without."""
    gated = USES[use].gated
    return [
        case(shape, use, *rest, dtype)
        for rest in ((gated, True), (gated, False), (not gated, True))
    ]
