"""Facts about a forward pass for which fairseq's calls of layers and attentions have no argument.

A pass has one `ForwardContext`. `FairseqCall` reads it, and passes its values to an attention as arguments.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moa_fairseq.layers.expert_draw import ExpertDraw
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.threads import Collectors, PerThread

NamedRoutings = list[tuple[str, Routing]]


@dataclass
class ForwardContext:
    """The facts about the pass that this thread computes.

    Attributes:
        padding: the padding of the queries, [B, T] bool, True = padding.
        right_padded: whether padding only follows real tokens.
        unpadded: whether the padding mask that a decoder makes is known to be empty.
        makes_mask: whether fairseq's decoder is to make a padding mask without asking the device whether
            there is padding; the host then knows it (`unpadded`).
        token_ids: the ids of the queries, [B, T] int64. In a step of generation only the last ids have
            queries.
        causal_mask: an attention mask that blocks the future and nothing else.
        beam_size: how many times in a row an encoder's output repeats each sentence.
        carried: inputs [M, B, C] from earlier segments of a text. Every self-attention puts their keys and
            values before its own, and projects them in each pass, so that the projections learn from them
            (Dai et al., arXiv 1901.02860, section 3.2).
        reading: what `CarriedContext` keeps of this pass.
        draw: the draw of experts in an F step (MAE Algorithm 2).
        residual_sums: the number of residual sums that the present layer has computed.
        routings: lists that get every (module, routing) in place of the surrounding `collect_routings`: the
            code of a compiled layer serves modules of many names.
    """

    padding: Tensor | None = None
    right_padded: bool = False
    unpadded: bool = False
    makes_mask: bool = False
    token_ids: Tensor | None = None
    causal_mask: Tensor | None = None
    beam_size: int = 1
    carried: Tensor | None = None
    reading: Any = None
    draw: ExpertDraw | None = None
    residual_sums: int = 0
    routings: tuple[Any, ...] | None = None

    def record(self, module: Any, routing: Routing) -> None:
        """Append a routing to every list that collects routings.

        Args:
            module: the attention or sigma-MoE that made the routing; it has a `name`.
            routing: the decision of the module's router; that of keys is named `<name>.keys`.
        """
        if self.routings is not None:
            for unnamed in self.routings:
                unnamed.append((module, routing))
            return
        side = "" if routing.side == "queries" else f".{routing.side}"
        for collected in _COLLECTORS.around():
            collected.append((f"{module.name}{side}", routing))


class _Innermost:
    """Holds the context of the innermost block around a thread's code."""

    def __init__(self) -> None:
        self.context = ForwardContext()


_INNERMOST = PerThread(_Innermost)
_COLLECTORS = Collectors("routings")


def current_context() -> ForwardContext:
    """The context of the innermost block around the call, in this thread."""
    context: ForwardContext = _INNERMOST.value.context
    return context


@contextlib.contextmanager
def _inside(context: ForwardContext) -> Iterator[ForwardContext]:
    innermost = _INNERMOST.value
    before = innermost.context
    innermost.context = context
    try:
        yield context
    finally:
        innermost.context = before


def forward_context(**changes: Any) -> contextlib.AbstractContextManager[ForwardContext]:
    """Inside the block the context is the surrounding one with these changes.

    Args:
        changes: fields of `ForwardContext`; the others stay as they are around the block.
    """
    return _inside(dataclasses.replace(current_context(), **changes))


def restored(context: ForwardContext) -> contextlib.AbstractContextManager[ForwardContext]:
    """Inside the block the context is this one, and no routing is collected.

    Activation checkpointing runs a layer a second time, in the backward pass and on a GPU in another thread.

    Args:
        context: the context of the first run.
    """
    return _inside(dataclasses.replace(context, routings=()))


@contextlib.contextmanager
def collect_routings() -> Iterator[NamedRoutings]:
    """Collect (module name, Routing) of every router that runs inside the block, in order.

    Blocks may be nested: each one collects every routing made inside it, in its thread or asyncio task
    (`Collectors`).
    """
    collected: NamedRoutings = []
    with _COLLECTORS.block(collected):
        yield collected
