"""MoA (arXiv 2210.05144): `--arch moa_transformer_base`, `moa_roberta_8k8e128d` and the rest."""

from fairseq.models import register_model
from fairseq.models.roberta.model import base_architecture as roberta_architecture
from fairseq.models.transformer.transformer_legacy import base_architecture
from fairseq.models.transformer_lm import base_lm_architecture

from moa_fairseq.models.dense import IWSLT, MEDIUM_ROBERTA, TINY, TINY_ROBERTA, lm_body
from moa_fairseq.transformer.archs import register_arch
from moa_fairseq.transformer.causal_lm import MixtureLanguageModel
from moa_fairseq.transformer.masked_lm import MixtureRobertaModel
from moa_fairseq.transformer.translation import MixtureTransformerModel


def _sizes(per_token: int, num_experts: int, dim: int) -> dict:
    return {"experts_per_token": per_token, "num_experts": num_experts, "expert_dim": dim}


@register_model("moa_transformer")
class MoATransformerModel(MixtureTransformerModel):
    """Translation (MoA §5.1): encoder self-, decoder self- and cross-attention are all MoA."""

    attention_family, default_arch = "moa", "moa_transformer_base"


# Width, layers and feed-forward are transformer-base's throughout (MoA Table 5).
TRANSLATION = {
    "base": _sizes(8, 8, 128),  # 65M parameters on WMT14 En-De
    "big": _sizes(16, 32, 256),  # 200M
    # Table 3
    "ablation_a": _sizes(8, 8, 256),
    "ablation_b": _sizes(8, 16, 256),
    "ablation_c": _sizes(8, 32, 64),
    "ablation_d": _sizes(8, 32, 128),
    "ablation_e": _sizes(8, 32, 256),
    "ablation_f": _sizes(4, 32, 256),
    # the base model's attention in the body of fairseq's transformer_iwslt_de_en
    "iwslt_de_en": {**_sizes(8, 8, 128), **IWSLT},
    # (K + 1) · D = 240 against the dense attention's 2 · 128: the MACs of both are within 5 %
    "tiny": {**_sizes(4, 8, 48), **TINY},
}
for _row, _values in TRANSLATION.items():
    register_arch("moa_transformer", f"moa_transformer_{_row}", base_architecture, _values)


@register_model("moa_roberta")
class MoARobertaModel(MixtureRobertaModel):
    """Masked language models (MoA §5.2, Table 2)."""

    attention_family, default_arch = "moa", "moa_roberta_8k8e128d"


# Parameters match Table 2 (to 0.01M) only with biases in keys, values and experts.
MASKED_LM = {
    "8k8e128d": {**_sizes(8, 8, 128), **MEDIUM_ROBERTA},
    "8k8e256d": {**_sizes(8, 8, 256), **MEDIUM_ROBERTA},
    "8k16e256d": {**_sizes(8, 16, 256), **MEDIUM_ROBERTA},
    "8k32e256d": {**_sizes(8, 32, 256), **MEDIUM_ROBERTA},
    "8k64e256d": {**_sizes(8, 64, 256), **MEDIUM_ROBERTA},
    "tiny": {**_sizes(4, 8, 48), **TINY_ROBERTA},  # its projections cost 6 % less than the dense ones
}
for _row, _values in MASKED_LM.items():
    register_arch(
        "moa_roberta", f"moa_roberta_{_row}", roberta_architecture, {**_values, "expert_bias": True}
    )


@register_model("moa_lm")
class MoALanguageModel(MixtureLanguageModel):
    """Causal language models: MoA as SwitchHead's Table 1 has it (arXiv 2312.07987)."""

    attention_family, default_arch = "moa", "moa_lm_47m"


# Table 1 prints no settings: E and D are chosen so that its authors' formula gives the printed cost. K is
# that of the models timed in their Table 5; the other rows have another --experts-per-token.
LANGUAGE_MODELS = {
    "47m": {**_sizes(4, 10, 88), **lm_body(16, 412, 2053)},
    "262m": {**_sizes(8, 16, 144), **lm_body(18, 1024, 4110)},
    "tiny": {**_sizes(4, 10, 34), **lm_body(4, 160, 640)},  # beside switchhead_lm_tiny
    "base": _sizes(8, 8, 128),  # 8K8E128D in fairseq's own base, as dense_transformer_lm_base
}
for _row, _values in LANGUAGE_MODELS.items():
    register_arch("moa_lm", f"moa_lm_{_row}", base_lm_architecture, _values)
