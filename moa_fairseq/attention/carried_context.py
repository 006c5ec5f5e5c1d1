"""Carried context: the inputs of earlier chunks of a text, which self-attention uses as further keys."""

import contextlib
from contextvars import ContextVar
from typing import Iterator, Optional

from torch import Tensor

_inputs: ContextVar[Optional[Tensor]] = ContextVar("carried_inputs", default=None)


@contextlib.contextmanager
def carried_context(inputs: Optional[Tensor]) -> Iterator[None]:
    """Every self-attention inside the block puts keys and values of inputs [M, B, C] before its own.

    They are projected anew, so that the projections learn from them (Dai et al., arXiv 1901.02860, §3.2).
    None: no context.
    """
    token = _inputs.set(inputs)
    try:
        yield
    finally:
        _inputs.reset(token)


def carried_inputs() -> Optional[Tensor]:
    """What the innermost `carried_context` block gives, [M, B, C], or None."""
    return _inputs.get()
