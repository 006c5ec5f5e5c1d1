"""Small tensors that depend on settings alone, such as 0 … E − 1 and the angles of rotary positions.

They are not buffers, because `to_empty` or `load_state_dict(assign=True)` of a module on the meta device
would leave a buffer uninitialised.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling


def constant(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cache the tensors that `make(*sizes, device=…)` returns.

    A compiled graph reads no table of Python, so it makes the tensor again. A tensor made in torch's
    inference mode is not cached, because it cannot be used outside this mode.

    Args:
        make: a function of hashable sizes and the keyword `device` alone.

    Returns:
        The same function with a table. Its tensors must not be written to.
    """
    table: dict[tuple[Hashable, ...], Tensor] = {}

    @functools.wraps(make)
    def lookup(*sizes: Any, device: torch.device) -> Tensor:
        if is_compiling():
            return make(*sizes, device=device)
        tensor = table.get((sizes, device))
        if tensor is None:
            tensor = make(*sizes, device=device)
            # Subclasses, such as fake tensors, are useless in later calls
            if type(tensor) is Tensor and not tensor.is_inference():
                table[(sizes, device)] = tensor
        return tensor

    return lookup


@constant
def every_index(count: int, device: torch.device) -> Tensor:
    """0, 1, …, count − 1: [count] int64."""
    return torch.arange(count, device=device)
