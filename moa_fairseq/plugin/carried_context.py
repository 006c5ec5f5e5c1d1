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

    def sizes(self) -> tuple[int, list[tuple[int, ...]]]:
        """The chunk and the shapes of the inputs, which other processes need to receive them."""
        return self.chunk, [tuple(x.shape) for x in self.inputs]


class _Reading(NamedTuple):
    """One pass.

    Args:
        before: the inputs of each layer in earlier chunks; None if the pass begins without a context.
        now: the inputs of the layers that have run in this pass, with those of earlier chunks before them.
    """

    before: list[Tensor] | None
    now: list[Tensor]


class CarriedContext:
    """Passes to each layer the inputs that it had in the last `chunks` chunks, without their gradients.

    As in Transformer-XL (Dai et al., arXiv 1901.02860, §3.2): h̃ = [SG(h_τ) ∘ h_{τ+1}] makes keys and values.
    Training and evaluation have separate contexts, so a validation in the middle of an epoch disturbs
    nothing. Parts of the texts that take turns, as the micro-batches of an update do, have separate contexts
    too, and so may texts that several threads read: each part is read in order. A context is not part of the
    model's state. The task saves the contexts of the training (`of_training`) with a checkpoint, because they
    cannot be computed again: earlier updates had other weights and other dropout.

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
        before = None
        if (
            context is not None
            and chunk == context.chunk + 1
            and batch <= context.inputs[0].size(1)
        ):
            before = [inputs[:, :batch] for inputs in context.inputs]
        reading = _Reading(before, [])
        with forward_context(chunk=reading):
            yield
        self._contexts[training, part] = ChunkContext(chunk, reading.now)

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
        reading = current_context().chunk
        if reading is None or len(reading.now) != index:
            return None
        x = args[0]
        before = None if reading.before is None else reading.before[index]
        read = x.detach() if before is None else torch.cat([before, x.detach()])
        reading.now.append(read[-self.chunks * x.size(0) :])
        return args, kwargs | {"context": before}


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
    local_sizes: Any = [None if context is None else context.sizes() for context in contexts]
    rank = 0
    sizes = [local_sizes]
    if distributed.get_world_size(group) > 1:
        rank = distributed.get_rank(group)
        sizes = sizes * distributed.get_world_size(group)
        dist.all_gather_object(sizes, local_sizes, group=group)
    first = sizes[0][0]
    if first is None:
        return None

    def fits(size: Any) -> bool:
        """Whether a part has the same chunk, and layers of the same M and C, as the first one."""
        return size is not None and size[0] == first[0] and [s[::2] for s in size[1]] == shapes

    shapes = [shape[::2] for shape in first[1]]
    inputs = []
    for layer in range(len(shapes)):  # so that no GPU must hold the inputs of all layers
        parts = []
        for context in contexts:
            if context is not None and fits(context.sizes()):
                parts.append(context.inputs[layer])
        if rank:
            for part in parts:
                dist.send(part.contiguous(), 0, group=group)
            continue
        like = parts[0]
        parts = [part.cpu() for part in parts]
        for sender in range(1, len(sizes)):
            for size in filter(fits, sizes[sender]):
                part = like.new_empty(size[1][layer])
                dist.recv(part, sender, group=group)
                parts.append(part.cpu())
        inputs.append(torch.cat(parts, 1))
    if rank:
        return None
    return ChunkContext(first[0], inputs)
