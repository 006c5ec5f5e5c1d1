"""Evaluating a mixture of attentive experts with one expert per module (arXiv 2005.06537, Table 5)."""

import torch
from torch import Tensor

from moa_fairseq.attention.expert_draw import ExpertDraw

MIXTURE, TOP_EXPERT, RANDOM_EXPERT = EVALUATIONS = ("mixture", "top-expert", "random-expert")


def single_expert(how: str, probs: Tensor, name: str, seed: int) -> Tensor:
    """The expert that stands for the mixture: probs [..., E] → index [...] int64.

    TOP_EXPERT: the one with the greatest probability, which can differ between sequences and, where the gate
    is causal, between positions. RANDOM_EXPERT: the same one everywhere in the module `name`, all experts
    being equally likely over the seeds; the gate is not looked at.
    """
    if how == TOP_EXPERT:
        return probs.argmax(-1)
    return torch.full_like(probs[..., 0], random_expert(name, seed, probs.size(-1)), dtype=torch.int64)


def random_expert(name: str, seed: int, num_experts: int) -> int:
    """The expert of the module `name` under `seed`: a function of these and of nothing else."""
    uniform = ExpertDraw(torch.zeros(1, dtype=torch.int64), seed, update=0).uniform(name)
    return int(uniform.item() * num_experts)
