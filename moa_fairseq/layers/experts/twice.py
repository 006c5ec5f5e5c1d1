"""Gradients of our own autograd functions that can be differentiated again."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differentiable_gradients(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    """The gradients of function(*inputs), with a graph of their own: for a backward pass with create_graph.

    torch calls a backward pass with gradients enabled if and only if they are to be differentiated again.
    `torch.autograd.function.once_differentiable` would treat them as constants there, without a word, where
    the incoming gradient needs none.

    Args:
        function: made of torch's operations alone.
        inputs: its arguments.
        needs: which of them need a gradient.
        grad: the gradient of its result.

    Returns:
        A gradient for each input, None where none is needed.
    """
    inputs_with_grad = [x for x, need in zip(inputs, needs) if need and x is not None]
    gradients = iter(
        torch.autograd.grad(
            function(*inputs), inputs_with_grad, grad, create_graph=True, allow_unused=True
        )
    )
    return [next(gradients) if need and x is not None else None for x, need in zip(inputs, needs)]
