"""MAE (arXiv 2005.06537): `--arch mae_transformer_base`, `mae_transformer_lm_wiki103` and their relatives."""

from fairseq.models import register_model
from fairseq.models.roberta.model import base_architecture as roberta_architecture
from fairseq.models.transformer.transformer_legacy import base_architecture
from fairseq.models.transformer_lm import base_lm_architecture, transformer_lm_baevski_wiki103

from moa_fairseq.models.dense import IWSLT, MEDIUM_ROBERTA, TINY
from moa_fairseq.transformer.archs import register_arch
from moa_fairseq.transformer.causal_lm import MixtureLanguageModel
from moa_fairseq.transformer.masked_lm import MixtureRobertaModel
from moa_fairseq.transformer.translation import MixtureTransformerModel


@register_model("mae_transformer")
class MAETransformerModel(MixtureTransformerModel):
    """Encoder self-, decoder self- and cross-attention are mixtures of attentive experts (MAE §2.3).

    Each has a gate of its own. `--mae-dropped-heads 2` turns MAE-7 into MAE-6, `--mae-gate uniform` into
    UNI-MAE. The task (`translation_bcd`) chooses between alternating and joint (NOBCD) training.
    """

    attention_family, default_arch = "mae", "mae_transformer_base"


# MAE-7 over transformer-base: 8 heads, 6 + 6 layers, width 512, feed-forward 2048 (MAE App. A).
register_arch("mae_transformer", "mae_transformer_base", base_architecture, {})
# Feed-forward 1024 (MAE App. A). fairseq's transformer_iwslt_de_en has 4 heads, but MAE-7 needs 8.
register_arch("mae_transformer", "mae_transformer_iwslt_de_en", base_architecture, IWSLT)
# 8 heads of 16 dimensions, where Transformer-Tiny has 4 of 32; the gates' hidden layer is narrower in the
# same proportion as the model.
register_arch("mae_transformer", "mae_transformer_tiny", base_architecture, {**TINY, "gate_hidden_dim": 64})


@register_model("mae_roberta")
class MAERobertaModel(MixtureRobertaModel):
    """Masked language models. The paper has none; a dense one can be converted to these."""

    attention_family, default_arch = "mae", "mae_roberta_medium"


register_arch("mae_roberta", "mae_roberta_medium", roberta_architecture, MEDIUM_ROBERTA)


@register_model("mae_transformer_lm")
class MAELanguageModel(MixtureLanguageModel):
    """Every self-attention is a mixture of attentive experts; its gate averages the latest 100 inputs."""

    attention_family, default_arch = "mae", "mae_transformer_lm_base"


_LM = {"gate_window": 100}  # MAE Appendix A
register_arch("mae_transformer_lm", "mae_transformer_lm_base", base_lm_architecture, _LM)
# Baevski & Auli's WikiText-103 model: 16 layers, width 1024, 8 heads (MAE §4.3)
register_arch("mae_transformer_lm", "mae_transformer_lm_wiki103", transformer_lm_baevski_wiki103, _LM)
