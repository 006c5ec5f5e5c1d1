"""Dense multi-head attention as in fairseq, with a few more settings: the baseline of every mixture."""

import math
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.call import Call, Computed
from moa_fairseq.layers.settings import FamilySettings, flag


@dataclass
class DenseSettings(FamilySettings):
    """The flags of `DenseAttention`."""

    attention_head_dim: Optional[int] = flag(  # noqa: UP045
        None,
        "head dimension (default: model width / heads); with it a dense model can have the "
        "multiply-accumulates or the parameters of a mixture",
    )
    key_heads: Optional[int] = flag(  # noqa: UP045
        None,
        "number of key/value heads (num_kv_heads; default: one per query head); 1: multi-query attention "
        "(arXiv 1911.02150), fewer than the query heads: grouped-query attention (arXiv 2305.13245)",
    )
    dropped_heads: int = flag(
        0,
        "number N of the h heads that training zeroes at random per sequence and attention (DropHead); the "
        "others are multiplied by h/(h - N); evaluation uses all heads",
    )


class DenseHeadsAttention(Attention):
    """The base of MAE, MoH and dense attention: the parameters of fairseq's attention, with their names.

    A subclass calls `reset_parameters` after it has built its router.

    Args:
        embed_dim: the model's width, C.
        num_heads: H.
        kdim, vdim: the widths of the inputs of keys and values, if not C.
        bias: whether the projections have biases.
        head_dim: D, if it is not embed_dim / num_heads.
        options: those of `Attention`; key_heads only if `shares_keys`.

    Raises:
        UserError: if num_heads does not divide embed_dim, and for key_heads where each head has its own keys.
    """

    shares_keys = False
    has_head_dim = False  # whether its settings have attention_head_dim
    inner_keywords = Attention.inner_keywords - {"key_heads"}  # refused below, with a reason
    needs_causal = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        head_dim: int | None = None,
        **options: Any,
    ):
        if not self.shares_keys and options.get("key_heads") not in (None, num_heads):
            raise UserError(
                f"key_heads={options['key_heads']}: each of the {num_heads} heads has its own keys here. "
                "Leave it out."
            )
        if num_heads < 1 or (head_dim is None and embed_dim % num_heads):
            instead = ""
            if self.has_head_dim:
                instead = " Or set the head dimension (attention_head_dim)."
            raise UserError(
                f"The model width {embed_dim} is not a multiple of the {num_heads} attention heads: change "
                f"one of the two.{instead}"
            )
        if head_dim is not None and head_dim < 1:
            raise UserError(f"attention_head_dim is {head_dim}: give a positive number.")
        super().__init__(embed_dim, num_heads, head_dim or embed_dim // num_heads, **options)
        width = num_heads * self.head_dim
        key_width = self.key_heads * self.head_dim
        self.k_proj = nn.Linear(kdim or embed_dim, key_width, bias=bias)
        self.v_proj = nn.Linear(vdim or embed_dim, key_width, bias=bias)
        self.q_proj = nn.Linear(embed_dim, width, bias=bias)
        self.out_proj = nn.Linear(width, embed_dim, bias=bias)

    @classmethod
    def from_settings(
        cls,
        embed_dim: int,
        settings: FamilySettings,
        *,
        num_heads: int,
        causal: bool,
        **options: Any,
    ) -> "DenseHeadsAttention":
        settings = settings.in_role(options.get("self_attention", False), causal)
        if cls.needs_causal:
            options["causal"] = causal
        return cls(embed_dim, num_heads, settings=settings, **options)

    def reset_parameters(self) -> None:
        """Initialise the projections as fairseq's attention does; a router or gate initialises itself."""
        is_square = self.k_proj.in_features == self.v_proj.in_features == self.embed_dim
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2) if is_square else 1.0)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def keys_values(self, call: Call) -> tuple[Tensor | None, Tensor | None]:
        """Keys and values [B, G, S, D] of the call's memory; None: the cache has them."""
        if call.memory is None or call.values is None:
            return None, None
        return self.split(self.k_proj(call.memory)), self.split(self.v_proj(call.values))

    def split(self, x: Tensor) -> Tensor:
        """Split the heads: [B, T, H·D] → [B, H, T, D], or G heads of keys and values."""
        return x.view(*x.shape[:2], x.size(2) // self.head_dim, self.head_dim).transpose(1, 2)

    def projection_macs(self, queries: int, keys: int) -> dict[str, int]:
        of_queries = 2 * queries * self.embed_dim * self.num_heads
        of_keys = keys * (self.k_proj.in_features + self.v_proj.in_features) * self.key_heads
        return {"router": 0, "projections": (of_queries + of_keys) * self.head_dim}


class DenseAttention(DenseHeadsAttention):
    """fairseq's attention, with the names and initial values of its parameters; it has no router.

    Query head h reads key head h mod G, as in `sdpa.attend`. In other models, such as LLaMA, it reads key
    head h // (H / G). For their weights the query heads must be reordered, that is, the rows of `q_proj` and
    the columns of `out_proj`: their head g·H/G + j becomes head j·G + g here.

    Args:
        embed_dim: the model's width, C.
        num_heads: H.
        settings: the settings, or their fields as keywords.
            attention_head_dim: D, if it is not embed_dim / num_heads.
            key_heads: G, the number of heads of keys and values, which the H query heads share: 1 is
                multi-query attention, other divisors of H are grouped-query attention.
            dropped_heads: in training, t heads are drawn for each sequence and left out, and the other heads
                are multiplied by H/(H−t). This is an F step of MAE with a uniform gate, and DropHead (arXiv
                2004.13342) with a fixed number of heads.
        options: those of `DenseHeadsAttention`.

    Raises:
        UserError: for impossible sizes.
    """

    shares_keys = True
    has_head_dim = True
    inner_keywords = DenseHeadsAttention.inner_keywords | {"head_dim"}

    def __init__(
        self, embed_dim: int, num_heads: int, settings: DenseSettings | None = None, **options: Any
    ):
        settings = DenseSettings.of(settings, options)
        key_heads = settings.key_heads
        if key_heads is not None and (key_heads < 1 or num_heads % key_heads):
            raise UserError(
                f"key_heads {key_heads} does not divide the {num_heads} attention heads: give a divisor of "
                f"{num_heads}."
            )
        if not 0 <= settings.dropped_heads < num_heads:
            raise UserError(
                f"dropped_heads {settings.dropped_heads} must be between 0 and {num_heads - 1}: "
                f"at least one of the {num_heads} attention heads must remain."
            )
        super().__init__(
            embed_dim,
            num_heads,
            head_dim=settings.attention_head_dim,
            key_heads=key_heads,
            **options,
        )
        self.dropped_heads = settings.dropped_heads
        self.reset_parameters()

    def compute(self, call: Call) -> Computed:
        q = self.split(self.q_proj(call.x))
        k, v = self.keys_values(call)
        heads, weights = self.attend(call, q, k, v)
        if self.head_gate is not None:
            heads = self.head_gate(heads, call.x)
        if self.training and self.dropped_heads:
            batch, num_heads = heads.shape[:2]
            dropped = (
                torch.rand(batch, num_heads, device=heads.device).topk(self.dropped_heads).indices
            )
            scale = heads.new_full((batch, num_heads), num_heads / (num_heads - self.dropped_heads))
            heads = heads * scale.scatter(1, dropped, 0.0)[:, :, None, None]
        # [B, H, T, D] → [B, T, H·D]
        return (
            self.out_proj(heads.transpose(1, 2).flatten(2)),
            weights,
            (),
        )


DenseSettings.attention = DenseAttention
