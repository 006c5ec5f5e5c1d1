"""A whole Transformer as a plain module, with the parameters of fairseq's checkpoints.

Parameters are named as in fairseq. A tied matrix exists once: a stack or head without its own matrix gets it
from its caller.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.errors import check_choice
from moa_fairseq.layers.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.transformer_layer import (
    ACTIVATIONS,
    POSITION_EMBEDDINGS,
    LayerCache,
    Routings,
    StackSettings,
    TransformerLayer,
)


class TransformerStack(nn.Module):
    """Embeddings and layers: fairseq's encoder or decoder.

    Args:
        settings: the settings of the stack.
        own_embedding: whether the stack has its own embeddings.
        own_output: whether the stack has its own output matrix.
    """

    def __init__(
        self, settings: StackSettings, own_embedding: bool = True, own_output: bool = False
    ):
        super().__init__()
        self.settings = settings
        width = settings.embed_dim
        # transformers sets this and _gradient_checkpointing_func
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func: Callable[..., Any] | None = None
        input_dim = settings.input_dim or width
        output_dim = settings.output_dim or width
        self.embed_tokens: nn.Embedding | AdaptiveEmbedding | None = None
        if settings.adaptive_input:
            bands = settings.adaptive_input
            self.embed_tokens = AdaptiveEmbedding(
                **bands, output_dim=input_dim, padding_idx=settings.padding_idx
            )
        elif own_embedding:
            self.embed_tokens = _embedding(settings.vocab_size, input_dim, settings.padding_idx)
        self.embed_positions: nn.Embedding | None = None
        check_choice("position_embedding", settings.position_embedding, POSITION_EMBEDDINGS)
        if settings.position_embedding == "learned":
            self.embed_positions = _embedding(settings.position_rows, width, settings.padding_idx)
        self.project_in_dim: nn.Linear | None = None
        if input_dim != width:
            self.project_in_dim = nn.Linear(input_dim, width, bias=False)
        self.project_out_dim: nn.Linear | None = None
        if output_dim != width:
            self.project_out_dim = nn.Linear(width, output_dim, bias=False)
        self.layernorm_embedding = nn.LayerNorm(width) if settings.embedding_norm else None
        self.layers = nn.ModuleList(TransformerLayer(settings) for _ in range(settings.layers))
        self.layer_norm = settings.norm() if settings.final_norm else None
        self.dropout_module = nn.Dropout(settings.dropout)
        self.output_dropout_module = nn.Dropout(settings.output_dropout)
        self.adaptive_softmax: AdaptiveSoftmax | None = None
        if settings.adaptive_softmax:
            self.adaptive_softmax = AdaptiveSoftmax(output_dim, **settings.adaptive_softmax)
        self.output_projection: nn.Linear | None = None
        if own_output:
            self.output_projection = nn.Linear(output_dim, settings.vocab_size, bias=False)
            nn.init.normal_(self.output_projection.weight, std=output_dim**-0.5)

    def forward(
        self,
        ids: Tensor,
        padding: Tensor | None = None,
        memory: Tensor | None = None,
        memory_padding: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
        embedding: Tensor | None = None,
    ) -> tuple[Tensor, Routings]:
        """One pass.

        Args:
            ids: the ids of words, [B, T].
            padding: [B, T], or with caches [B, S] for all positions so far; True = padding; None: no padding.
            memory, memory_padding: those of `TransformerLayer.forward`.
            caches: one for each layer.
            embedding: embeddings [V, input_dim], for a stack without its own embeddings.

        Returns:
            The outputs [B, T, output_dim], after the final norm if there is one, and all routings.
        """
        settings = self.settings
        if self.embed_tokens is not None:
            x = settings.embedding_scale * self.embed_tokens(ids)
        else:
            assert embedding is not None
            x = settings.embedding_scale * F.embedding(ids, embedding, settings.padding_idx)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if settings.position_embedding != "none":
            length = caches[0].self_attn.length if caches else 0
            x = x + self._positions(ids, padding, length, x.dtype)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        if self.training:
            x = self.dropout_module(x)
        routings: list[Routing] = []
        for number, layer in enumerate(self.layers):
            run: Callable[..., Any] = layer
            if self.gradient_checkpointing and self.training and self._gradient_checkpointing_func:
                run = functools.partial(self._gradient_checkpointing_func, layer.__call__)
            cache = caches[number] if caches else None
            x, routed = run(x, padding, memory, memory_padding, ids, cache)
            routings.extend(routed)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        return x, tuple(routings)

    def logits(self, x: Tensor, embedding: Tensor | None = None) -> Tensor:
        """Apply the output layer.

        Args:
            x: the outputs of `forward`, [B, T, output_dim].
            embedding: the output matrix [V, output_dim], for a stack without embeddings and output matrix.

        Returns:
            Logits [B, T, V]; with an adaptive softmax log-probabilities.
        """
        if self.training:
            x = self.output_dropout_module(x)
        if self.adaptive_softmax is not None:
            words = self.embed_tokens if self.settings.adaptive_softmax.get("tied") else None
            log_probabilities: Tensor = self.adaptive_softmax(x, words)
            return log_probabilities
        if self.output_projection is not None:
            projected: Tensor = self.output_projection(x)
            return projected
        if isinstance(self.embed_tokens, nn.Embedding):
            embedding = self.embed_tokens.weight
        assert embedding is not None
        return F.linear(x, embedding)

    def new_caches(self, beam_size: int = 1) -> list[LayerCache]:
        """Make empty caches for one generation, one for each layer.

        Args:
            beam_size: the number of neighbouring rows that share a row of the memory.
        """
        layers: list[Any] = [*self.layers]
        return [LayerCache(layer, beam_size) for layer in layers]

    def _positions(
        self, ids: Tensor, padding: Tensor | None, held: int, dtype: torch.dtype
    ) -> Tensor:
        """Embeddings of positions, [B or 1, T, C]; positions skip padding, and begin at padding_idx + 1."""
        first = self.settings.padding_idx + 1
        if padding is None:
            place = torch.arange(first + held, first + held + ids.size(1), device=ids.device)[None]
        else:
            real = (~padding).long()
            if padding.size(1) == ids.size(1):  # without the cached positions
                first += held
            place = (real.cumsum(1) - 1 + first) * real + self.settings.padding_idx * (1 - real)
            place = place[:, -ids.size(1) :]
        if self.embed_positions is not None:
            learned: Tensor = self.embed_positions(place)
            return learned
        half = self.settings.embed_dim // 2
        speed = torch.arange(half, device=ids.device, dtype=torch.float32) * -(
            math.log(10000) / (half - 1)
        )
        angle = place.unsqueeze(-1).float() * speed.exp()  # in float32, as in fairseq
        table = torch.cat([angle.sin(), angle.cos()], -1)
        if self.settings.embed_dim % 2:
            table = F.pad(table, (0, 1))
        if padding is not None:
            table = table.masked_fill((place == self.settings.padding_idx).unsqueeze(-1), 0.0)
        return table.to(dtype)


def _embedding(rows: int, width: int, padding_idx: int) -> nn.Embedding:
    embedding = nn.Embedding(rows, width, padding_idx)
    nn.init.normal_(embedding.weight, std=width**-0.5)
    with torch.no_grad():
        embedding.weight[padding_idx] = 0
    return embedding


class MaskedLMHead(nn.Module):
    """RoBERTa's head: W · norm(act(dense(x))) + b.

    Args:
        settings: the settings of the stack below the head.
        own_weight: whether the head has its own W.
    """

    def __init__(self, settings: StackSettings, own_weight: bool = False):
        super().__init__()
        self.dense = nn.Linear(settings.embed_dim, settings.embed_dim)
        self.activation_fn = ACTIVATIONS[settings.activation]
        self.layer_norm = nn.LayerNorm(settings.embed_dim)
        self.bias = nn.Parameter(torch.zeros(settings.vocab_size))
        self.weight: nn.Parameter | None = None
        if own_weight:
            self.weight = nn.Parameter(torch.empty(settings.vocab_size, settings.embed_dim))
            nn.init.normal_(self.weight, std=settings.embed_dim**-0.5)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Logits [B, T, V].

        Args:
            x: the outputs of the stack, [B, T, C].
            embedding: W [V, C], for a head without its own W.
        """
        x = self.layer_norm(self.activation_fn(self.dense(x)))
        return F.linear(x, embedding if self.weight is None else self.weight) + self.bias


class MixtureTransformer(nn.Module):
    """A translation model, or a causal or masked language model.

    Args:
        encoder, decoder: the settings of the stacks, at least one. An encoder alone is a masked language
            model, a decoder alone a causal language model.
        shared_embedding: whether the decoder has the embeddings of the encoder.
        own_output: whether the output layer has its own matrix; otherwise it has the embeddings.
    """

    def __init__(
        self,
        encoder: StackSettings | None,
        decoder: StackSettings | None,
        shared_embedding: bool = False,
        own_output: bool = False,
    ):
        super().__init__()
        self.own_output = own_output
        self.encoder: nn.Module | None = None
        self.decoder: TransformerStack | None = None
        if decoder is not None:
            self.decoder = TransformerStack(decoder, not shared_embedding, own_output)
        if encoder is not None:
            stack = TransformerStack(encoder)
            if decoder is not None:
                self.encoder = stack
            else:
                self.encoder = nn.Module()
                self.encoder.sentence_encoder = stack
                self.encoder.lm_head = MaskedLMHead(encoder, own_output)

    @property
    def embedding(self) -> Tensor:
        """The word embeddings [V, input_dim] of the encoder, or of a decoder alone."""
        stack = self.decoder if self.encoder is None else self.source_stack
        assert stack is not None and isinstance(stack.embed_tokens, nn.Embedding)
        return stack.embed_tokens.weight

    @property
    def source_stack(self) -> TransformerStack:
        """The encoder's stack."""
        assert self.encoder is not None
        stack = self.encoder if self.decoder is not None else self.encoder.sentence_encoder
        assert isinstance(stack, TransformerStack)
        return stack

    def forward(
        self,
        ids: Tensor,
        decoder_ids: Tensor | None = None,
        padding: Tensor | None = None,
        decoder_padding: Tensor | None = None,
    ) -> tuple[Tensor, Routings]:
        """One pass over whole sentences.

        Args:
            ids: the inputs of the encoder, or of a decoder alone, [B, S].
            decoder_ids: the inputs of the decoder in translation, [B, T], which begin with the start symbol.
            padding, decoder_padding: the padding of the two, [B, S] and [B, T], True = padding; None: no
                padding.

        Returns:
            Logits [B, S or T, V], and all routings.
        """
        if self.encoder is None:
            return self.decode(ids, padding)
        x, routings = self.source_stack(ids, padding)
        if self.decoder is None:
            head = self.encoder.lm_head
            assert isinstance(head, MaskedLMHead)
            return head(x, self.embedding), routings
        assert decoder_ids is not None
        logits, routed = self.decode(decoder_ids, decoder_padding, x, padding)
        return logits, routings + routed

    def decode(
        self,
        ids: Tensor,
        padding: Tensor | None = None,
        memory: Tensor | None = None,
        memory_padding: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> tuple[Tensor, Routings]:
        """The decoder's logits [B, T, V] and routings.

        Args:
            ids, padding, memory, memory_padding, caches: those of `TransformerStack.forward`.
        """
        assert self.decoder is not None
        embedding = self.embedding if self.decoder.embed_tokens is None else None
        x, routings = self.decoder(ids, padding, memory, memory_padding, caches, embedding)
        return self.decoder.logits(x, embedding), routings
