"""Positions inside attention, for every family: the scores depend on the distance of query and key."""

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.constants import constant
from moa_fairseq.layers.rope_scaling import RopeScaling

if TYPE_CHECKING:
    from moa_fairseq.layers.settings import FamilySettings


class Positions(nn.Module):
    """Positions inside a self-attention; this base class adds none.

    The positions of queries are first_query, first_query + 1, …; those of keys are 0, 1, …, counted from the
    first cached or carried key. Letters: B sequences of a batch, H query heads, G heads of keys, T queries, S
    keys, D the width of a head.
    """

    @classmethod
    def of_attention(
        cls, embed_dim: int, key_heads: int, head_dim: int, **rotary: Any
    ) -> "Positions":
        """Make the positions of one attention.

        Args:
            embed_dim: the width of the attention's inputs, C.
            key_heads: G.
            head_dim: D.
            rotary: further arguments of `RotaryPositions`.

        Raises:
            UserError: for a head_dim that these positions do not support.
        """
        return cls(head_dim, **rotary)

    def rotate(self, q: Tensor, k: Tensor, first_query: int | Tensor) -> tuple[Tensor, Tensor]:
        """Apply positions to queries and to new keys, before keys are cached.

        Args:
            q: queries, [B, H, T, D].
            k: new keys, [B, G, T + M, D]: M keys of a carried context, then T keys at the positions of the
                queries.
            first_query: the position of the first query; a scalar tensor with a `StaticCache`.

        Returns:
            Queries and keys, in the same shapes.
        """
        return q, k

    def bias(self, q: Tensor, key_length: int, first_query: int | Tensor) -> Tensor | None:
        """The bias that is added to the scaled scores.

        Args:
            q: queries as projected, before `rotate`, [B, H, T, D].
            key_length: S, the number of keys with those of the cache.
            first_query: the position of the first query; a scalar tensor with a `StaticCache`.

        Returns:
            The bias [B or 1, H or 1, T, S], or None if these positions add no bias.
        """
        return None

    def macs(self, queries: int, keys: int, num_heads: int) -> dict[str, int]:
        """Multiply-accumulates that positions add to one sequence, in "projections" and in "scores".

        Args:
            queries, keys: the numbers of tokens that have queries and keys.
            num_heads: H.
        """
        return {"projections": 0, "scores": 0}


class RotaryPositions(Positions):
    """RoPE (Su et al., arXiv 2104.09864, Eq. 34): scores then depend on distances only.

    The first R of the D numbers of a head are rotated, where R is the largest even number up to rotary_dim.
    At position p, the pair (x_j, x_{j + R/2}) is rotated by the angle p · base^(−2j/R).

    Args:
        head_dim: D.
        base: the base of the angles; a larger base makes the angles smaller.
        rotary_dim: the largest number of numbers to rotate; None: D.
        scaling: the scaling of the angles; None: no scaling.

    Raises:
        UserError: if there is no pair to rotate, and for a base, rotary_dim or scaling that does not fit.
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        scaling: RopeScaling | None = None,
    ):
        super().__init__()
        if not 1 < base < math.inf:
            raise UserError(f"rope_base={base}: give a number above 1.")
        if rotary_dim is None:
            rotary_dim = head_dim
        elif not 2 <= rotary_dim <= head_dim:
            raise UserError(f"rotary_dim={rotary_dim}: give 2 to {head_dim}, the head dimension.")
        self.rotary_dim = rotary_dim - rotary_dim % 2
        if not self.rotary_dim:
            raise UserError(
                f"positions='rope' rotates pairs of values, but the head dimension is {head_dim}: "
                "choose 2 or more."
            )
        self.is_dynamic = scaling is not None and scaling.rope_type == "dynamic"
        if self.is_dynamic and self.rotary_dim == 2:
            raise UserError(
                "rope_scaling: dynamic needs two pairs to rotate: choose 4 or more numbers."
            )
        self.base = base
        self.scaling = scaling

    def rotate(self, q: Tensor, k: Tensor, first_query: int | Tensor) -> tuple[Tensor, Tensor]:
        carried = k.size(2) - q.size(2)
        first = first_query - carried
        position = first + torch.arange(k.size(2), device=q.device, dtype=torch.float64)
        angle = position[:, None] * self._speed(first + k.size(2), q.device)
        cos = angle.cos()
        sin = angle.sin()
        if self.scaling is not None and self.scaling.magnitude != 1.0:
            cos = cos * self.scaling.magnitude
            sin = sin * self.scaling.magnitude
        return _rotate_pairs(q, cos[carried:], sin[carried:]), _rotate_pairs(k, cos, sin)

    def _speed(self, length: int | Tensor, device: torch.device) -> Tensor:
        """The angle per position of each pair, in a text of `length` positions, [R / 2] float64."""
        if not self.is_dynamic:
            return _speed(self.rotary_dim, self.base, self.scaling, device=device)
        assert self.scaling is not None
        positions = length + torch.zeros((), dtype=torch.float64, device=device)
        return _powers(
            self.scaling.base_at(self.base, self.rotary_dim, positions), self.rotary_dim, device
        )


@constant
def _speed(dim: int, base: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """The angle per position of each pair of numbers, [dim / 2] float64."""
    speed = _powers(base, dim, device)
    return speed if scaling is None else scaling.scale_angles(speed, base)


def _powers(base: float | Tensor, dim: int, device: torch.device) -> Tensor:
    """base^(−2j/dim) for each j, [dim / 2] float64."""
    powers: Tensor = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    return powers


class HalfRotaryPositions(RotaryPositions):
    """RoPE on the first half of a head's numbers, rounded down to an even number, as in SwitchHead's code.

    Args:
        head_dim: D, of which 2 · (D // 4) numbers are rotated.
        base, scaling: those of `RotaryPositions`.
        rotary_dim: None.

    Raises:
        UserError: if there is no pair to rotate, and for a rotary_dim.
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        scaling: RopeScaling | None = None,
    ):
        if rotary_dim is not None:
            raise UserError(
                f"rotary_dim={rotary_dim} and positions='rope-half' both say how much of a head is rotated: "
                "choose positions='rope'."
            )
        if head_dim < 4:
            raise UserError(
                "positions='rope-half' rotates pairs of values in half of a head, but the head dimension is "
                f"{head_dim}: choose a head dimension of 4 or more, or positions='rope'."
            )
        super().__init__(head_dim, base, 2 * (head_dim // 4), scaling)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R of D numbers: x [B, H, T, D]; cos and sin [T, R / 2].

    The products are in float32 or wider, because half precision is too coarse for far positions.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    cos = cos.to(wide.dtype)
    sin = sin.to(wide.dtype)
    pairs = cos.size(-1)
    first, second, unrotated = wide.split([pairs, pairs, x.size(-1) - 2 * pairs], dim=-1)
    return torch.cat(
        [first * cos - second * sin, second * cos + first * sin, unrotated], dim=-1
    ).to(x.dtype)


class RelativePositions(Positions):
    """Transformer-XL's relative positions (Dai et al., arXiv 1901.02860, §3.3), for G key heads of size D.

    The scores are A_ij / √D with A_ij = q_i·k_j (a) + q_i·W_R R_{i−j} (b) + u·k_j (c) + v·W_R R_{i−j} (d). R
    is the sinusoid of the distance i − j. W_R [G·D, C], u and v [G, D] are learned; query head h uses those
    of key head h mod G. `rotate` adds u to the queries, which gives (a) and (c); `bias` is (b) and (d).

    Args:
        embed_dim: C, the width of the sinusoids.
        key_heads: G.
        head_dim: D.
    """

    def __init__(self, embed_dim: int, key_heads: int, head_dim: int):
        super().__init__()
        self.embed_dim = embed_dim
        self.key_heads = key_heads
        self.head_dim = head_dim
        self.projection = nn.Linear(embed_dim, key_heads * head_dim, bias=False)
        self.content_bias = nn.Parameter(torch.empty(key_heads, head_dim))  # u
        self.position_bias = nn.Parameter(torch.empty(key_heads, head_dim))  # v
        self.reset_parameters()

    @classmethod
    def of_attention(
        cls, embed_dim: int, key_heads: int, head_dim: int, **rotary: Any
    ) -> "RelativePositions":
        return cls(embed_dim, key_heads, head_dim)

    def reset_parameters(self) -> None:
        """Draw W_R as a matrix of the attention; u and v start at zero: no position or key is preferred."""
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.content_bias)
        nn.init.zeros_(self.position_bias)

    def rotate(self, q: Tensor, k: Tensor, first_query: int | Tensor) -> tuple[Tensor, Tensor]:
        return (self._by_key_head(q) + self.content_bias.to(q.dtype)[:, None]).view_as(q), k

    def bias(self, q: Tensor, key_length: int, first_query: int | Tensor) -> Tensor:
        tgt_len = q.size(2)
        if not tgt_len:
            return q.new_zeros(q.size(0), q.size(1), 0, key_length)
        # The distance i − j is largest for the last query and the first key. Column m has the distance
        # largest − m.
        largest = first_query + tgt_len - 1
        columns = (
            largest,
            key_length + tgt_len - 1,
            self.embed_dim,
            q.device,
            self.content_bias.dtype,
        )
        if is_compiling() or isinstance(largest, Tensor):  # a graph reads no cache of Python
            encoded = _sinusoids(*columns)
        else:
            encoded = _kept_sinusoids(*columns, inference=torch.is_inference_mode_enabled())
        # [L, G, D]
        r = self.projection(encoded).view(-1, self.key_heads, self.head_dim).to(q.dtype)
        q = (self._by_key_head(q) + self.position_bias.to(q.dtype)[:, None]) / math.sqrt(
            self.head_dim
        )
        scores = torch.einsum("bpgtd,lgd->bpgtl", q, r).flatten(1, 2)  # by distance, [B, H, T, L]
        # The distances of query i to keys 0, 1, … begin at column T − 1 − i, so each row begins one column
        # further left than the row before. If the same memory is read as rows that are one shorter, all rows
        # begin in the same column.
        if tgt_len == 1:
            return scores
        length = scores.size(3)
        rows = scores.flatten(2).narrow(2, tgt_len - 1, tgt_len * (length - 1))
        by_query: Tensor = rows.unflatten(2, (tgt_len, length - 1))
        return by_query[..., :key_length]

    def macs(self, queries: int, keys: int, num_heads: int) -> dict[str, int]:
        distances = queries + keys - 1
        return {
            "projections": distances * self.embed_dim * self.key_heads * self.head_dim,
            "scores": num_heads * queries * distances * self.head_dim,
        }

    def _by_key_head(self, q: Tensor) -> Tensor:
        """Group query heads by key head (h mod G): [B, H, T, D] → [B, H / G, G, T, D]."""
        by_key_head: Tensor = q.unflatten(1, (-1, self.key_heads))
        return by_key_head


def _sinusoids(
    largest: int | Tensor, count: int, dim: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The sinusoids R of the L = count distances largest, largest − 1, …, [L, dim]."""
    distance = largest - torch.arange(count, device=device, dtype=torch.float64)
    speed = 10000.0 ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angle = distance[:, None] * speed
    return torch.cat([angle.sin(), angle.cos()], dim=1)[:, :dim].to(dtype)


@functools.lru_cache(maxsize=8)
def _kept_sinusoids(*columns: Any, inference: bool) -> Tensor:
    """`_sinusoids`, cached for all layers; tensors of inference mode are separate: others cannot use them."""
    return _sinusoids(*columns)


_EMBEDDINGS = ("learned", "sinusoidal")  # choices of --positions that are added to word embeddings
# The choices of --positions that are inside attention
POSITIONS_IN_ATTENTION: dict[str, type[Positions]] = {
    "rope": RotaryPositions,
    "rope-half": HalfRotaryPositions,
    "xl": RelativePositions,
}


def positions_of(
    kind: str | None,
    common: "FamilySettings",
    embed_dim: int,
    sizes: tuple[int, int],
    self_attention: bool,
) -> Positions | None:
    """Make the positions inside an attention.

    Args:
        kind: a name in POSITIONS_IN_ATTENTION; None: no positions.
        common: settings, of which rope_base, rope_scaling and rotary_dim are read.
        embed_dim: the width of the attention's inputs, C.
        sizes: G and D of the attention.
        self_attention: whether keys are always computed from the inputs of the queries.

    Raises:
        UserError: for settings that do not fit the attention, or that it would ignore.
    """
    if kind in _EMBEDDINGS:
        raise UserError(
            f"positions={kind!r} is an embedding, which is added to those of the words and not inside an "
            "attention: add it to the layer's input and leave positions out."
        )
    positions: Positions | None = None
    if kind is not None:
        check_choice("positions", kind, POSITIONS_IN_ATTENTION)
        if not self_attention:
            raise UserError(
                f"positions={kind!r} is for self-attention: build the layer with self_attention=True, or "
                "leave positions out."
            )
        rotary: dict[str, Any] = {}
        if common.rope_base is not None:
            rotary["base"] = common.rope_base
        if common.rotary_dim is not None:
            rotary["rotary_dim"] = common.rotary_dim
        if common.rope_scaling is not None:
            rotary["scaling"] = RopeScaling.from_setting(common.rope_scaling)
        positions = POSITIONS_IN_ATTENTION[kind].of_attention(embed_dim, *sizes, **rotary)
    if not isinstance(positions, RotaryPositions):
        for name in ("rope_base", "rope_scaling", "rotary_dim"):
            if (value := getattr(common, name)) is not None:
                raise UserError(
                    f"{name}={value} is for rotary positions: add positions='rope', or leave it out."
                )
    return positions
