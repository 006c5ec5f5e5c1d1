"""One expert per sequence and module, drawn from a gate: what an F step computes with (MAE Algorithm 2)."""

import contextlib
import zlib
from typing import Iterator, List, Optional

import torch
from torch import Tensor

# A plain stack, no ContextVar: activation checkpointing recomputes layers in autograd's own threads on a
# GPU, and those see the context variables of nobody. The recomputation must find the same draw.
_active: List["ExpertDraw"] = []

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # the constants of splitmix64, as signed numbers
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_BITS = 24  # of a float32's mantissa


class ExpertDraw:
    """The random numbers of one micro-batch: one per sequence and attention module.

    sequence_ids [B] int64: fairseq's sample["id"]. A number depends on (seed, update, sequence, module)
    and on nothing else: not on the worker that has the sequence, on its place in the batch, on the
    number of accumulation steps, nor on what was drawn before; so a restart draws the same again.
    """

    def __init__(self, sequence_ids: Tensor, seed: int, update: int):
        self.sequence_ids = sequence_ids
        self.seed = seed
        self.update = update

    def uniform(self, name: str) -> Tensor:
        """One number in [0, 1) per sequence for the module `name`, float32 [B]."""
        key = self.sequence_ids.to(torch.int64)
        for word in (zlib.crc32(name.encode()), self.update, self.seed):
            key = _scramble(key + word)
        return ((key >> (64 - _BITS)) & (2**_BITS - 1)).to(torch.float32) / 2**_BITS

    def choose(self, name: str, probs: Tensor) -> Tensor:
        """Experts ~ Cat(probs) for probs [..., B, E] → index [..., B] int64.

        A sequence has one random number u for the module; the expert is the one whose stretch of the
        cumulated probabilities contains u. Where the gate changes from position to position (a causal
        one), each position's expert follows its own gate's distribution, and depends on that gate and u
        alone: on nothing that comes later in the sequence.
        """
        u = self.uniform(name).to(probs.dtype).unsqueeze(-1)
        if u.size(0) != probs.size(-2):
            raise ValueError(f"{u.size(0)} sequence ids for {probs.size(-2)} sequences in {name}")
        return (probs.cumsum(-1) <= u).sum(-1).clamp_max(probs.size(-1) - 1)


def _scramble(key: Tensor) -> Tensor:
    """splitmix64: int64 products wrap around, which is what it needs; shifts are made logical."""
    key = key + _GOLDEN
    for shift, factor in _MIX:
        key = (key ^ ((key >> shift) & (2 ** (64 - shift) - 1))) * factor
    return key ^ ((key >> 31) & (2**33 - 1))


@contextlib.contextmanager
def drawing_experts(draw: ExpertDraw) -> Iterator[None]:
    """Inside the block every mixture of attentive experts computes with drawn experts."""
    _active.append(draw)
    try:
        yield
    finally:
        _active.pop()


def current_draw() -> Optional[ExpertDraw]:
    """The draw of the innermost `drawing_experts` block, or None: then experts are mixed."""
    return _active[-1] if _active else None
