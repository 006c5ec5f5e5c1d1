"""Experts chosen by a hash of the token, which nothing can learn (Roller et al., arXiv 2106.04426)."""

import torch
from torch import Tensor, nn

from moa_fairseq.attention.collector import tokens_of_queries
from moa_fairseq.attention.expert_draw import scramble
from moa_fairseq.errors import UserError


class TokenHash(nn.Module):
    """K different experts of E for each token id; every set is equally likely, and each module has its own.

    It is a function of the id and of `salt`, which is drawn at initialisation and saved with the weights: the
    same in training, evaluation and step-by-step generation, for any batch. Raises UserError if K = E.
    """

    experts: Tensor  # a buffer: 0, 1, …, E − 1
    salt: Tensor  # a buffer [1] int64, below 2^31: means of checkpoints keep it exactly

    def __init__(self, num_experts: int, experts_per_token: int):
        super().__init__()
        if experts_per_token == num_experts:
            raise UserError(
                f"--router-choice hash chooses --experts-per-token {experts_per_token} of {num_experts}: "
                "there is nothing to choose. Give fewer, or leave the flag out."
            )
        self.experts_per_token = experts_per_token
        self.register_buffer("experts", torch.arange(num_experts), persistent=False)
        self.register_buffer("salt", torch.zeros(1, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.salt.random_(2**31)

    def forward(self, rows: int) -> Tensor:
        """The experts of `rows` queries, batch first: [rows, K] int64, by the ids of `tokens_of_queries`.

        Raises UserError where no ids are declared.
        """
        tokens = tokens_of_queries.get()
        if tokens is None or rows % tokens.size(0):
            raise UserError(
                "--router-choice hash needs the ids of the tokens: call the attention inside "
                "moa_fairseq.attention.collector.tokens_of_queries(ids), or choose another --router-choice."
            )
        ids = tokens[:, tokens.size(1) - rows // tokens.size(0) :].reshape(-1, 1)  # a step has the last one
        scores = scramble(scramble(ids + self.salt) + self.experts)  # [rows, E]
        return scores.topk(self.experts_per_token, dim=-1).indices
