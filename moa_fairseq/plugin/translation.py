"""fairseq's translation model with mixtures of attention heads."""

import functools
from typing import Any

from fairseq.models.transformer import TransformerConfig, TransformerModel

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.admin import profile, unprofiled
from moa_fairseq.plugin.encoder_decoder import MixtureDecoder, MixtureEncoder
from moa_fairseq.plugin.model import MixtureModel, sum_over_workers


class MixtureTransformerModel(MixtureModel, TransformerModel):
    """fairseq's Transformer with a mixture of attention heads in place of every attention."""

    _begun = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """fairseq's; the first batch of a training sets the shortcuts of --initialization admin before."""
        if self.training and not self._begun:
            if unprofiled(self):
                profile(
                    self, functools.partial(super().forward, *args, **kwargs), sum_over_workers()
                )
            # Not before: the trainer goes on with the next batch where memory was short
            self._begun = True
        return super().forward(*args, **kwargs)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MixtureTransformerModel":
        """Build from command-line arguments or a hydra config.

        Raises:
            UserError: for impossible flags, and for --share-all-embeddings with two dictionaries.
        """
        args = cls.fill_defaults(args)
        if args.share_all_embeddings and task.source_dictionary != task.target_dictionary:
            raise UserError(
                "--share-all-embeddings needs one dictionary for both languages, but this data folder has "
                "two different dictionaries: preprocess with --joined-dictionary, or leave the flag out."
            )
        return cls.post_build(super().build_model(args, task), args)

    @classmethod
    def build_encoder(cls, args: Any, src_dict: Any, embed_tokens: Any) -> MixtureEncoder:
        return MixtureEncoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args: Any, tgt_dict: Any, embed_tokens: Any) -> MixtureDecoder:
        cfg = TransformerConfig.from_namespace(args)
        return MixtureDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)
