"""MAE (arXiv 2005.06537): `--arch mae_transformer_base`, `mae_transformer_lm_wiki103` and their relatives."""

from fairseq.models.transformer_lm import transformer_lm_baevski_wiki103

from moa_fairseq.plugin.archs import register_models
from moa_fairseq.plugin.models.dense import IWSLT, MEDIUM_ROBERTA, TINY

# Every attention has a gate of its own (section 2.3). `--mae-dropped-heads 2` turns MAE-7 into MAE-6,
# `--mae-gate uniform` into UNI-MAE. The task (`translation_bcd`) chooses alternating or joint (NOBCD)
# training.
register_models(
    "mae",
    "mae_transformer",
    {
        # MAE-7 over transformer-base: 8 heads, 6 + 6 layers, width 512, feed-forward 2048 (MAE App. A)
        "mae_transformer_base": {},
        # Feed-forward 1024 (MAE App. A). fairseq's transformer_iwslt_de_en has 4 heads, but MAE-7 needs 8.
        "mae_transformer_iwslt_de_en": IWSLT,
        # 8 heads of 16 dimensions, where Transformer-Tiny has 4 of 32; the gates' hidden layer is narrower in
        # the same proportion as the model
        "mae_transformer_tiny": TINY | {"gate_hidden_dim": 64},
    },
)
# The paper has no masked language model; a dense one can be converted to these.
register_models("mae", "mae_roberta", {"mae_roberta_medium": MEDIUM_ROBERTA})

_LM = {"gate_window": 100}  # a gate averages the latest 100 inputs (MAE Appendix A)
register_models(
    "mae",
    "mae_transformer_lm",
    {
        "mae_transformer_lm_base": _LM,
        # Baevski & Auli's WikiText-103 model: 16 layers, width 1024, 8 heads (MAE section 4.3)
        "mae_transformer_lm_wiki103": _LM,
    },
    {"mae_transformer_lm_wiki103": transformer_lm_baevski_wiki103},
)
