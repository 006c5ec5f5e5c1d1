"""Dense counterparts, `--arch dense_transformer_base` and relatives, and the sizes that mixtures share with
them.
"""

from fairseq.models.roberta.model import base_architecture as roberta_architecture
from fairseq.models.transformer.transformer_legacy import transformer_vaswani_wmt_en_de_big
from fairseq.models.transformer_lm import transformer_lm_baevski_wiki103

from moa_fairseq.plugin.archs import register_arch, register_models

# The feed-forward of fairseq's transformer_iwslt_de_en.
IWSLT = {"encoder_ffn_embed_dim": 1024, "decoder_ffn_embed_dim": 1024}

# Multi30k's Transformer-Tiny (Wu et al. 2021), without its attention.
TINY = {
    "encoder_embed_dim": 128,
    "encoder_ffn_embed_dim": 256,
    "encoder_layers": 4,
    "decoder_ffn_embed_dim": 256,
    "decoder_layers": 4,
}
# The heads of the dense Transformer-Tiny.
FOUR_HEADS = {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}


def _roberta(layers: int, embed_dim: int, ffn_embed_dim: int, attention_heads: int) -> dict:
    return {
        "encoder_layers": layers,
        "encoder_embed_dim": embed_dim,
        "encoder_ffn_embed_dim": ffn_embed_dim,
        "encoder_attention_heads": attention_heads,
        "max_positions": 128,  # MoA App. E: "we set the sequence length to be 128"
    }


def lm_body(layers: int, embed_dim: int, ffn_embed_dim: int) -> dict:
    """A causal language model of SwitchHead's Table 9, without its attention.

    Input and output embeddings are two matrices there: with one matrix the number of parameters is not the
    printed one. The dropout of embeddings, residuals and output, and the initial weights, are those of the
    authors' settings and code; the dropout of a feed-forward's inner units (App. A.5) has no effect on
    sigma-MoE. Positions are Transformer-XL's.

    Args:
        layers: the number of layers.
        embed_dim: the width; models of width 1,024 and more have twice the dropout of smaller ones.
        ffn_embed_dim: the number of inner units of a feed-forward.

    Returns:
        The values of flags, for `register_models`.
    """
    # App. A.5
    dropout = 0.2 if embed_dim >= 1024 else 0.1
    return {
        "decoder_layers": layers,
        "decoder_embed_dim": embed_dim,
        "decoder_ffn_embed_dim": ffn_embed_dim,
        "positions": "xl",
        "initialization": "depth-scaled",
        "no_scale_embedding": True,
        "dropout": dropout,
        "output_dropout": dropout,
        "activation_dropout": dropout,
        "attention_dropout": 0.0,
    }


MEDIUM_ROBERTA = _roberta(8, 512, 2048, 8)  # MoA §5.2, Table 5: 51.34M parameters when dense
TINY_ROBERTA = _roberta(4, 128, 512, 4)  # for small data and small machines

register_arch("roberta", "roberta_medium_wt103", roberta_architecture, MEDIUM_ROBERTA)
register_arch("roberta", "roberta_tiny", roberta_architecture, TINY_ROBERTA)


# fairseq's own models again, with the controls of studies: width of a head, dropped heads, size of the
# branch. The weights have the same names. Language models also have `--positions rope` and `--positions xl`.
register_models(
    "dense",
    "dense_transformer",
    {
        "dense_transformer_base": {},
        "dense_transformer_big": {},
        "dense_transformer_iwslt_de_en": IWSLT,
        "dense_transformer_tiny": TINY | FOUR_HEADS,
    },
    {"dense_transformer_big": transformer_vaswani_wmt_en_de_big},
)
register_models(
    "dense",
    "dense_roberta",
    {"dense_roberta_medium": MEDIUM_ROBERTA, "dense_roberta_tiny": TINY_ROBERTA},
)
register_models(
    "dense",
    "dense_transformer_lm",
    {"dense_transformer_lm_base": {}, "dense_transformer_lm_wiki103": {}},
    {"dense_transformer_lm_wiki103": transformer_lm_baevski_wiki103},
)
