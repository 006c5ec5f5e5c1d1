"""How the matrices of a mixture start: each by the number of its inputs."""

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
    """What is built inside takes one number of the generator's, however many it draws.

    What is built after it then starts alike in models that differ in nothing but this part. (CPU only, as
    fairseq builds models.)
    """
    seed = int(torch.randint(2**62, (), device="cpu"))  # also where a model is built on "meta"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@torch.no_grad()
def init_fan_in_normal_(root: nn.Module, scale: float = 1.0) -> None:
    """Draw every linear map inside `root` from a normal of deviation scale / √fan-in; biases become zero.

    The initialisation of SwitchHead and sigma-MoE. The fan-in of experts is `ExpertLinear.fan_in`. The rows
    of a router are then made equally long, and gates of heads even.

    Args:
        root: the module, of whose parts nn.Linear and ExpertLinear are drawn.
        scale: 1, or √(2/n) in the papers' pre-norm models of n layers.
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
    """Multiply an output projection, bias included: the attention's residual branch then starts at that size.

    Args:
        attention: one of the attentions here.
        factor: what every weight and bias of its `out_proj` or `out_experts` is multiplied by.

    Raises:
        UserError: for an attention that has neither.
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
