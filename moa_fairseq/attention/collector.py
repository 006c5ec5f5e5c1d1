"""What travels beside a forward pass: decisions, padding and ids of queries, carried inputs, a beam's size.

fairseq's attention returns two results and takes no query padding; rather than widen that interface
and copy every layer above it, decisions travel beside the pass. Nothing stays on a module.
"""

import contextlib
from contextvars import ContextVar
from typing import ContextManager, Iterator, List, Optional, Tuple, TypeVar

import torch
from torch import Tensor

from moa_fairseq.attention.routing import RoutingDecision

NamedDecisions = List[Tuple[str, RoutingDecision]]

_collectors: ContextVar[Tuple[NamedDecisions, ...]] = ContextVar("collectors", default=())
_query_padding: ContextVar[Optional[Tensor]] = ContextVar("query_padding", default=None)
_query_tokens: ContextVar[Optional[Tensor]] = ContextVar("query_tokens", default=None)
_carried: ContextVar[Optional[Tensor]] = ContextVar("carried_inputs", default=None)
_hypotheses: ContextVar[int] = ContextVar("hypotheses", default=1)
Value = TypeVar("Value")


@contextlib.contextmanager
def _declaring(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def collect_decisions() -> Iterator[NamedDecisions]:
    """Collect (module name, RoutingDecision) of every router that runs inside the block, in order.

    Blocks may be nested: each one collects every decision made inside it. Activation checkpointing runs a
    layer again in the backward pass, outside the block, so each layer is counted once.
    """
    decisions: NamedDecisions = []
    with _declaring(_collectors, (*_collectors.get(), decisions)):
        yield decisions


def record(name: str, decision: RoutingDecision) -> None:
    """Hand a decision to every open collector. A module's decision about keys is named `<name>.keys`."""
    if decision.side != "queries":
        name = f"{name}.{decision.side}"
    for decisions in _collectors.get():
        decisions.append((name, decision))


def query_padding(mask: Optional[Tensor]) -> ContextManager[None]:
    """Declare mask [B, T] (True = padding) for the queries of every attention inside the block."""
    return _declaring(_query_padding, mask)


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
    candidates = (given, _query_padding.get(), key_padding)
    mask = next((mask for mask in candidates if mask is not None), None)
    if mask is None or mask.shape != (batch, tgt_len):
        return None
    return mask.to(torch.bool)


def tokens_of_queries(ids: Optional[Tensor]) -> ContextManager[None]:
    """Declare the token ids [B, T] of the queries of every attention inside the block.

    A step of generation has the queries of the last ids alone.
    """
    return _declaring(_query_tokens, ids)


def query_tokens() -> Optional[Tensor]:
    """What the innermost `tokens_of_queries` block declares, [B, T], or None."""
    return _query_tokens.get()


def hypotheses(per_sentence: int) -> ContextManager[None]:
    """Declare that inside the block an encoder's output repeats each sentence per_sentence times in a row."""
    return _declaring(_hypotheses, per_sentence)


def hypotheses_per_sentence() -> int:
    """What the innermost `hypotheses` block declares, else 1."""
    return _hypotheses.get()


def carried_context(inputs: Optional[Tensor]) -> ContextManager[None]:
    """Every self-attention inside the block puts keys and values of inputs [M, B, C] before its own.

    They are the inputs of earlier chunks of a text, projected anew, so that the projections learn from them
    (Dai et al., arXiv 1901.02860, §3.2). None: no context.
    """
    return _declaring(_carried, inputs)


def carried_inputs() -> Optional[Tensor]:
    """What the innermost `carried_context` block gives, [M, B, C], or None."""
    return _carried.get()
