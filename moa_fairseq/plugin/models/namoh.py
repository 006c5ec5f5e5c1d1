"""NAMOH (2026): `--arch namoh_transformer_base`, `namoh_lm_base` and their relatives."""

from moa_fairseq.plugin.archs import register_models
from moa_fairseq.plugin.models.dense import IWSLT, TINY


def _sizes(heads: int, per_token: int, dim: int) -> dict:
    return {"num_experts": heads, "experts_per_token": per_token, "expert_dim": dim}


# Twice the heads of dense attention, half of them for each token, as in the paper's 32A16: equal projections,
# twice the parameters, and half of the scores.
BASE = _sizes(16, 8, 64)
register_models(
    "namoh",
    "namoh_transformer",
    {
        "namoh_transformer_base": BASE,
        "namoh_transformer_iwslt_de_en": BASE | IWSLT,
        "namoh_transformer_tiny": _sizes(8, 4, 32) | TINY,
    },
)
register_models("namoh", "namoh_lm", {"namoh_lm_base": BASE})
