"""MoH (arXiv 2410.11842): `--arch moh_transformer_base`, `moh_transformer_lm_small` and their relatives."""

from fairseq.models.transformer.transformer_legacy import transformer_vaswani_wmt_en_de_big

from moa_fairseq.plugin.archs import register_models
from moa_fairseq.plugin.models.dense import FOUR_HEADS, IWSLT, MEDIUM_ROBERTA, TINY, TINY_ROBERTA


def _heads(shared: int, routed_per_token: int) -> dict:
    return {"moh_shared_heads": shared, "experts_per_token": routed_per_token}


# In all of these 75 % of the heads work; --moh-shared-heads and --experts-per-token set other shares.
register_models(
    "moh",
    "moh_transformer",
    {
        "moh_transformer_base": _heads(2, 4),
        "moh_transformer_big": _heads(4, 8),
        "moh_transformer_iwslt_de_en": IWSLT | _heads(2, 4),  # 8 heads, as the other families have
        "moh_transformer_tiny": TINY | FOUR_HEADS | _heads(2, 1),
    },
    {"moh_transformer_big": transformer_vaswani_wmt_en_de_big},
)
register_models(
    "moh",
    "moh_roberta",
    {
        "moh_roberta_medium": MEDIUM_ROBERTA | _heads(2, 4),
        "moh_roberta_tiny": TINY_ROBERTA | _heads(2, 1),
    },
)


def _llm(layers: int, embed_dim: int, ffn_embed_dim: int, heads: int) -> dict:
    """A causal language model of MoH's Table C (section 4.3), without its attention."""
    return {
        "decoder_layers": layers,
        "decoder_embed_dim": embed_dim,
        "decoder_ffn_embed_dim": ffn_embed_dim,
        "decoder_attention_heads": heads,
        "positions": "rope",
        "gated_feed_forward": True,
        "rms_norm": True,
    }


register_models(
    "moh",
    "moh_transformer_lm",
    {
        "moh_transformer_lm_base": _heads(2, 4),
        "moh_transformer_lm_small": _llm(12, 768, 2048, 12) | _heads(4, 5),  # LLM-S
        "moh_transformer_lm_large": _llm(24, 1536, 4096, 16) | _heads(6, 6),  # LLM-B
    },
)
