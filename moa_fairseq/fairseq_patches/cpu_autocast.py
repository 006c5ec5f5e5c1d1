"""--amp on the CPU: torch's autocast to bfloat16, where fairseq asks for a GPU's alone."""

import functools
import warnings
from typing import Any, Callable

import torch
from fairseq.optim import AMPOptimizer


def autocasting_on_the_cpu(train_step: Callable) -> Callable:
    """Wrap a task's forward and backward pass: the criterion runs under the CPU's autocast where it should.

    The backward pass stays outside, as torch asks; gradients arrive in float32, as parameters do.
    """

    @functools.wraps(train_step)
    def wrapped(
        task: Any, sample: Any, model: Any, criterion: Any, optimizer: Any, *args: Any, **options: Any
    ) -> Any:
        if not isinstance(optimizer, AMPOptimizer) or next(model.parameters()).device.type != "cpu":
            return train_step(task, sample, model, criterion, optimizer, *args, **options)

        def in_bfloat16(*inputs: Any, **named: Any) -> Any:
            with torch.autocast("cpu"):
                return criterion(*inputs, **named)

        with warnings.catch_warnings():  # that there is no CUDA to autocast for
            warnings.filterwarnings("ignore", message=".*CUDA is not available")
            return train_step(task, sample, model, in_bfloat16, optimizer, *args, **options)

    return wrapped
