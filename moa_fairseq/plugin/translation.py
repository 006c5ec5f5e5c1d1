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
        """fairseq's `forward`; in a training, --initialization admin sets the shortcuts before the first."""
        if self.training and not self._begun:
            if unprofiled(self):
                profile(
                    self, functools.partial(super().forward, *args, **kwargs), sum_over_workers()
                )
            # This is set last: if memory is short, the trainer continues with the next batch, which then
            # counts.
            self._begun = True
        return super().forward(*args, **kwargs)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MixtureTransformerModel":
        """Build from command-line arguments or a hydra config.

        Raises:
            UserError: if flags are impossible, or --share-all-embeddings is given with two dictionaries.
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
