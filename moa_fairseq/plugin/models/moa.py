"""MoA (arXiv 2210.05144): `--arch moa_transformer_base`, `moa_roberta_8k8e128d` and the rest."""

from moa_fairseq.plugin.archs import register_models
from moa_fairseq.plugin.models.dense import IWSLT, MEDIUM_ROBERTA, TINY, TINY_ROBERTA, lm_body


def _sizes(per_token: int, num_experts: int, dim: int) -> dict:
    return {"experts_per_token": per_token, "num_experts": num_experts, "expert_dim": dim}


# Translation (MoA section 5.1). Width, layers and feed-forward are transformer-base's throughout (Table 5).
TRANSLATION = {
    "base": _sizes(8, 8, 128),  # 65M parameters on WMT14 En-De
    "big": _sizes(16, 32, 256),  # 200M
    "16k32e512d": _sizes(16, 32, 512),  # Table 4 and Figure 4
    # Table 3
    "ablation_a": _sizes(8, 8, 256),
    "ablation_b": _sizes(8, 16, 256),
    "ablation_c": _sizes(8, 32, 64),
    "ablation_d": _sizes(8, 32, 128),
    "ablation_e": _sizes(8, 32, 256),
    "ablation_f": _sizes(4, 32, 256),
    # the base model's attention in the body of fairseq's transformer_iwslt_de_en
    "iwslt_de_en": _sizes(8, 8, 128) | IWSLT,
    # (K + 1) · D = 240 against the dense attention's 2 · 128: the MACs of both are within 5 %
    "tiny": _sizes(4, 8, 48) | TINY,
}
register_models(
    "moa", "moa_transformer", {f"moa_transformer_{row}": v for row, v in TRANSLATION.items()}
)

# Masked language models (Table 2). Parameters match (to 0.01M) only with biases in keys, values and experts.
MASKED_LM = {
    "8k8e128d": _sizes(8, 8, 128) | MEDIUM_ROBERTA,
    "8k8e256d": _sizes(8, 8, 256) | MEDIUM_ROBERTA,
    "8k16e256d": _sizes(8, 16, 256) | MEDIUM_ROBERTA,
    "8k32e256d": _sizes(8, 32, 256) | MEDIUM_ROBERTA,
    "8k64e256d": _sizes(8, 64, 256) | MEDIUM_ROBERTA,
    "tiny": _sizes(4, 8, 48) | TINY_ROBERTA,  # its projections cost 6 % less than the dense ones
}
register_models(
    "moa",
    "moa_roberta",
    {f"moa_roberta_{row}": v | {"expert_bias": True} for row, v in MASKED_LM.items()},
)

# Causal language models, as SwitchHead's Table 1 has them (arXiv 2312.07987). It prints no settings: E and D
# are chosen so that its authors' formula gives the printed cost. K is that of the models timed in their
# Table 5; the other rows have another --experts-per-token.
LANGUAGE_MODELS = {
    "47m": _sizes(4, 10, 88) | lm_body(layers=16, embed_dim=412, ffn_embed_dim=2053),
    "262m": _sizes(8, 16, 144) | lm_body(layers=18, embed_dim=1024, ffn_embed_dim=4110),
    # The body of switchhead_lm_tiny
    "tiny": _sizes(4, 10, 34) | lm_body(layers=4, embed_dim=160, ffn_embed_dim=640),
    "base": _sizes(8, 8, 128),  # 8K8E128D in fairseq's own base, as dense_transformer_lm_base
}
register_models("moa", "moa_lm", {f"moa_lm_{row}": v for row, v in LANGUAGE_MODELS.items()})
