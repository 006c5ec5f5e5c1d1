"""fairseq's RoBERTa with mixtures of attention heads."""

import argparse
from typing import Any, ClassVar

from fairseq.models.roberta.model import RobertaEncoder, RobertaModel
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import nn

from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.sigma_moe import SigmaMoE
from moa_fairseq.plugin.encoder_decoder import MixtureEncoder
from moa_fairseq.plugin.families import initialize
from moa_fairseq.plugin.model import MixtureModel


class MixtureRobertaEncoder(RobertaEncoder):
    """RoBERTa's encoder with a mixture of attention heads in every layer, and otherwise unchanged."""

    def build_encoder(
        self, args: argparse.Namespace, dictionary: Any, embed_tokens: nn.Embedding
    ) -> nn.Module:
        encoder = MixtureEncoder(TransformerConfig.from_namespace(args), dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder


class MixtureRobertaModel(MixtureModel, RobertaModel):
    """fairseq's RoBERTa with a mixture in place of its self-attention (MoA §5.2).

    Everything else is RoBERTa's: post-norm layers, the tied LM head, classification heads
    (`register_classification_head`), checkpoints with heads, `from_pretrained`, `fill_mask`.
    """

    refused: ClassVar[dict[str, Any]] = {
        "quant_noise_pq": 0,
        "mha_reg_scale_factor": 0,
        "mha_heads_to_keep": -1,
    }

    def __init__(self, args: argparse.Namespace, encoder: MixtureRobertaEncoder) -> None:
        super().__init__(args, encoder)
        for module in self.modules():
            if isinstance(module, (Attention, SigmaMoE)):
                module.restore_initialization()
                initialize(module, args, args.encoder_layers)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MixtureRobertaModel":
        """Build from command-line arguments or a hydra config.

        Raises:
            UserError: for impossible flags.
        """
        args = cls.fill_defaults(args)
        return cls.post_build(cls(args, MixtureRobertaEncoder(args, task.source_dictionary)), args)
