"""What travels beside a forward pass: decisions, padding and ids of queries, carried inputs, a beam's size.

fairseq's attention returns two results and takes no query padding; rather than widen that interface
and copy every layer above it, decisions travel beside the pass. Nothing stays on a module.
"""

import contextlib
import threading
from typing import Generic, Iterator, List, Optional, Tuple, TypeVar

import torch
from torch import Tensor

from moa_fairseq.attention.routing import RoutingDecision

NamedDecisions = List[Tuple[str, RoutingDecision]]
Value = TypeVar("Value")


class Declared(threading.local, Generic[Value]):
    """A value for every attention of this thread inside a `with declared(value):` block; `get` reads it.

    Blocks may be nested: the innermost one counts. A plain attribute, which torch.compile reads without a
    break in the graph.
    """

    def __init__(self, default: Value):
        self.value = default

    def get(self) -> Value:
        """The value of the innermost block."""
        return self.value

    @contextlib.contextmanager
    def __call__(self, value: Value) -> Iterator[None]:
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


_collectors: Declared[Tuple[NamedDecisions, ...]] = Declared(())
# The padding [B, T] of the queries, True = padding.
query_padding: Declared[Optional[Tensor]] = Declared(None)
# The token ids [B, T] of the queries. A step of generation has the queries of the last ids alone.
tokens_of_queries: Declared[Optional[Tensor]] = Declared(None)
# How many times in a row an encoder's output repeats each sentence.
hypotheses: Declared[int] = Declared(1)
# Inputs [M, B, C] of earlier chunks of a text, whose keys and values every self-attention puts before its
# own. They are projected anew, so that the projections learn from them (Dai et al., arXiv 1901.02860, section
# 3.2).
carried_context: Declared[Optional[Tensor]] = Declared(None)


@contextlib.contextmanager
def collect_decisions() -> Iterator[NamedDecisions]:
    """Collect (module name, RoutingDecision) of every router that runs inside the block, in order.

    Blocks may be nested: each one collects every decision made inside it. Activation checkpointing runs a
    layer again in the backward pass, outside the block, so each layer is counted once.
    """
    decisions: NamedDecisions = []
    before = _collectors.value
    _collectors.value = (*before, decisions)  # written out: torch.compile cannot enter `_collectors(…)`
    try:
        yield decisions
    finally:
        _collectors.value = before


def record(name: str, decision: RoutingDecision) -> None:
    """Hand a decision to every open collector. A module's decision about keys is named `<name>.keys`."""
    if decision.side != "queries":
        name = f"{name}.{decision.side}"
    for decisions in _collectors.get():
        decisions.append((name, decision))


def padding_of_queries(
    given: Optional[Tensor], key_padding: Optional[Tensor], batch: int, tgt_len: int
) -> Optional[Tensor]:
    """The padding of an attention's queries, bool [B, T], or None.

    given: the caller's own mask. Without one, what the innermost `query_padding` block declares, else
    key_padding, which an attention passes when its keys are its queries. A declared mask of another shape is
    ignored; a given one raises ValueError.
    """
    if given is not None and given.shape != (batch, tgt_len):
        raise ValueError(
            f"query_padding_mask is {list(given.shape)}, the queries are [B, T] = {[batch, tgt_len]}"
        )
    candidates = (given, query_padding.get(), key_padding)
    mask = next((mask for mask in candidates if mask is not None), None)
    if mask is None or mask.shape != (batch, tgt_len):
        return None
    return mask.to(torch.bool)
