"""Small tensors that settings determine: 0 … E − 1, the heads that an expert lacks, rotation speeds.

They are no buffers: a module that was made on the meta device and filled by `load_state_dict(assign=True)` or
`to_empty` would compute with what happened to lie in memory.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling


def constant(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep what `make(*sizes, device=…)` returns, for each sizes and device.

    A compiled graph makes it anew: it looks into no table. So does torch's inference mode, whose tensors
    cannot be used outside of it.

    Args:
        make: a function of hashable sizes and of the keyword `device`, and of nothing else.

    Returns:
        The same function with a table; nobody may write to the tensors that it returns.
    """
    table: dict[tuple[Hashable, ...], Tensor] = {}

    @functools.wraps(make)
    def lookup(*sizes: Any, device: torch.device) -> Tensor:
        if is_compiling():
            return make(*sizes, device=device)
        tensor = table.get((sizes, device))
        if tensor is None:
            tensor = make(*sizes, device=device)
            # A fake tensor would be of no use later
            if type(tensor) is Tensor and not tensor.is_inference():
                table[(sizes, device)] = tensor
        return tensor

    return lookup


@constant
def every_index(count: int, device: torch.device) -> Tensor:
    """0, 1, …, count − 1: [count] int64."""
    return torch.arange(count, device=device)
