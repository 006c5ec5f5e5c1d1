"""Gated attention (arXiv 2505.06708): each query multiplies what its heads found by a gate of its own."""

import torch
from torch import Tensor, nn

HEAD_GATES = ("none", "head", "element")


class HeadGate(nn.Module):
    """σ(x W_θ) ⊙ H for every head: one gate a head ("head") or one a number of it ("element").

    The paper's best place, after the attention and before the output projection. No head is chosen: every
    gate lies between 0 and 1. W_θ starts at zero, so all gates start at 1/2.

    Args:
        embed_dim: the width of the queries' inputs, C.
        heads: how many heads have gates of their own, which are the experts' where a token chooses some of
            them.
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
        """Start with even gates."""
        nn.init.zeros_(self.projection.weight)

    def forward(self, found: Tensor, x: Tensor, index: Tensor | None = None) -> Tensor:
        """Multiply what the heads found by the gates of their queries.

        Args:
            found: [B, H, T, D].
            x: the queries' inputs, [B, T, C].
            index: [B·T, H] int64, the head that stands in each place; None: head i in place i.

        Returns:
            [B, H, T, D], in the dtype of `found`.
        """
        # [N, heads, 1 or D]
        gates = torch.sigmoid(self.projection(x)).view(-1, self.heads, self.width)
        if index is not None:
            gates = gates.gather(1, index.unsqueeze(-1).expand(-1, -1, self.width))
        return found * gates.view(*x.shape[:2], found.size(1), self.width).transpose(1, 2).to(
            found.dtype
        )
