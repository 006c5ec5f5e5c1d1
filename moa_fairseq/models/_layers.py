"""fairseq's encoder and decoder with another attention, through their `build_*` hooks."""

import functools
from typing import Any, Callable, Dict, Optional

import torch.utils.checkpoint
from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from moa_fairseq.attention.collector import query_padding
from moa_fairseq.attention.core import mark_causal
from moa_fairseq.attention.incremental import IncrementalAttention
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.moa import MixtureOfAttention


def build_attention(cfg: Any, embed_dim: int, decoder: bool = False, **role: Any) -> nn.Module:
    """The attention module of the family that `cfg.attention_family` names.

    role: whether it is self- or cross-attention, as fairseq's attention takes it; decoder: whether it
    stands in a decoder, where nothing may look at later queries.
    """
    return ATTENTIONS[getattr(cfg, "attention_family", "moa")](cfg, embed_dim, decoder, **role)


def _build_moa(cfg: Any, embed_dim: int, decoder: bool, **role: Any) -> nn.Module:
    return MixtureOfAttention(
        embed_dim,
        num_experts=cfg.num_experts,
        experts_per_token=cfg.experts_per_token,
        expert_dim=cfg.expert_dim,
        dropout=cfg.attention_dropout,
        bias=cfg.expert_bias,
        renormalize=cfg.router_renormalize,
        routing_noise=cfg.routing_noise,
        backend=cfg.expert_backend,
        **role,
    )


def _build_mae(cfg: Any, embed_dim: int, decoder: bool, **role: Any) -> nn.Module:
    side = cfg.decoder if decoder else cfg.encoder
    return MixtureOfAttentiveExperts(
        embed_dim,
        side.attention_heads,
        dropped_heads=cfg.mae_dropped_heads,
        gate=cfg.mae_gate,
        dropout=cfg.attention_dropout,
        causal=decoder,
        gate_window=cfg.gate_window,
        gate_hidden_dim=cfg.gate_hidden_dim,
        gate_dropout=cfg.gate_dropout,
        gate_norm=cfg.gate_norm,
        evaluate_with=cfg.mae_evaluate_with,
        evaluate_seed=cfg.mae_evaluate_seed,
        **role,
    )


ATTENTIONS: Dict[str, Callable[..., nn.Module]] = {"moa": _build_moa, "mae": _build_mae}


class MixtureEncoderLayer(TransformerEncoderLayerBase):
    """An encoder layer whose self-attention is a mixture."""

    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        return build_attention(cfg, embed_dim, self_attention=True)

    def forward(self, x: Tensor, encoder_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor] = None):
        with query_padding(encoder_padding_mask):
            return super().forward(x, encoder_padding_mask, attn_mask)


class MixtureDecoderLayer(TransformerDecoderLayerBase):
    """A decoder layer whose self- and cross-attention are mixtures."""

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        return build_attention(cfg, embed_dim, decoder=True, self_attention=not cfg.cross_self_attention)

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        return build_attention(
            cfg,
            embed_dim,
            decoder=True,
            encoder_decoder_attention=True,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
        )

    def forward(self, x: Tensor, *args: Any, self_attn_padding_mask: Optional[Tensor] = None, **kwargs: Any):
        # The queries of the cross-attention are the target's: fairseq does not pass their padding on.
        with query_padding(self_attn_padding_mask):
            return super().forward(x, *args, self_attn_padding_mask=self_attn_padding_mask, **kwargs)


def _finish_layer(layer: nn.Module, cfg: Any) -> nn.Module:
    """Activation checkpointing and FSDP, as fairseq's own `build_*_layer` adds them.

    Checkpointing is torch's non-reentrant one: fairseq's runs the first forward pass without a graph,
    and the auxiliary losses of that pass would reach no router.
    """
    if cfg.checkpoint_activations:
        layer.forward = functools.partial(
            torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False
        )
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


class MixtureEncoder(TransformerEncoderBase):
    """fairseq's Transformer encoder over `MixtureEncoderLayer`s."""

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        return _finish_layer(MixtureEncoderLayer(cfg, return_fc=self.return_fc), cfg)


class MixtureDecoder(TransformerDecoderBase):
    """fairseq's Transformer decoder over `MixtureDecoderLayer`s."""

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        return mark_causal(super().buffered_future_mask(tensor))

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        return _finish_layer(MixtureDecoderLayer(cfg, no_encoder_attn), cfg)


def name_attentions(model: nn.Module) -> None:
    """Tell every attention its path in the model, under which its routing decisions are reported."""
    for name, module in model.named_modules():
        if isinstance(module, IncrementalAttention):
            module.name = name
