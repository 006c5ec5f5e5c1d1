"""Gated attention (arXiv 2505.06708): each query multiplies the results of its heads by its gates."""

import torch
from torch import Tensor, nn

HEAD_GATES = ("none", "head", "element")


class HeadGate(nn.Module):
    """σ(x W_θ) ⊙ H: one gate for each head ("head") or for each number of a head ("element").

    The gate is after the attention and before the output projection, the best position in the paper. Gates do
    not select heads: every gate is between 0 and 1. W_θ starts at zero, so all gates start at 1/2.

    Args:
        embed_dim: the width of the inputs of the queries, C.
        heads: the number of heads that have their own gates; where tokens select experts, those of all
            experts.
        head_dim: D.
        kind: "head" or "element".
    """

    def __init__(self, embed_dim: int, heads: int, head_dim: int, kind: str):
        super().__init__()
        self.heads = heads
        self.width = head_dim if kind == "element" else 1
        self.projection = nn.Linear(embed_dim, heads * self.width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all gates to 1/2."""
        nn.init.zeros_(self.projection.weight)

    def forward(self, found: Tensor, x: Tensor, index: Tensor | None = None) -> Tensor:
        """Multiply the results of heads by the gates of their queries.

        Args:
            found: the results of the H active heads, [B, H, T, D].
            x: the inputs of the queries, [B, T, C].
            index: the number of each active head, [B·T, H] int64; None: 0 … H − 1.

        Returns:
            The gated results, [B, H, T, D], in the dtype of `found`.
        """
        # [N, heads, 1 or D]
        gates = torch.sigmoid(self.projection(x)).view(-1, self.heads, self.width)
        if index is not None:
            gates = gates.gather(1, index.unsqueeze(-1).expand(-1, -1, self.width))
        return found * gates.view(*x.shape[:2], found.size(1), self.width).transpose(1, 2).to(
            found.dtype
        )
