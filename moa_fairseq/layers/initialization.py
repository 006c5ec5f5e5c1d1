"""Initial values of the matrices of a mixture, each by the number of its inputs."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.expert_linear import ExpertLinear
from moa_fairseq.layers.head_gate import HeadGate
from moa_fairseq.layers.routers import TopKRouter
from moa_fairseq.layers.sigmoid_router import SigmoidTopKRouter, draw_rows_of_one_length


@contextlib.contextmanager
def forked_rng() -> Iterator[None]:
    """A block that takes one number from torch's generator, however many numbers are drawn inside.

    So models that differ only in what is built inside the block draw the same weights after it. (Only the
    generator of the CPU, on which fairseq builds models.)
    """
    seed = int(torch.randint(2**62, (), device="cpu"))  # even if the default device is "meta"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@torch.no_grad()
def init_fan_in_normal_(root: nn.Module, scale: float = 1.0) -> None:
    """Draw every linear map inside `root` from a normal with deviation scale / √fan-in; biases become zero.

    This is the initialisation of SwitchHead and sigma-MoE. The fan-in of experts is `ExpertLinear.fan_in`.
    The rows of a router then get equal lengths, and the gates of heads become 1/2.

    Args:
        root: the module whose nn.Linear and ExpertLinear parts are drawn.
        scale: 1, or √(2/n) in the pre-norm models with n layers of the papers.
    """
    for module in root.modules():
        if isinstance(module, (nn.Linear, ExpertLinear)):
            if isinstance(module, ExpertLinear):
                fan_in = module.fan_in
            else:
                fan_in = module.in_features
            module.weight.normal_(std=scale / math.sqrt(fan_in))
            if module.bias is not None:
                module.bias.zero_()
    for module in root.modules():
        if isinstance(module, (TopKRouter, SigmoidTopKRouter)):
            draw_rows_of_one_length(module.projection.weight, scale)
        if isinstance(module, TopKRouter) and module.noise_projection is not None:
            module.noise_projection.weight.zero_()
        if isinstance(module, HeadGate):
            module.reset_parameters()


@torch.no_grad()
def scale_branch(attention: nn.Module, factor: float) -> None:
    """Scale the initial output of an attention, and so of its residual branch.

    Args:
        attention: an attention of this package.
        factor: the factor of every weight and bias in its `out_proj` or `out_experts`.

    Raises:
        UserError: for an attention that has neither of the two.
    """
    for name in ("out_proj", "out_experts"):
        if hasattr(attention, name):
            for parameter in getattr(attention, name).parameters():
                parameter.mul_(factor)
            return
    raise UserError(
        f"--attention-branch-scale: {type(attention).__name__} has no output projection named out_proj or "
        "out_experts: leave the flag out."
    )
