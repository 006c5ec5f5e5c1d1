"""For texts that are read chunk by chunk: keeps the inputs that a decoder's layers had in earlier chunks."""

import functools
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn


class _Kept(NamedTuple):
    chunk: int
    inputs: List[Tensor]  # of each layer, [M, B, C]


class CarriedContext:
    """Hands each layer the inputs that it had in the last `chunks` chunks, without their gradients.

    As in Transformer-XL (Dai et al., arXiv 1901.02860, §3.2): h̃ = [SG(h_τ) ∘ h_{τ+1}] makes keys and values.
    Training and evaluation have separate contexts, so a validation in the middle of an epoch disturbs
    nothing. So have parts of the texts that take turns, as the micro-batches of an update do. A context is
    not part of the model's state: a training resumed in the middle of an epoch begins with a chunk without
    context, as an epoch does.
    """

    def __init__(self, layers: Sequence[nn.Module], chunks: int):
        self.chunks = chunks
        self._kept: Dict[Tuple[bool, int], _Kept] = {}
        self._before: Optional[List[Tensor]] = None
        self._now: Optional[List[Tensor]] = None
        for index, layer in enumerate(layers):
            # A hook runs before the layer's checkpointed forward, whose second run must see the same context.
            layer.register_forward_pre_hook(functools.partial(self._enter, index), with_kwargs=True)

    def begin(self, chunk: int, training: bool, batch: int, part: int = 0) -> None:
        """The next pass reads chunk number `chunk` of the `batch` texts of a part.

        It gets what was kept if that is the chunk before it in the same texts (the last chunk may lack texts
        at the end of the batch). Otherwise it begins without a context.
        """
        kept = self._kept.pop((training, part), None)
        self._before = None
        if kept is not None and chunk == kept.chunk + 1 and batch <= kept.inputs[0].size(1):
            self._before = [inputs[:, :batch] for inputs in kept.inputs]
        self._now = []

    def end(self, chunk: int, training: bool, part: int = 0) -> None:
        """Keep the layers' inputs of this pass."""
        if self._now is not None:
            self._kept[training, part] = _Kept(chunk, self._now)
        self._before = self._now = None

    def abandon(self) -> None:
        """The pass failed: the next one begins without a context."""
        self._before = self._now = None

    def _enter(self, index: int, layer: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]):
        if self._now is None or len(self._now) != index:
            return None
        x = args[0]
        before = None if self._before is None else self._before[index]
        read = x.detach() if before is None else torch.cat([before, x.detach()])
        self._now.append(read[-self.chunks * x.size(0) :])
        return args, {**kwargs, "context": before}
