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
    """The settings of an encoder or a decoder. Letters of shapes as in `attention`; V is the vocabulary size.

    Args:
        family, attention: a name in FAMILIES, and the fields of the family's settings.
        vocab_size, padding_idx: V, and the id of padding.
        embed_dim, ffn_embed_dim, layers, attention_heads: C, and the numbers of inner units, layers and
            heads.
        causal: whether no position sees a later position.
        memory_dim: the width of the encoder's output, to which every layer attends; None: no cross-attention.
        input_dim, output_dim: the widths of the embeddings and of the output, if not C.
        normalize_before, final_norm: whether norms are before the branches (else after the residual sums),
            and whether there is a norm after the last layer.
        embedding_norm, embedding_scale: whether embeddings are normalised; the factor of word embeddings.
        position_embedding, position_rows: a choice of POSITION_EMBEDDINGS; the number of learned embeddings.
        positions, head_gate, output_scale: those of `Attention`; positions are for self-attention alone.
        activation, gated, rms_norm, shortcuts: the activation of the feed-forward; whether it is SwiGLU
            instead; whether the norms of layers and the final norm are RMSNorm; whether residual sums are
            Admin's.
        adaptive_input, adaptive_softmax: arguments of `AdaptiveEmbedding` and `AdaptiveSoftmax`, which
            replace embeddings and output; {}: they do not.
        sigma_moe, expert_backend: the fields of SigmaMoESettings ({}: an ordinary feed-forward), and its
            backend.
        dropout, activation_dropout, attention_dropout, output_dropout: probabilities.
    """

    family: str
    attention: dict[str, Any]
    vocab_size: int
    padding_idx: int
    embed_dim: int
    ffn_embed_dim: int
    layers: int
    attention_heads: int
    causal: bool = False
    memory_dim: int | None = None
    input_dim: int | None = None
    output_dim: int | None = None
    normalize_before: bool = False
    final_norm: bool = False
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    position_embedding: str = "sinusoidal"
    position_rows: int = 0
    positions: str | None = None
    head_gate: str = "none"
    output_scale: float = 1.0
    activation: str = "relu"
    gated: bool = False
    rms_norm: bool = False
    shortcuts: bool = False
    adaptive_input: dict[str, Any] = field(default_factory=dict)
    adaptive_softmax: dict[str, Any] = field(default_factory=dict)
    sigma_moe: dict[str, Any] = field(default_factory=dict)
    expert_backend: str = "auto"
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
        if layer.encoder_attn is not None:
            self.encoder_attn = layer.encoder_attn.new_cache()
            self.encoder_attn.beam_size = beam_size

    @property
    def all(self) -> tuple[KVCache, ...]:
        """The caches, one for each attention of the layer."""
        if self.encoder_attn is None:
            return (self.self_attn,)
        return (self.self_attn, self.encoder_attn)


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
            widths = {"kdim": settings.memory_dim, "vdim": settings.memory_dim}
            self.encoder_attn = settings.build_attention(**widths)
            self.encoder_attn_layer_norm = settings.norm()
        activation = ACTIVATIONS[settings.activation]
        self.activation_fn: Callable[[Tensor], Tensor] = activation
        self.fc1: nn.Module
        self.fc2: nn.Module
        if settings.sigma_moe:
            experts = SigmaMoESettings(**settings.sigma_moe)
            self.fc1 = SigmaMoE(width, experts, activation, settings.expert_backend)
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
            sums = 2 if self.encoder_attn is None else 3
            self.shortcuts = nn.ModuleList(Shortcut(width) for _ in range(sums))

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
        routings: list[Routing] = []
        queries = None if padding is None else padding[:, padding.size(1) - x.size(1) :]
        encoder_attn = self.encoder_attn
        layer_cache = cache and cache.self_attn
        # attention (None: feed-forward), norm, and keywords of the attention
        branches: list[tuple[Any, nn.Module, dict[str, Any]]] = [
            (
                self.self_attn,
                self.self_attn_layer_norm,
                {"padding": padding, "causal": self.causal, "cache": layer_cache},
            )
        ]
        if encoder_attn is not None:
            layer_cache = cache and cache.encoder_attn
            masks = {"padding": memory_padding, "query_padding": queries}
            branches.append(
                (
                    encoder_attn,
                    self.encoder_attn_layer_norm,
                    {"memory": memory, "cache": layer_cache, **masks},
                )
            )
        branches.append((None, self.final_layer_norm, {}))
        for place, (attention, norm, inputs) in enumerate(branches):
            out = norm(x) if self.normalize_before else x
            if attention is None:
                out = self._feed_forward(out, queries, routings)
            else:
                if "token_ids" in attention.reads:
                    inputs["token_ids"] = token_ids
                out, routed = attention(out, with_routing=True, **inputs)
                routings.extend(routed)
            if self.training:
                out = self.dropout_module(out)
            x = out + x if self.shortcuts is None else self.shortcuts[place](out, x)
            if not self.normalize_before:
                x = norm(x)
        return x, tuple(routings)

    def _feed_forward(self, x: Tensor, padding: Tensor | None, routings: list[Routing]) -> Tensor:
        """Apply the feed-forward to x [B, T, C], and append its routings to the list."""
        fc1 = self.fc1
        if isinstance(fc1, SigmaMoE):
            x, routed = fc1(x, padding, with_routing=True)
            routings.extend(routed)
            return x
        x = self.activation_fn(fc1(x))
        out: Tensor = self.fc2(self.activation_dropout_module(x) if self.training else x)
        return out
