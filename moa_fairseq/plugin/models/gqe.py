"""GQE (arXiv 2606.20945): `--arch gqe_transformer_base`, `gqe_lm_base` and their relatives."""

from moa_fairseq.plugin.archs import register_models
from moa_fairseq.plugin.models.dense import IWSLT, TINY


def _sizes(*, groups: int, per_token: int, experts: int, dim: int) -> dict:
    sizes = {"experts_per_token": per_token, "num_experts": experts, "expert_dim": dim}
    return {"gqe_groups": groups} | sizes


# 16 query heads, of which each token has 8 and the shared one, as in the paper. The projections of a layer of
# width 512 have (kG + 1) + 2G + (kG + 2) = 27 heads of 72: the dense attention's cost within 5 %.
BASE = _sizes(groups=4, per_token=2, experts=4, dim=72)
# 8 query heads, 4 + 1 of them for each token: 5 + 4 + 6 = 15 heads of 32, where the dense attention has 16
register_models(
    "gqe",
    "gqe_transformer",
    {
        "gqe_transformer_base": BASE,
        "gqe_transformer_iwslt_de_en": BASE | IWSLT,
        "gqe_transformer_tiny": _sizes(groups=2, per_token=2, experts=4, dim=32) | TINY,
    },
)
# The paper's language model has 16 query heads in 8 groups, one selected per group, and about 250M
# parameters. The paper does not print its width and layers; the sizes here make 254M with 50,257 symbols.
PAPER = _sizes(groups=8, per_token=1, experts=2, dim=64) | {
    "decoder_layers": 18,
    "decoder_embed_dim": 1024,
    "decoder_ffn_embed_dim": 4096,
    "decoder_normalize_before": True,
    "share_decoder_input_output_embed": True,
    "positions": "rope",
}
register_models("gqe", "gqe_lm", {"gqe_lm_base": BASE, "gqe_rope_lm_250m": PAPER})
