"""Admin (arXiv 2004.08249): post-norm layers whose shortcuts x·ω are set by a pass over the first batch."""

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moa_fairseq.layers.transformer_layer import Shortcut
from moa_fairseq.plugin.forward_context import current_context, forward_context

logger = logging.getLogger(__name__)


def unprofiled(model: nn.Module) -> bool:
    """Whether the model has shortcuts, and all of them are as they were built."""
    shortcuts = [module for module in model.modules() if isinstance(module, Shortcut)]
    return bool(shortcuts) and all(shortcut.omega == 1 for shortcut in shortcuts)


def profile(
    model: nn.Module, run: Callable[[], Any], add: Callable[[Tensor], None] | None = None
) -> None:
    """Set the ω of every shortcut by a forward pass without gradients: before training, on its first batch.

    In each stack, encoder and decoder apart, ω_1 = 1 and

        ω_{i+1}² = Var[x_i·ω_i] + Var[f_i(x_i)],

    the variances over all numbers of all real tokens. As x_i is normalised (but for the first, an embedding),
    ω² adds up the variances of the branches before. It is what the authors' code computes
    (github.com/LiyuanLucasLiu/Transformer-Clinic): dropout is at work, and ω_i is in its place when f_{i+1}
    is measured. Their variances include padding.

    Args:
        model: with `Shortcut`s, in training mode.
        run: calls the model with the batch. Its random numbers are drawn again by what follows.
        add: adds up a tensor over workers in place; all of them must come here together.
    """
    stacks: dict[str, list[Shortcut]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Shortcut):
            stacks.setdefault(name.partition(".")[0], []).append(module)
    variance = dict.fromkeys(stacks, 1.0)

    def measure(stack: str, shortcut: Any, inputs: tuple[Tensor, Tensor]) -> None:
        padding = current_context().padding
        if padding is not None and padding.shape != (inputs[0].size(1), inputs[0].size(0)):
            padding = None
        rows = [values if padding is None else values[~padding.bool().t()] for values in inputs]
        both = torch.stack(rows).double().flatten(1)  # [2, numbers]
        moments = torch.stack((torch.ones_like(both), both, both.square())).sum(2)  # [3, 2]
        if add is not None:
            add(moments)
        number, total, square = moments
        branch, x = (square / number - (total / number).square()).tolist()
        shortcut.omega.fill_(math.sqrt(variance[stack]))
        variance[stack] = variance[stack] * x + branch

    device = next(model.parameters()).device
    with contextlib.ExitStack() as block:
        for stack, shortcuts in stacks.items():
            for shortcut in shortcuts:
                hook = shortcut.register_forward_pre_hook(functools.partial(measure, stack))
                block.callback(hook.remove)
        block.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        block.enter_context(torch.no_grad())
        # Those of the update itself are collected
        block.enter_context(forward_context(routings=()))
        try:
            run()
        except BaseException:
            # All or none: some would pass for profiled
            for shortcut in itertools.chain(*stacks.values()):
                shortcut.omega.fill_(1)
            raise
    for stack, shortcuts in stacks.items():
        omegas = ", ".join(f"{shortcut.omega.item():.3f}" for shortcut in shortcuts)
        logger.info("Admin: ω of the %s's residual sums, by the first batch: %s", stack, omegas)
