"""What an encoder or decoder knows about a pass, and fairseq's attention call has no argument for.

One object for a pass. `FairseqCall` reads it, and hands on what an attention takes as arguments.
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
    """The pass that this thread is in.

    Args:
        padding: of the queries, [B, T] bool, True = padding.
        token_ids: of the queries, [B, T] int64. A step of generation has the queries of the last ids alone.
        beam_size: how many times in a row an encoder's output repeats each sentence.
        carried: inputs [M, B, C] of earlier segments of a text, whose keys and values every self-attention
            puts before its own. They are projected anew, so that the projections learn from them (Dai et al.,
            arXiv 1901.02860, section 3.2).
        causal_mask: an attention mask that blocks the future and nothing else.
        right_padded: whether padding only follows real tokens.
        unpadded: whether a decoder's padding mask, which is made all the same, is known to be empty.
        makes_mask: whether fairseq's decoder shall make a padding mask without asking for padding.
        draw: of experts, in an F step (MAE Algorithm 2).
        chunk: of the carried context, what `CarriedContext` keeps of this pass.
        residual_sums: how many a layer has made.
        routings: where (module, routing) goes, each to every list; None: to the `collect_routings` around.
    """

    padding: Tensor | None = None
    token_ids: Tensor | None = None
    beam_size: int = 1
    carried: Tensor | None = None
    causal_mask: Tensor | None = None
    right_padded: bool = False
    unpadded: bool = False
    makes_mask: bool = False
    draw: ExpertDraw | None = None
    chunk: Any = None
    residual_sums: int = 0
    routings: tuple[Any, ...] | None = None

    def record(self, module: Any, routing: Routing) -> None:
        """Hand a routing of a module to all who collect them.

        Args:
            module: the attention or sigma-MoE that made it; it has a `name`.
            routing: what its router decided.
        """
        for collected in _COLLECTORS.around() if self.routings is None else self.routings:
            collected.append((module, routing))


class _Named(list[tuple[str, Routing]]):
    """Collected routings with the names of their modules. One about keys is named `<name>.keys`.

    A compiled layer, which is the same for many names, collects the modules themselves.
    """

    def append(self, found: tuple[Any, Routing]) -> None:
        module, routing = found
        side = "" if routing.side == "queries" else f".{routing.side}"
        super().append((f"{module.name}{side}", routing))


class _Innermost:
    def __init__(self) -> None:
        self.context = ForwardContext()


_THREAD = PerThread(_Innermost)
_COLLECTORS = Collectors("routings")


def current_context() -> ForwardContext:
    """The innermost block's."""
    context: ForwardContext = _THREAD.value.context
    return context


@contextlib.contextmanager
def _inside(context: ForwardContext) -> Iterator[ForwardContext]:
    thread = _THREAD.value
    before = thread.context
    thread.context = context
    try:
        yield context
    finally:
        thread.context = before


def forward_context(**changes: Any) -> contextlib.AbstractContextManager[ForwardContext]:
    """Inside the block the context is the one around it with these changes.

    Args:
        changes: fields of `ForwardContext`; the others stay as they are around the block.
    """
    return _inside(dataclasses.replace(current_context(), **changes))


def restored(context: ForwardContext) -> contextlib.AbstractContextManager[ForwardContext]:
    """Inside the block the context is this one, but nothing is collected: a pass that is made again.

    Activation checkpointing runs a layer a second time, in the backward pass and on a GPU in another thread.

    Args:
        context: that of the first run.
    """
    return _inside(dataclasses.replace(context, routings=()))


@contextlib.contextmanager
def collect_routings() -> Iterator[NamedRoutings]:
    """Collect (module name, Routing) of every router of a model that runs inside the block, in order.

    Blocks may be nested: each one collects every routing made inside it, in its thread or asyncio task
    (`Collectors`).
    """
    collected: NamedRoutings = _Named()
    with _COLLECTORS.block(collected):
        yield collected
