"""MoH (arXiv 2410.11842): `--arch moh_transformer_base`, `moh_transformer_lm_small` and their relatives."""

from fairseq.models import register_model
from fairseq.models.roberta.model import base_architecture as roberta_architecture
from fairseq.models.transformer.transformer_legacy import base_architecture, transformer_vaswani_wmt_en_de_big
from fairseq.models.transformer_lm import base_lm_architecture

from moa_fairseq.models.dense import FOUR_HEADS, IWSLT, MEDIUM_ROBERTA, TINY, TINY_ROBERTA
from moa_fairseq.transformer.archs import register_arch
from moa_fairseq.transformer.causal_lm import MixtureLanguageModel
from moa_fairseq.transformer.masked_lm import MixtureRobertaModel
from moa_fairseq.transformer.translation import MixtureTransformerModel


def _heads(shared: int, routed_per_token: int) -> dict:
    return {"moh_shared_heads": shared, "experts_per_token": routed_per_token}


# In all of these 75 % of the heads work; --moh-shared-heads and --experts-per-token set other shares.


@register_model("moh_transformer")
class MoHTransformerModel(MixtureTransformerModel):
    """Translation: encoder self-, decoder self- and cross-attention are mixtures of heads."""

    attention_family, default_arch = "moh", "moh_transformer_base"


register_arch("moh_transformer", "moh_transformer_base", base_architecture, _heads(2, 4))
register_arch("moh_transformer", "moh_transformer_big", transformer_vaswani_wmt_en_de_big, _heads(4, 8))
# 8 heads, as the other families' models of that size
register_arch("moh_transformer", "moh_transformer_iwslt_de_en", base_architecture, {**IWSLT, **_heads(2, 4)})
register_arch(
    "moh_transformer", "moh_transformer_tiny", base_architecture, {**TINY, **FOUR_HEADS, **_heads(2, 1)}
)


@register_model("moh_roberta")
class MoHRobertaModel(MixtureRobertaModel):
    """Masked language models."""

    attention_family, default_arch = "moh", "moh_roberta_medium"


register_arch("moh_roberta", "moh_roberta_medium", roberta_architecture, {**MEDIUM_ROBERTA, **_heads(2, 4)})
register_arch("moh_roberta", "moh_roberta_tiny", roberta_architecture, {**TINY_ROBERTA, **_heads(2, 1)})


@register_model("moh_transformer_lm")
class MoHLanguageModel(MixtureLanguageModel):
    """Causal language models (MoH §4.3)."""

    attention_family, default_arch = "moh", "moh_transformer_lm_base"


register_arch("moh_transformer_lm", "moh_transformer_lm_base", base_lm_architecture, _heads(2, 4))
# LLM-S of MoH's Table C
SMALL_LM = {
    "decoder_layers": 12,
    "decoder_embed_dim": 768,
    "decoder_ffn_embed_dim": 2048,
    "decoder_attention_heads": 12,
    "positions": "rope",
}
register_arch(
    "moh_transformer_lm", "moh_transformer_lm_small", base_lm_architecture, {**SMALL_LM, **_heads(4, 5)}
)
