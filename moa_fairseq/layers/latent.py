"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): dense heads that share a small cache."""

import math
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.call import Call, Computed
from moa_fairseq.layers.dense import DenseHeadsAttention
from moa_fairseq.layers.positions import POSITIONS_IN_ATTENTION, RotaryPositions
from moa_fairseq.layers.sdpa import Masks
from moa_fairseq.layers.settings import FamilySettings, flag
from moa_fairseq.layers.torch_compat import is_plain


@dataclass
class LatentSettings(FamilySettings):
    """The flags of `LatentAttention`."""

    attention_head_dim: Optional[int] = flag(  # noqa: UP045
        None, "head dimension (d_h; default: model width / heads)"
    )
    latent_dim: Optional[int] = flag(  # noqa: UP045
        None,
        "width of the key/value latent (kv_lora_rank, d_c; default: four head dimensions, as in DeepSeek-V2)",
    )
    rotary_key_dim: Optional[int] = flag(  # noqa: UP045
        None,
        "width of the shared rotary key and of each head's rotary query (qk_rope_head_dim, d_h^R; default: "
        "half the head dimension, as in DeepSeek-V2); for --positions rope",
    )
    latent_norm: bool = flag(
        False,
        "RMSNorm of the latent, as in DeepSeek-V2's section 3.1.2 and code, but not its equations",
    )


class LatentAttention(DenseHeadsAttention):
    """Multi-head latent attention (MLA), equations 9 to 19 of DeepSeek-V2 without its query latent.

    The cache has only a latent c_s and a rotary key k^R_s for each token h_s, which all heads share. Head i
    computes its keys and values from the latent:

        c_s = W^DKV h_s;  k^R_s = RoPE(W^KR h_s);  q^C_{t,i} = W^Q_i h_t;  q^R_{t,i} = RoPE(W^QR_i h_t)
        o_{t,i} = Σ_s softmax_s((q^C_{t,i}·W^UK_i c_s + q^R_{t,i}·k^R_s) / √(d_h + d_h^R)) W^UV_i c_s

    `q_proj` is [W^QR_i; W^Q_i] head by head, `latent_proj` is [W^KR; W^DKV], `k_proj` is W^UK and `v_proj` is
    W^UV. No projection has a bias, as in the paper. RoPE needs a rotated key in the cache, so the key has a
    rotary part. Without rotary positions (in cross-attention, or with embeddings of positions) this part is
    left out: d_h^R = 0.

    Args:
        embed_dim: the model's width, C.
        num_heads: H.
        settings: the settings, or their fields as keywords.
            attention_head_dim: d_h, if it is not embed_dim / num_heads.
            latent_dim: d_c, if it is not 4 d_h.
            rotary_key_dim: d_h^R in self-attention with positions="rope", if it is not d_h // 2.
            latent_norm: whether c_s is normalised (RMSNorm) before it is cached, as in the released code.
        kdim, vdim: the width of the inputs of keys and values, if not C; the two must be equal.
        options: those of `Attention`; positions may only be "rope" or None.

    Raises:
        UserError: for impossible sizes and positions.
    """

    memory_projections = ("latent_proj", "latent_proj")
    has_head_dim = True
    inner_keywords = DenseHeadsAttention.inner_keywords | {"head_dim", "bias"}

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        settings: LatentSettings | None = None,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        **options: Any,
    ):
        settings = LatentSettings.of(settings, options)
        latent_dim = settings.latent_dim
        rotary_dim = settings.rotary_key_dim
        positions = options.get("positions")
        if positions in POSITIONS_IN_ATTENTION and positions != "rope":
            raise UserError(
                f"positions={positions!r} needs per-head keys, but latent attention applies positions only "
                "to the latent and one rotary key: choose positions='rope', or an embedding (--positions "
                "learned or sinusoidal)."
            )
        for name, off, instead in (
            ("rotary_dim", None, "rotary_key_dim is the width that is rotated"),
            (
                "query_key_norm",
                "none",
                "no head's keys are built in generation; latent_norm is its norm",
            ),
        ):
            if (value := getattr(settings, name)) != off:
                raise UserError(
                    f"{name}={value} is not for latent attention: leave it out ({instead})."
                )
        if latent_dim is not None and latent_dim < 1:
            raise UserError(f"latent_dim is {latent_dim}: give a positive number.")
        if rotary_dim is not None and rotary_dim < 2:
            raise UserError(
                f"rotary_key_dim {rotary_dim} is too small, because rotary positions rotate pairs of "
                "values: give 2 or more. For no rotary key, leave it and positions out, and add embeddings "
                "of positions (--positions sinusoidal)."
            )
        if (kdim or embed_dim) != (vdim or embed_dim):
            raise UserError(
                f"Latent attention computes keys and values from one input, but kdim is {kdim or embed_dim} "
                f"and vdim is {vdim or embed_dim}: give equal kdim and vdim."
            )
        super().__init__(
            embed_dim, num_heads, head_dim=settings.attention_head_dim, bias=False, **options
        )
        self.latent_dim = latent_dim or 4 * self.head_dim
        self.rotary_dim = 0
        if isinstance(self.positions, RotaryPositions):
            self.rotary_dim = rotary_dim or max(2, self.head_dim // 2)
            of_heads = self.positions
            self.positions = RotaryPositions(
                self.rotary_dim, of_heads.base, scaling=of_heads.scaling
            )
        elif rotary_dim is not None and self.self_attention:
            raise UserError(
                f"rotary_key_dim {rotary_dim} needs positions='rope': add it, or leave this out."
            )
        width = num_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, width + num_heads * self.rotary_dim, bias=False)
        self.latent_proj = nn.Linear(
            kdim or embed_dim, self.rotary_dim + self.latent_dim, bias=False
        )
        self.k_proj = nn.Linear(self.latent_dim, width, bias=False)
        self.v_proj = nn.Linear(self.latent_dim, width, bias=False)
        self.latent_norm = nn.RMSNorm(self.latent_dim, eps=1e-6) if settings.latent_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every matrix Xavier-uniform, as dense attention does if its keys have another input width."""
        super().reset_parameters()
        nn.init.xavier_uniform_(self.latent_proj.weight)

    def compute(self, call: Call) -> Computed:
        if call.values is not call.memory:
            raise ValueError(
                "latent attention computes keys and values from one input, but this call has two: build the "
                "layer with self_attention=True or encoder_decoder_attention=True"
            )
        # [B, T, H·(R + D)] → [B, H, T, R + D]: in a head first the R numbers that are rotated
        q = self.q_proj(call.x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        latent = nothing = None
        if call.memory is not None:
            latent = self._latent(call.memory)
            nothing = latent[..., :0]  # the cache has keys alone, with values of width 0
        q, latent, _, masks, _ = self.place(call, q, latent, nothing)
        # For T queries and S keys, a head needs S·d_c·D products to compute its keys. Attending to the latent
        # instead needs about T·S·d_c more products for scores and means.
        is_step = call.cache is not None and q.size(2) < self.head_dim
        if is_step and is_plain(self.k_proj, nn.Linear) and is_plain(self.v_proj, nn.Linear):
            heads, weights = self._attend_to_latent(call, q, latent, masks)
        else:
            rotary, content = latent.squeeze(1).split([self.rotary_dim, self.latent_dim], -1)
            rotary = rotary.unsqueeze(1).expand(-1, self.num_heads, -1, -1)
            k = torch.cat([rotary, self.split(self.k_proj(content))], -1)
            # Kernels need keys and values of one width
            v = F.pad(self.split(self.v_proj(content)), (0, self.rotary_dim))
            heads, weights = self.attend(call, q, k, v, masks)
            heads = heads[..., : self.head_dim]
        if self.head_gate is not None:
            heads = self.head_gate(heads, call.x)
        # [B, H, T, D] → [B, T, H·D]
        return (
            self.out_proj(heads.transpose(1, 2).flatten(2)),
            weights,
            (),
        )

    def _latent(self, memory: Tensor) -> Tensor:
        """Memory [B, S, kdim] → [k^R; c] before the rotation of k^R, [B, 1, S, R + d_c]."""
        latent: Tensor = self.latent_proj(memory).unsqueeze(1)
        if self.latent_norm is None:
            return latent
        rotary, content = latent.split([self.rotary_dim, self.latent_dim], -1)
        return torch.cat([rotary, self.latent_norm(content)], -1)

    def _attend_to_latent(
        self, call: Call, q: Tensor, latent: Tensor, masks: Masks
    ) -> tuple[Tensor, Tensor | None]:
        """`attend`, with W^UK applied to queries and W^UV to results, so that no keys of heads are computed.

        q^C·(W^UK c) = (W^UKᵀ q^C)·c, and Σ a W^UV c = W^UV Σ a c (DeepSeek-V2, section 2.1.2).
        """
        shape = (self.num_heads, self.head_dim, self.latent_dim)
        rotary, content = q.split([self.rotary_dim, self.head_dim], -1)
        content = torch.einsum("bhtd,hdc->bhtc", content, self.k_proj.weight.view(shape))
        # `attend` divides by the root of the width of these queries, instead of by √(d_h + d_h^R)
        factor = math.sqrt((self.rotary_dim + self.latent_dim) / (self.rotary_dim + self.head_dim))
        q = torch.cat([rotary, content], -1) * factor
        latents, weights = self.attend(call, q, latent, latent, masks)
        heads = torch.einsum(
            "bhtc,hdc->bhtd", latents[..., self.rotary_dim :], self.v_proj.weight.view(shape)
        )
        return heads, weights

    def projection_macs(self, queries: int, keys: int) -> dict[str, int]:
        of_queries = queries * (self.q_proj.weight.numel() + self.out_proj.weight.numel())
        of_keys = keys * sum(
            each.weight.numel() for each in (self.latent_proj, self.k_proj, self.v_proj)
        )
        return {"router": 0, "projections": of_queries + of_keys}

    def macs(self, queries: int, keys: int) -> dict[str, int]:
        """As the base class, for a whole sequence, where the keys and values of all heads are computed."""
        scores = queries * keys * self.num_heads * (2 * self.head_dim + self.rotary_dim)
        return super().macs(queries, keys) | {"scores": scores}

    def cache_bytes(self, number_bytes: int = 2) -> int:
        """The bytes that each token adds to the cache of a generation: the latent and the rotary key.

        Args:
            number_bytes: the bytes of each number; 2 is half precision.
        """
        return (self.latent_dim + self.rotary_dim) * number_bytes


LatentSettings.attention = LatentAttention
