"""A layer of a Transformer, and the settings of a stack of layers.

Parameters are named as in fairseq.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.errors import check_choice
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.families import FAMILIES
from moa_fairseq.layers.kv_cache import KVCache
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.sigma_moe import SigmaMoE, SigmaMoESettings

Routings = tuple[Routing, ...]
Branch = Callable[..., tuple[Tensor, Routings]]


def _gelu(x: Tensor) -> Tensor:
    """GELU in float32, as fairseq computes it whatever the model's dtype."""
    return F.gelu(x.float()).type_as(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": _gelu,
    "gelu_accurate": functools.partial(F.gelu, approximate="tanh"),
    "tanh": torch.tanh,
    "linear": nn.Identity(),
}
POSITION_EMBEDDINGS = ("none", "learned", "sinusoidal")


def swiglu(inner: Tensor) -> Tensor:
    """silu(x W_1) ⊙ (x W_3) from the two products side by side, [..., 2·F] → [..., F] (arXiv 2002.05202)."""
    gate, value = inner.chunk(2, -1)
    return F.silu(gate) * value


class Shortcut(nn.Module):
    """The residual sum of a post-norm layer before its norm: x·ω + f(x).

    ω [C] is omega + change. The buffer omega is one number, 1 until `plugin.admin.profile` sets it; the
    parameter change [C] starts at zero and is trained. They are separate because training in fp16 copies the
    parameters before the first batch, and would overwrite a parameter that profiling has set.

    Args:
        width: C.
    """

    omega: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("omega", torch.ones(()))
        self.change = nn.Parameter(torch.zeros(width))

    def forward(self, branch: Tensor, x: Tensor) -> Tensor:
        """The sum x·ω + f(x), [T, B, C].

        Args:
            branch: f(x), [T, B, C].
            x: the input of the branch, [T, B, C].
        """
        return branch + x * (self.omega + self.change)


@dataclass
class StackSettings:
    """The settings of an encoder or a decoder. Letters of shapes are those of `attention`."""

    family: str  # a name in FAMILIES
    attention: dict[str, Any]  # the fields of the family's settings
    vocab_size: int  # the number of symbols, V
    padding_idx: int  # the id of padding
    embed_dim: int  # C
    ffn_embed_dim: int  # the number of inner units of the feed-forward
    layers: int  # the number of layers
    attention_heads: int  # H, for families whose settings have no number of heads
    causal: bool = False  # whether no position sees a later position
    memory_dim: int | None = None  # the width of the encoder's output; None: no cross-attention
    input_dim: int | None = None  # the width of the embeddings, if not C
    output_dim: int | None = None  # the width of the output, if not C
    normalize_before: bool = False  # whether norms precede branches, else follow residual sums
    final_norm: bool = False  # whether there is a norm after the last layer
    embedding_norm: bool = False  # whether embeddings are normalised
    embedding_scale: float = 1.0  # the factor of word embeddings
    position_embedding: str = "sinusoidal"  # a choice of POSITION_EMBEDDINGS
    position_rows: int = 0  # the number of learned embeddings of positions
    positions: str | None = None  # that of `Attention`, for self-attention alone
    head_gate: str = "none"  # that of `Attention`
    output_scale: float = 1.0  # that of `Attention`
    activation: str = "relu"  # of the feed-forward, a name in ACTIVATIONS
    gated: bool = False  # whether the feed-forward is SwiGLU, which has its own activation
    rms_norm: bool = False  # whether the norms of layers and the final norm are RMSNorm
    shortcuts: bool = False  # whether residual sums are Admin's
    # The arguments of `AdaptiveEmbedding`, which replaces the embeddings; {}: it does not
    adaptive_input: dict[str, Any] = field(default_factory=dict)
    # The arguments of `AdaptiveSoftmax`, which replaces the output; {}: it does not
    adaptive_softmax: dict[str, Any] = field(default_factory=dict)
    # The fields of SigmaMoESettings; {}: an ordinary feed-forward
    sigma_moe: dict[str, Any] = field(default_factory=dict)
    expert_backend: str = "auto"  # the backend of `SigmaMoE`
    # Probabilities
    dropout: float = 0.0
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0
    output_dropout: float = 0.0

    def norm(self) -> nn.Module:
        """A new norm of width C, RMSNorm or LayerNorm."""
        return (nn.RMSNorm if self.rms_norm else nn.LayerNorm)(self.embed_dim, eps=1e-5)

    def build_attention(self, **options: Any) -> Attention:
        """Make an attention of the family.

        Args:
            options: self_attention and positions, or kdim and vdim of a cross-attention.
        """
        check_choice("family", self.family, FAMILIES)
        kind = FAMILIES[self.family]
        return kind.attention.from_settings(
            self.embed_dim,
            kind(**self.attention),
            num_heads=self.attention_heads,
            causal=self.causal,
            dropout=self.attention_dropout,
            head_gate=self.head_gate,
            output_scale=self.output_scale,
            **options,
        )


class LayerCache:
    """The caches of one layer for one generation.

    Args:
        layer: the layer.
        beam_size: the number of neighbouring rows that share a row of the memory.
    """

    def __init__(self, layer: "TransformerLayer", beam_size: int = 1):
        self.self_attn = layer.self_attn.new_cache()
        self.encoder_attn: KVCache | None = None
        self.all = [self.self_attn]  # the caches of all attentions of the layer
        if layer.encoder_attn is not None:
            self.encoder_attn = layer.encoder_attn.new_cache()
            self.encoder_attn.beam_size = beam_size
            self.all.append(self.encoder_attn)


class TransformerLayer(nn.Module):
    """A layer: self-attention, attention to a memory if there is one, and a feed-forward.

    Args:
        settings: the settings of the stack.
    """

    def __init__(self, settings: StackSettings):
        super().__init__()
        width = settings.embed_dim
        inner = settings.ffn_embed_dim
        self.normalize_before = settings.normalize_before
        self.causal = settings.causal
        self.dropout_module = nn.Dropout(settings.dropout)
        self.activation_dropout_module: nn.Module = nn.Dropout(settings.activation_dropout)
        self.self_attn = settings.build_attention(self_attention=True, positions=settings.positions)
        self.self_attn_layer_norm = settings.norm()
        self.encoder_attn: Attention | None = None
        if settings.memory_dim is not None:
            self.encoder_attn = settings.build_attention(
                kdim=settings.memory_dim, vdim=settings.memory_dim
            )
            self.encoder_attn_layer_norm = settings.norm()
        self.activation_fn: Callable[[Tensor], Tensor] = ACTIVATIONS[settings.activation]
        self.fc1: nn.Module
        self.fc2: nn.Module
        if settings.sigma_moe:
            experts = SigmaMoESettings(**settings.sigma_moe)
            self.fc1 = SigmaMoE(width, experts, self.activation_fn, settings.expert_backend)
            self.activation_fn = nn.Identity()
            self.activation_dropout_module = nn.Identity()
            self.fc2 = nn.Identity()
        elif settings.gated:
            self.fc1 = nn.Linear(width, 2 * inner, bias=False)
            self.activation_fn = swiglu
            self.fc2 = nn.Linear(inner, width, bias=False)
        else:
            self.fc1 = nn.Linear(width, inner)
            self.fc2 = nn.Linear(inner, width)
        self.final_layer_norm = settings.norm()
        self.shortcuts: nn.ModuleList | None = None
        if settings.shortcuts:
            num_branches = 2 if self.encoder_attn is None else 3
            self.shortcuts = nn.ModuleList(Shortcut(width) for _ in range(num_branches))

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        memory: Tensor | None = None,
        memory_padding: Tensor | None = None,
        token_ids: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Routings]:
        """One pass.

        Args:
            x: inputs, [B, T, C].
            padding: [B, T], or with a cache [B, S] for all positions so far; True = padding.
            memory, memory_padding: [B / beam, S, memory_dim] and [B / beam, S]; both may be None once the
                cache has their keys.
            token_ids: [B, T], for routers that select by a hash.
            cache: the cache of a generation.

        Returns:
            The outputs [B, T, C], and the routings of the layer.
        """
        self_attn = self.self_attn
        encoder_attn = self.encoder_attn
        query_padding = None if padding is None else padding[:, padding.size(1) - x.size(1) :]
        options: dict[str, Any] = {"with_routing": True}
        if "token_ids" in self_attn.reads:  # then the other attention has such a router, too
            options["token_ids"] = token_ids
        attend = functools.partial(
            self_attn,
            padding=padding,
            causal=self.causal,
            cache=cache and cache.self_attn,
            **options,
        )
        branches: list[tuple[nn.Module, Branch]] = [(self.self_attn_layer_norm, attend)]
        if encoder_attn is not None:
            attend = functools.partial(
                encoder_attn,
                memory=memory,
                padding=memory_padding,
                query_padding=query_padding,
                cache=cache and cache.encoder_attn,
                **options,
            )
            branches.append((self.encoder_attn_layer_norm, attend))
        feed_forward = functools.partial(self._feed_forward, padding=query_padding)
        branches.append((self.final_layer_norm, feed_forward))
        routings: Routings = ()
        for place, (norm, branch) in enumerate(branches):
            out, routed = branch(norm(x) if self.normalize_before else x)
            routings += routed
            if self.training:
                out = self.dropout_module(out)
            x = out + x if self.shortcuts is None else self.shortcuts[place](out, x)
            if not self.normalize_before:
                x = norm(x)
        return x, routings

    def _feed_forward(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Routings]:
        """Apply the feed-forward to x [B, T, C]. Returns the output and the routings."""
        fc1 = self.fc1
        if isinstance(fc1, SigmaMoE):
            routed: tuple[Tensor, Routings] = fc1(x, padding, with_routing=True)
            return routed
        x = self.activation_fn(fc1(x))
        return self.fc2(self.activation_dropout_module(x) if self.training else x), ()
