"""Experts selected by a hash of the token's id, which is not learned (Roller et al., arXiv 2106.04426)."""

import torch
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.constants import every_index
from moa_fairseq.layers.expert_draw import scramble


class TokenHash(nn.Module):
    """Selects K of E experts for each token id; every set of K experts is equally likely.

    The selection depends on the id and on the module's `salt` alone, which is drawn at initialisation and
    saved with the weights. So it is the same in training, evaluation and generation, in any batch.

    Args:
        num_experts, experts_per_token: E and K.

    Raises:
        UserError: if K = E.
    """

    salt: Tensor  # a buffer [1] int64, below 2^31, so that averaging checkpoints keeps it exactly

    def __init__(self, num_experts: int, experts_per_token: int):
        super().__init__()
        if experts_per_token == num_experts:
            raise UserError(
                f"router_choice hash needs experts_per_token below the {num_experts} experts, not "
                f"{experts_per_token}: give fewer, or leave the flag out."
            )
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.register_buffer("salt", torch.zeros(1, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.salt.random_(2**31)

    def forward(self, token_ids: Tensor | None) -> Tensor:
        """Select the experts of N tokens.

        Args:
            token_ids: [N] or [B, T] int64.

        Returns:
            The experts, [N, K] int64.

        Raises:
            UserError: if token_ids is None.
        """
        if token_ids is None:
            raise UserError(
                "router_choice hash needs token ids: call the attention with token_ids=ids "
                "[B, T], or choose another router_choice."
            )
        every = every_index(self.num_experts, device=token_ids.device)
        scores = scramble(scramble(token_ids.reshape(-1, 1) + self.salt) + every)  # [N, E]
        return scores.topk(self.experts_per_token, dim=-1).indices
