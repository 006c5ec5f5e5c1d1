"""MoA for translation: `--arch moa_transformer_base` and its relatives."""

import argparse
from typing import Any

from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.models.transformer.transformer_legacy import base_architecture

from moa_fairseq.errors import UserError
from moa_fairseq.models._family import MixtureFamily
from moa_fairseq.models._flags import add_mixture_args, set_mixture_defaults
from moa_fairseq.models._layers import MixtureDecoder, MixtureEncoder, name_attentions


class MixtureTransformerModel(MixtureFamily, TransformerModel):
    """fairseq's Transformer with a mixture of attention heads in place of every attention."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MixtureTransformerModel":
        """Build from command-line arguments or a hydra config. Raises UserError for impossible flags."""
        args = cls.completed(args)
        _check_dictionaries(args, task)
        model = super().build_model(args, task)
        name_attentions(model)
        return model

    @classmethod
    def build_encoder(cls, args: Any, src_dict: Any, embed_tokens: Any) -> MixtureEncoder:
        return MixtureEncoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args: Any, tgt_dict: Any, embed_tokens: Any) -> MixtureDecoder:
        cfg = TransformerConfig.from_namespace(args)
        return MixtureDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


@register_model("moa_transformer")
class MoATransformerModel(MixtureTransformerModel):
    """MoA for translation (MoA §5.1): encoder self-, decoder self- and cross-attention, all of them."""

    @classmethod
    def add_family_args(cls, parser: argparse.ArgumentParser) -> None:
        add_mixture_args(parser)

    @classmethod
    def set_defaults(cls, args: argparse.Namespace) -> None:
        moa_transformer_base(args)


def _check_dictionaries(args: argparse.Namespace, task: Any) -> None:
    if args.share_all_embeddings and task.source_dictionary != task.target_dictionary:
        raise UserError(
            "--share-all-embeddings needs one dictionary for both languages, and this data folder has two "
            "different ones: preprocess with --joined-dictionary, or leave --share-all-embeddings out."
        )


@register_model_architecture("moa_transformer", "moa_transformer_base")
def moa_transformer_base(args: argparse.Namespace) -> None:
    """8K8E128D, 6 + 6 layers, width 512, feed-forward 2048 (MoA Table 5): 65M parameters on WMT14 En-De."""
    set_mixture_defaults(args, num_experts=8, per_token=8, dim=128)
    base_architecture(args)


@register_model_architecture("moa_transformer", "moa_transformer_big")
def moa_transformer_big(args: argparse.Namespace) -> None:
    """16K32E256D: 200M parameters. Width and layers are the base model's (MoA Table 5)."""
    set_mixture_defaults(args, num_experts=32, per_token=16, dim=256)
    moa_transformer_base(args)


# MoA Table 3: row → (K, E, D)
ABLATIONS = {
    "a": (8, 8, 256),
    "b": (8, 16, 256),
    "c": (8, 32, 64),
    "d": (8, 32, 128),
    "e": (8, 32, 256),
    "f": (4, 32, 256),
}


def _register_ablation(row: str, per_token: int, num_experts: int, dim: int) -> None:
    def architecture(args: argparse.Namespace) -> None:
        set_mixture_defaults(args, num_experts, per_token, dim)
        moa_transformer_base(args)

    architecture.__name__ = f"moa_transformer_ablation_{row}"
    register_model_architecture("moa_transformer", architecture.__name__)(architecture)


for _row, _sizes in ABLATIONS.items():
    _register_ablation(_row, *_sizes)


@register_model_architecture("moa_transformer", "moa_transformer_iwslt_de_en")
def moa_transformer_iwslt_de_en(args: argparse.Namespace) -> None:
    """The base model's attention (8K8E128D) in the body of fairseq's transformer_iwslt_de_en (FFN 1024)."""
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 1024)
    args.decoder_ffn_embed_dim = getattr(args, "decoder_ffn_embed_dim", 1024)
    moa_transformer_base(args)


@register_model_architecture("moa_transformer", "moa_transformer_tiny")
def moa_transformer_tiny(args: argparse.Namespace) -> None:
    """4K8E48D in the 4 + 4 layers, width 128, FFN 256 of Multi30k's Transformer-Tiny (Wu et al. 2021).

    (K + 1) · D = 240 against the dense attention's 2 · 128: the MACs of both are within 5 %.
    """
    args.encoder_embed_dim = getattr(args, "encoder_embed_dim", 128)
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 256)
    args.encoder_layers = getattr(args, "encoder_layers", 4)
    args.decoder_ffn_embed_dim = getattr(args, "decoder_ffn_embed_dim", 256)
    args.decoder_layers = getattr(args, "decoder_layers", 4)
    set_mixture_defaults(args, num_experts=8, per_token=4, dim=48)
    moa_transformer_base(args)
