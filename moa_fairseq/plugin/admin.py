"""Admin (arXiv 2004.08249): post-norm layers whose shortcuts x·ω are set by a pass over the first batch."""

import contextlib
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
    """Whether the model has shortcuts, and the ω of all of them is still 1."""
    shortcuts = [module for module in model.modules() if isinstance(module, Shortcut)]
    return bool(shortcuts) and all(shortcut.omega == 1 for shortcut in shortcuts)


class _Stack:
    """The shortcuts of an encoder or a decoder, in order, while they are profiled.

    Args:
        all_reduce: adds up a tensor over workers in place; None for one worker.
    """

    def __init__(self, all_reduce: Callable[[Tensor], None] | None):
        self.all_reduce = all_reduce
        self.shortcuts: list[Shortcut] = []
        self.omega_squared = 1.0  # of the next shortcut

    def measure(self, shortcut: Any, inputs: tuple[Tensor, Tensor]) -> None:
        """Set the shortcut's ω, and compute ω² of the next one: a hook that runs before the shortcut.

        Args:
            shortcut: the module whose ω is set.
            inputs: its arguments, the branch f(x) and x, each [T, B, C].
        """
        moments = _moments(inputs)
        if self.all_reduce is not None:
            self.all_reduce(moments)
        count, total, square = moments
        branch_variance, x_variance = (square / count - (total / count).square()).tolist()
        shortcut.omega.fill_(math.sqrt(self.omega_squared))
        self.omega_squared = self.omega_squared * x_variance + branch_variance


def _moments(inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Count, sum and sum of squares of the numbers of real tokens in two tensors [T, B, C]: [3, 2]."""
    padding = current_context().padding
    if padding is not None and padding.shape != (inputs[0].size(1), inputs[0].size(0)):
        padding = None
    real = [values if padding is None else values[~padding.bool().t()] for values in inputs]
    numbers = torch.stack(real).double().flatten(1)  # [2, numbers]
    return torch.stack((torch.ones_like(numbers), numbers, numbers.square())).sum(2)


def profile(
    model: nn.Module, run: Callable[[], Any], all_reduce: Callable[[Tensor], None] | None = None
) -> None:
    """Set the ω of every shortcut by a forward pass without gradients, on the first batch of a training.

    In each stack, encoder and decoder apart, ω_1 = 1 and

        ω_{i+1}² = Var[x_i·ω_i] + Var[f_i(x_i)],

    the variances over all numbers of all real tokens. As x_i is normalised (except x_1, an embedding), ω²
    adds up the variances of the branches before it. The authors' code
    (github.com/LiyuanLucasLiu/Transformer-Clinic) computes the same: dropout is on, and ω_i is set before
    f_{i+1} is measured. The authors' variances include padding.

    Args:
        model: a model with `Shortcut`s, in training mode.
        run: calls the model with the batch. The update that follows draws the same random numbers again.
        all_reduce: adds up a tensor over workers in place; all workers must call `profile` together.
    """
    stacks: dict[str, _Stack] = {}
    device = next(model.parameters()).device
    with contextlib.ExitStack() as contexts:
        for name, module in model.named_modules():
            if isinstance(module, Shortcut):
                stack = stacks.setdefault(name.partition(".")[0], _Stack(all_reduce))
                stack.shortcuts.append(module)
                contexts.callback(module.register_forward_pre_hook(stack.measure).remove)
        contexts.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        contexts.enter_context(torch.no_grad())
        # Only the routings of the update itself are collected.
        contexts.enter_context(forward_context(routings=()))
        try:
            run()
        except BaseException:
            # If only some were set, the model would pass for a profiled one.
            for stack in stacks.values():
                for shortcut in stack.shortcuts:
                    shortcut.omega.fill_(1)
            raise
    for name, stack in stacks.items():
        omegas = ", ".join(f"{shortcut.omega.item():.3f}" for shortcut in stack.shortcuts)
        logger.info("Admin: ω of the %s's residual sums, by the first batch: %s", name, omegas)
