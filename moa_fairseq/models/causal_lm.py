"""Causal language models with mixtures of attention heads: `--arch mae_transformer_lm_wiki103`."""

import argparse
from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import (
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
    base_lm_architecture,
    transformer_lm_baevski_wiki103,
)

from moa_fairseq.models._family import MixtureFamily
from moa_fairseq.models._flags import add_mae_args, set_mae_defaults
from moa_fairseq.models._gates import GatedModel
from moa_fairseq.models._layers import MixtureDecoder, name_attentions

GATE_WINDOW = 100  # MAE Appendix A


class MixtureLanguageModel(MixtureFamily, TransformerLanguageModel):
    """fairseq's Transformer language model with a mixture in place of every self-attention."""

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """The parent's flags without their defaults, which would hide those of an architecture."""
        gen_parser_from_dataclass(parser, TransformerLanguageModelConfig(), delete_default=True)
        cls.add_family_args(parser)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MixtureLanguageModel":
        """Build from command-line arguments or a hydra config. Raises UserError for impossible flags.

        The parent builds embeddings and decoder in one go and asks no hook for the decoder: it is made
        to build one without layers, and the mixture's decoder is then built on the same embeddings.
        """
        args = cls.completed(args)
        layers, args.decoder_layers = args.decoder_layers, 0
        bare = super().build_model(args, task).decoder
        args.decoder_layers = layers
        cfg = TransformerConfig.from_namespace(args)
        model = cls(MixtureDecoder(cfg, bare.dictionary, bare.embed_tokens, no_encoder_attn=True))
        name_attentions(model)
        return model


@register_model("mae_transformer_lm")
class MAELanguageModel(GatedModel, MixtureLanguageModel):
    """Every self-attention is a mixture of attentive experts; its gate averages the latest 100 inputs."""

    @classmethod
    def add_family_args(cls, parser: argparse.ArgumentParser) -> None:
        add_mae_args(parser)

    @classmethod
    def set_defaults(cls, args: argparse.Namespace) -> None:
        mae_transformer_lm(args)


@register_model_architecture("mae_transformer_lm", "mae_transformer_lm_base")
def mae_transformer_lm(args: argparse.Namespace) -> None:
    """MAE-7 over fairseq's transformer_lm: 6 layers, width 512, 8 heads."""
    if getattr(args, "gate_window", None) is None:
        args.gate_window = GATE_WINDOW
    set_mae_defaults(args)
    base_lm_architecture(args)


@register_model_architecture("mae_transformer_lm", "mae_transformer_lm_wiki103")
def mae_transformer_lm_wiki103(args: argparse.Namespace) -> None:
    """MAE-7 over Baevski & Auli's WikiText-103 model: 16 layers, width 1024, 8 heads (MAE §4.3)."""
    transformer_lm_baevski_wiki103(args)
    mae_transformer_lm(args)
