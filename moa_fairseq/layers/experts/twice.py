"""Double backward for our own autograd functions."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differentiable_gradients(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    """The gradients of function(*inputs), which can be differentiated again (create_graph=True).

    torch runs a backward pass with gradients enabled only if its results may be differentiated again. There
    `torch.autograd.function.once_differentiable` would silently treat them as constants if the incoming
    gradient requires no gradient.

    Args:
        function: a function of torch's operations alone.
        inputs: the arguments of the function.
        needs: which inputs need a gradient.
        grad: the gradient of the function's result.

    Returns:
        A gradient for each input; None for an input that needs none.
    """
    inputs_with_grad = [x for x, need in zip(inputs, needs) if need and x is not None]
    gradients = iter(
        torch.autograd.grad(
            function(*inputs), inputs_with_grad, grad, create_graph=True, allow_unused=True
        )
    )
    return [next(gradients) if need and x is not None else None for x, need in zip(inputs, needs)]
