"""Draws the expert of each sequence and module from its gate, for F steps (MAE Algorithm 2).

In encoders one expert is drawn for each sequence, as in the paper. In decoders a gate must not see later
tokens, so each position has its own gate, and the expert can change along the sequence (docs/mae.md says how
often).
"""

import zlib

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # the constants of splitmix64, as signed numbers
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_BITS = 24  # a float32 represents integers of so many bits exactly


class ExpertDraw:
    """The random numbers of one micro-batch: one for each sequence, attention module and expert.

    A number depends on (seed, update, sequence, module, expert) alone. It does not depend on the worker, the
    index in the batch, the number of accumulation steps or earlier draws, so a restart draws the same
    numbers.

    Args:
        sequence_ids: the ids of the sequences, [B] int64; fairseq's sample["id"].
        seed: the seed of the training.
        update: the number of the update to which the micro-batch belongs.
    """

    def __init__(self, sequence_ids: Tensor, seed: int, update: int):
        self.sequence_ids = sequence_ids
        self.seed = seed
        self.update = update

    def uniform(self, name: str) -> Tensor:
        """A number in [0, 1) for each sequence in the module `name`, [B] float32."""
        return _fraction(self._keys(name))

    def choose(self, name: str, probs: Tensor) -> Tensor:
        """Draw an expert from each distribution in `probs` (MAE Algorithm 2).

        This is the Gumbel-max trick, argmax_i (log p_i + G_i), written as argmax_i p_i / X_i with exponential
        X_i = −log u_i. All positions of a sequence share the E numbers u_i of the module. So the expert of a
        position depends on no later gate, and it changes from i to j only if p_j / p_i has grown. Between two
        gates at total variation distance d it changes with a probability of at most 2d / (1 + d); no draw
        achieves less than d.

        Args:
            name: the path of the module in the model; modules draw independently.
            probs: probabilities, [B, ..., E], with the sequences in the order of `sequence_ids`.

        Returns:
            The indices of the experts, [B, ...] int64.

        Raises:
            ValueError: if the number of sequences is not that of the ids.
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
        """A scrambled number for each sequence in the module `name`, [B] int64."""
        key = self.sequence_ids.to(torch.int64)
        for word in (zlib.crc32(name.encode()), self.update, self.seed):
            key = scramble(key + word)
        return key


def _fraction(key: Tensor) -> Tensor:
    """The leading bits of each key as a float32 in [0, 1)."""
    return ((key >> (64 - _BITS)) & ((1 << _BITS) - 1)).to(torch.float32) / (1 << _BITS)


def scramble(key: Tensor) -> Tensor:
    """The hash splitmix64, int64 → int64. Products wrap around, as required; masks make shifts logical."""
    key = key + _GOLDEN
    for shift, factor in _MIX:
        key = (key ^ ((key >> shift) & (2 ** (64 - shift) - 1))) * factor
    return key ^ ((key >> 31) & (2**33 - 1))


def random_expert(name: str, seed: int, num_experts: int) -> int:
    """One expert for all sequences of a module. Over many seeds, all experts are equally likely.

    Args:
        name: the path of the module in the model; modules draw independently.
        seed: the seed of the evaluation (`--mae-evaluate-seed`).
        num_experts: E.

    Returns:
        The index of the expert, 0 … E − 1.
    """
    uniform = ExpertDraw(torch.zeros(1, dtype=torch.int64), seed, update=0).uniform(name)
    return int(uniform.item() * num_experts)
