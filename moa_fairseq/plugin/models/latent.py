"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): `--arch latent_transformer_lm_base`."""

from moa_fairseq.plugin.archs import register_models

# The body of dense_transformer_lm_base; the latent has the width of four heads, the rotary key that of half a
# head, as in DeepSeek-V2: 1.4 % more parameters in the attention than the dense model has.
register_models(
    "latent", "latent_transformer_lm", {"latent_transformer_lm_base": {"positions": "rope"}}
)
