"""Context for texts that are read in chunks: the inputs that a decoder's layers had in earlier chunks."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fairseq.distributed import utils as distributed
from torch import Tensor, nn

from moa_fairseq.plugin.forward_context import current_context, forward_context


class ChunkContext(NamedTuple):
    """The context that the next chunk of some texts will see.

    Args:
        chunk: the number of the last chunk that was read.
        inputs: the inputs of each layer in the last chunks, [M, B, C].
    """

    chunk: int
    inputs: list[Tensor]

    def header(self) -> "_Header":
        """What another process needs to know in order to receive the inputs."""
        return _Header(self.chunk, [tuple(x.shape) for x in self.inputs])


class _Header(NamedTuple):
    """The number of the last chunk, and the shape [M, B, C] of each layer's inputs."""

    chunk: int
    shapes: list[tuple[int, ...]]

    def without_batch(self) -> tuple[int, list[tuple[int, int]]]:
        """The chunk, and M and C of each layer, in which contexts that are joined agree."""
        return self.chunk, [(length, width) for length, _, width in self.shapes]


class _Reading(NamedTuple):
    """What one pass reads and keeps.

    Args:
        earlier: the inputs of each layer in earlier chunks; None if the pass begins without a context.
        kept: for each layer that has run in this pass, the inputs that the next pass will read.
    """

    earlier: list[Tensor] | None
    kept: list[Tensor]


class CarriedContext:
    """Passes to each layer the inputs that it had in the last `chunks` chunks, without their gradients.

    As in Transformer-XL (Dai et al., arXiv 1901.02860, §3.2): h̃ = [SG(h_τ) ∘ h_{τ+1}] makes keys and values.

    Training and evaluation have separate contexts, so a validation in the middle of an epoch disturbs
    nothing. So do the parts of the texts, which take turns, as the micro-batches of an update do, or are
    read by several threads; each part is read in order.

    A context is not part of the model's state. The task saves the contexts of the training (`of_training`)
    with a checkpoint, because they cannot be computed again: earlier updates had other weights and dropout.

    Args:
        layers: a decoder's layers, in order; their `forward` takes the argument `context`, [M, B, C] or None.
        chunks: how many earlier chunks each layer sees, 1 or more.
    """

    def __init__(self, layers: Sequence[nn.Module], chunks: int):
        self.chunks = chunks
        self._contexts: dict[tuple[bool, int], ChunkContext] = {}
        for index, layer in enumerate(layers):
            # A hook runs before the layer's checkpointed forward, whose second run must see the same context.
            layer.register_forward_pre_hook(functools.partial(self._enter, index), with_kwargs=True)

    @contextlib.contextmanager
    def reading(self, chunk: int, training: bool, batch: int, part: int = 0) -> Iterator[None]:
        """A context manager around the pass that reads one chunk of the texts of a part.

        If the chunk before it in the same texts was kept, the pass gets its context (the last chunk may lack
        texts at the end of the batch). Otherwise the pass begins without a context. Unless the pass fails,
        the inputs of its layers are kept.

        Args:
            chunk: the number of this chunk.
            training: True reads and keeps the context of training, False the context of evaluation.
            batch: the number of texts that are read, B, in the order of the chunk before.
            part: the number of the part, among the parts that take turns.
        """
        context = self._contexts.pop((training, part), None)
        earlier = None
        if (
            context is not None
            and chunk == context.chunk + 1
            and batch <= context.inputs[0].size(1)
        ):
            earlier = [inputs[:, :batch] for inputs in context.inputs]
        reading = _Reading(earlier, [])
        with forward_context(reading=reading):
            yield
        self._contexts[training, part] = ChunkContext(chunk, reading.kept)

    def of_training(self, part: int) -> ChunkContext | None:
        """The context that the next chunk of a part will see in training, if it continues the same texts."""
        return self._contexts.get((True, part))

    def restore(self, part: int, context: ChunkContext) -> None:
        """Set the context that the next chunk of a part will see in training.

        Args:
            part: the number of the part.
            context: the context of the part's texts, on the model's device.
        """
        self._contexts[True, part] = context

    def _enter(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
        """A hook that runs before a layer: give it its context, and keep its inputs for the next chunk."""
        reading = current_context().reading
        if reading is None or len(reading.kept) != index:  # kept by an earlier run of this layer
            return None
        x = args[0]
        context = None if reading.earlier is None else reading.earlier[index]
        seen = x.detach() if context is None else torch.cat([context, x.detach()])
        reading.kept.append(seen[-self.chunks * x.size(0) :])
        return args, kwargs | {"context": context}


def gather_contexts(contexts: Sequence[ChunkContext | None]) -> ChunkContext | None:
    """Join the contexts of all parts of the texts, on the CPU: inputs [M, ΣB, C], in the order of the parts.

    Every process must call it. A part whose texts have ended lacks the chunk of the first part, and is left
    out: only the last texts of an epoch end early.

    Args:
        contexts: the contexts of this process's parts, in order; None for a part without a context.

    Returns:
        The joined context in the first process, None in the others; None in all processes if the first part
        has no context.
    """
    group = distributed.get_data_parallel_group()
    world_size = distributed.get_world_size(group)
    rank = distributed.get_rank(group) if world_size > 1 else 0
    local_headers: Any = [None if context is None else context.header() for context in contexts]
    headers = [local_headers] * world_size
    if world_size > 1:
        dist.all_gather_object(headers, local_headers, group=group)
    first = headers[0][0]
    if first is None:
        return None

    def joins(header: Any) -> bool:
        """Whether a part's context can be joined to the context of the first part."""
        return header is not None and header.without_batch() == first.without_batch()

    # From here on one layer at a time, so that no GPU must hold the inputs of all layers.
    layers = range(len(first.shapes))
    local = [x for x in contexts if x is not None and joins(x.header())]
    if rank > 0:
        for layer in layers:
            for context in local:
                dist.send(context.inputs[layer].contiguous(), 0, group=group)
        return None
    inputs = []
    for layer in layers:
        parts = [context.inputs[layer].cpu() for context in local]
        for sender in range(1, world_size):
            for header in filter(joins, headers[sender]):
                part = local[0].inputs[layer].new_empty(header.shapes[layer])
                dist.recv(part, sender, group=group)
                parts.append(part.cpu())
        inputs.append(torch.cat(parts, 1))
    return ChunkContext(first.chunk, inputs)
