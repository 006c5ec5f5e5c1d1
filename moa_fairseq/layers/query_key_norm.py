"""RMSNorm of queries and keys, which bounds attention scores (arXiv 2302.05442 uses LayerNorm)."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.positions import Positions, RotaryPositions

if TYPE_CHECKING:
    from moa_fairseq.layers.settings import FamilySettings

QUERY_KEY_NORMS = ("none", "head", "all-heads", "rotated")
NORM_WEIGHTS = ("learned", "none")


class QueryKeyNorm(nn.Module):
    """x / √(mean x² + 10⁻⁶) · w for queries and keys, each with a weight w that starts at 1.

    Args:
        heads, key_heads: H and G.
        head_dim: D.
        kind: what the mean is over. "head" (Qwen3): each head, before rotary positions, where all heads share
            w [D]; "rotated": the same after rotary positions; "all-heads" (OLMo 2): all heads as one vector,
            with w [H·D] for queries and w [G·D] for keys.
        weighted: whether there is a weight w.
    """

    def __init__(self, heads: int, key_heads: int, head_dim: int, kind: str, weighted: bool):
        super().__init__()
        self.over_all_heads = kind == "all-heads"
        self.after_rotation = kind == "rotated"
        if not self.over_all_heads:
            heads = key_heads = 1
        self.queries = nn.RMSNorm(heads * head_dim, eps=1e-6, elementwise_affine=weighted)
        self.keys = nn.RMSNorm(key_heads * head_dim, eps=1e-6, elementwise_affine=weighted)

    def forward(self, q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Normalise queries and keys.

        Args:
            q: queries, [B, H, T, D].
            k: keys, [B, G, S, D]; None: the cache has them.
        """
        if k is not None:
            k = self._normalised(self.keys, k)
        return self._normalised(self.queries, q), k

    def _normalised(self, norm: nn.Module, x: Tensor) -> Tensor:
        if not self.over_all_heads:
            result: Tensor = norm(x)
            return result
        rows: Tensor = norm(x.transpose(1, 2).flatten(2))  # [B, H, T, D] → [B, T, H·D]
        heads: Tensor = rows.unflatten(2, (-1, x.size(3))).transpose(1, 2)
        return heads


def query_key_norm_of(
    common: "FamilySettings",
    sizes: tuple[int, int, int],
    routes_heads: bool,
    positions: Positions | None,
) -> QueryKeyNorm | None:
    """Make the norm that the settings name; None if they name none.

    Args:
        common: the settings.
        sizes: H, G and D of the attention.
        routes_heads: whether tokens select heads.
        positions: the positions inside the attention.

    Raises:
        UserError: for a norm that does not fit the attention.
    """
    kind = common.query_key_norm
    weight = common.query_key_norm_weight
    check_choice("query_key_norm", kind, QUERY_KEY_NORMS)
    check_choice("query_key_norm_weight", weight, NORM_WEIGHTS)
    if kind == "none":
        if weight != "learned":
            raise UserError(
                f"query_key_norm_weight={weight!r} needs a query_key_norm: leave it out."
            )
        return None
    if kind == "all-heads" and routes_heads:
        raise UserError(
            "query_key_norm='all-heads' needs all heads of every token, but here tokens choose heads: choose "
            "query_key_norm='head'."
        )
    if kind == "rotated" and not isinstance(positions, RotaryPositions):
        raise UserError(
            "query_key_norm='rotated' needs positions='rope': choose query_key_norm='head'."
        )
    return QueryKeyNorm(*sizes, kind, weight == "learned")
