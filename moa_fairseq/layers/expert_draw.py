"""Draws the expert of each sequence and module from a gate, for F steps (MAE Algorithm 2).

In encoders one expert is drawn per sequence, as in the paper. In decoders a gate must not see later tokens,
so there is one per position, and the expert can change along the sequence (docs/mae.md has the numbers).
"""

import zlib

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # the constants of splitmix64, as signed numbers
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_BITS = 24  # the bits of a float32's mantissa


class ExpertDraw:
    """The random numbers of one micro-batch: one per sequence, attention module and expert.

    A number depends on (seed, update, sequence, module, expert) and on nothing else: not on the worker that
    has the sequence, on its place in the batch, on the number of accumulation steps, nor on what was drawn
    before; so a restart draws the same again.

    Args:
        sequence_ids: [B] int64, fairseq's sample["id"].
        seed: of the training.
        update: the number of the update that the micro-batch belongs to.
    """

    def __init__(self, sequence_ids: Tensor, seed: int, update: int):
        self.sequence_ids = sequence_ids
        self.seed = seed
        self.update = update

    def uniform(self, name: str) -> Tensor:
        """One number in [0, 1) per sequence for the module `name`, float32 [B]."""
        return _fraction(self._keys(name))

    def choose(self, name: str, probs: Tensor) -> Tensor:
        """Experts ~ Cat(probs), one for each row of probabilities (MAE Algorithm 2).

        Gumbel-max: argmax_i (log p_i + G_i), written as a race, argmax_i p_i / X_i with X_i = −log u_i
        exponential. A sequence has one set of E numbers for the module, so each position's expert follows its
        own gate and depends on no later one. It changes from i to j only where p_j / p_i has grown: between
        two gates at total variation distance d with a probability of at most 2d / (1 + d), where no draw can
        do better than d.

        Args:
            name: of the module, its path in the model: modules draw independently.
            probs: [B, ..., E], of the sequences in the order of their ids.

        Returns:
            The experts' indices, [B, ...] int64.

        Raises:
            ValueError: where there are more or fewer sequences than ids.
        """
        if self.sequence_ids.numel() != probs.size(0):
            raise ValueError(
                f"{self.sequence_ids.numel()} sequence ids for {probs.size(0)} sequences in {name}"
            )
        experts = torch.arange(probs.size(-1), device=self.sequence_ids.device)
        u = _fraction(scramble(self._keys(name).unsqueeze(-1) + experts))  # [B, E]
        finish = (-torch.log1p(-u)).clamp_min(2.0 ** -(_BITS + 1))
        finish = finish.to(probs.dtype).view(probs.size(0), *[1] * (probs.dim() - 2), -1)
        return (probs / finish).argmax(-1)

    def _keys(self, name: str) -> Tensor:
        """A scrambled number per sequence for the module `name`, int64 [B]."""
        key = self.sequence_ids.to(torch.int64)
        for word in (zlib.crc32(name.encode()), self.update, self.seed):
            key = scramble(key + word)
        return key


def _fraction(key: Tensor) -> Tensor:
    """The leading bits as a number in [0, 1), float32."""
    return ((key >> (64 - _BITS)) & ((1 << _BITS) - 1)).to(torch.float32) / (1 << _BITS)


def scramble(key: Tensor) -> Tensor:
    """splitmix64, int64 → int64: products wrap around, which is what it needs; shifts are made logical."""
    key = key + _GOLDEN
    for shift, factor in _MIX:
        key = (key ^ ((key >> shift) & (2 ** (64 - shift) - 1))) * factor
    return key ^ ((key >> 31) & (2**33 - 1))


def random_expert(name: str, seed: int, num_experts: int) -> int:
    """One expert for all of the module `name`, each as likely over the seeds; a function of these alone.

    Args:
        name: of the module, its path in the model: modules draw independently.
        seed: of the evaluation (`--mae-evaluate-seed`).
        num_experts: E.

    Returns:
        The expert's number, 0 … E − 1.
    """
    uniform = ExpertDraw(torch.zeros(1, dtype=torch.int64), seed, update=0).uniform(name)
    return int(uniform.item() * num_experts)
