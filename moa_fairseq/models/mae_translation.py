"""MAE for translation: `--arch mae_transformer_base` and its relatives."""

import argparse

from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer.transformer_legacy import base_architecture

from moa_fairseq.models._flags import add_mae_args, set_mae_defaults
from moa_fairseq.models._gates import GatedModel
from moa_fairseq.models.translation import MixtureTransformerModel


@register_model("mae_transformer")
class MAETransformerModel(GatedModel, MixtureTransformerModel):
    """Encoder self-, decoder self- and cross-attention are mixtures of attentive experts (MAE §2.3).

    Each has a gate of its own. `--mae-dropped-heads 2` makes MAE-6 of MAE-7, `--mae-gate uniform`
    UNI-MAE; whether training alternates or is joint (NOBCD) is the task's choice (`translation_bcd`).
    """

    @classmethod
    def add_family_args(cls, parser: argparse.ArgumentParser) -> None:
        add_mae_args(parser)

    @classmethod
    def set_defaults(cls, args: argparse.Namespace) -> None:
        mae_transformer_base(args)


@register_model_architecture("mae_transformer", "mae_transformer_base")
def mae_transformer_base(args: argparse.Namespace) -> None:
    """MAE-7 over transformer-base: 8 heads, 6 + 6 layers, width 512, feed-forward 2048 (MAE App. A)."""
    set_mae_defaults(args)
    base_architecture(args)


@register_model_architecture("mae_transformer", "mae_transformer_iwslt_de_en")
def mae_transformer_iwslt_de_en(args: argparse.Namespace) -> None:
    """MAE-7 over transformer-base with feed-forward 1024 (MAE App. A).

    fairseq's transformer_iwslt_de_en has 4 heads; MAE-7 has 8, of seven of which an expert is made.
    """
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 1024)
    args.decoder_ffn_embed_dim = getattr(args, "decoder_ffn_embed_dim", 1024)
    mae_transformer_base(args)


@register_model_architecture("mae_transformer", "mae_transformer_tiny")
def mae_transformer_tiny(args: argparse.Namespace) -> None:
    """MAE-7 over the 4 + 4 layers, width 128, FFN 256 of Multi30k's Transformer-Tiny (Wu et al. 2021).

    8 heads of 16 dimensions, where that model has 4 of 32; the gates' hidden layer is narrower in the
    same proportion as the model, 64 for a width of 128.
    """
    args.encoder_embed_dim = getattr(args, "encoder_embed_dim", 128)
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 256)
    args.encoder_layers = getattr(args, "encoder_layers", 4)
    args.decoder_ffn_embed_dim = getattr(args, "decoder_ffn_embed_dim", 256)
    args.decoder_layers = getattr(args, "decoder_layers", 4)
    args.gate_hidden_dim = getattr(args, "gate_hidden_dim", 64)
    mae_transformer_base(args)
