"""fairseq's Transformer language model with mixtures of attention heads."""

import argparse
from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

from moa_fairseq.plugin.encoder_decoder import MixtureDecoder
from moa_fairseq.plugin.model import MixtureModel

SWITCHES = {
    "--gated-feed-forward": "SwiGLU in place of the feed-forward: silu(x W_1) ⊙ (x W_3), three matrices of "
    "--decoder-ffn-embed-dim",
    "--rms-norm": "RMSNorm in place of the layers' and the decoder's layer norms",
}


class MixtureLanguageModel(MixtureModel, TransformerLanguageModel):
    """fairseq's Transformer language model with a mixture in place of every self-attention."""

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add the parent's flags, without the defaults, which would hide an architecture's values."""
        gen_parser_from_dataclass(parser, TransformerLanguageModelConfig(), delete_default=True)
        cls.add_mixture_args(parser)
        parser.add_argument(
            "--output-dropout",
            type=float,
            default=argparse.SUPPRESS,
            help="dropout probability of the last layer's output; default: the architecture's, or 0",
        )
        for flag, text in SWITCHES.items():
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MixtureLanguageModel":
        """Build from command-line arguments or a hydra config.

        The parent builds embeddings and decoder at once and has no hook for the decoder. So the parent builds
        a decoder without layers, and the mixture's decoder is then built on the same embeddings.

        Raises:
            UserError: for impossible flags.
        """
        args = cls.fill_defaults(args)
        layers = args.decoder_layers
        args.decoder_layers = 0
        bare = super().build_model(args, task).decoder
        args.decoder_layers = layers
        cfg = TransformerConfig.from_namespace(args)
        decoder = MixtureDecoder(cfg, bare.dictionary, bare.embed_tokens, no_encoder_attn=True)
        if args.initialization == "depth-scaled" and not (
            decoder.adaptive_softmax or decoder.share_input_output_embed
        ):
            # SwitchHead's authors kept torch's initial weights.
            decoder.output_projection.reset_parameters()
        model = cls(decoder)
        return cls.post_build(model, args)
