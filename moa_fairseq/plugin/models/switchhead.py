"""SwitchHead and SwitchAll (arXiv 2312.07987): `--arch switchhead_lm_47m`, `switchall_lm_47m` and the rest.

Their dense counterparts, `transformer_xl_lm_47m` and relatives, are the same models without experts.
"""

from moa_fairseq.plugin.archs import register_models
from moa_fairseq.plugin.models.dense import TINY, lm_body


def _heads(heads: int, dim: int, num_experts: int = 1, per_token: int = 1) -> dict:
    sizes = {"switchhead_heads": heads, "expert_dim": dim}
    return sizes | {"num_experts": num_experts, "experts_per_token": per_token}


def _dense(heads: int, dim: int) -> dict:
    return _heads(heads, dim) | {"switchhead_experts": "none"}


def _sigma_moe(num_experts: int, dim: int, dropout: float = 0.0) -> dict:
    sizes = {"sigma_moe_num_experts": num_experts, "sigma_moe_expert_dim": dim}
    return sizes | {"sigma_moe_experts_per_token": 4, "sigma_moe_expert_dropout": dropout}


# Causal language models, with or without sigma-MoE (SwitchAll). Table 9: the body's layers, width,
# feed-forward and positions, and the attention's heads, D, E and k.
LANGUAGE_MODELS = {
    "switchhead_lm_47m": lm_body(16, 412, 2080) | _heads(2, 76, 5, 2),
    "switchhead_lm_262m": lm_body(18, 1024, 4147) | _heads(2, 132, 8, 4),
    "switchhead_lm_262m_h4": lm_body(18, 1024, 4188) | _heads(4, 112, 4, 2),  # C4 and peS2o
    "switchhead_lm_enwik8": lm_body(12, 512, 2088) | _heads(2, 112, 4, 2),
    "switchhead_rope_lm_45m": lm_body(16, 412, 2092, "rope-half") | _heads(2, 64, 5, 3),
    "switchhead_rope_lm_243m": lm_body(18, 1024, 4136, "rope-half") | _heads(4, 100, 4, 2),
    # The feed-forward's experts replace --decoder-ffn-embed-dim, and have no dropout inside (App. A.5).
    "switchall_lm_47m": lm_body(16, 412, 2048) | _heads(2, 76, 5, 2) | _sigma_moe(16, 128),
    "switchall_lm_259m": {
        **lm_body(18, 1024, 4096),
        **_heads(4, 112, 4, 2),
        **_sigma_moe(32, 128, dropout=0.1),
        "expert_dropout": 0.1,  # the attention's, too
    },
    "transformer_xl_lm_47m": lm_body(16, 412, 2053) | _dense(10, 41),
    "transformer_xl_lm_262m": lm_body(18, 1024, 4110) | _dense(16, 64),
    "transformer_xl_lm_enwik8": lm_body(12, 512, 2053) | _dense(8, 64),
    "transformer_rope_lm_45m": lm_body(16, 412, 2053, "rope-half") | _dense(10, 41),
    "transformer_rope_lm_244m": lm_body(18, 1024, 4110, "rope-half") | _dense(16, 64),
    # For small data and small machines: all attentions have 128,000 parameters, W_R included.
    "transformer_xl_lm_tiny": lm_body(4, 160, 640) | _dense(10, 16),
    "switchhead_lm_tiny": lm_body(4, 160, 640) | _heads(2, 30, 5, 2),
    "switchhead_lm_base": _heads(2, 101, 4, 2),  # parameters of dense_transformer_lm_base
    "switchall_lm_tiny": lm_body(4, 160, 640) | _heads(2, 30, 5, 2) | _sigma_moe(16, 40),
}
register_models("switchhead", "switchhead_lm", LANGUAGE_MODELS)

# Translation; in cross-attention the source side is the encoder's output. By the paper's rule (section 3): as
# many experts in all as the dense model has heads, two heads, and D so that the parameters match: 1.03M for
# the 1.05M of transformer-base's attention, 65,500 for Tiny's 65,536.
register_models(
    "switchhead",
    "switchhead_transformer",
    {
        "switchhead_transformer_base": _heads(2, 100, 4, 2),
        "switchhead_transformer_tiny": TINY | _heads(2, 42, 2, 1),
    },
)

# Encoders: classifiers of sentences (ListOps), masked language models. Section 4 prints 6 layers and the
# numbers of heads. By the paper's rule for the rest SwitchHead has as many experts in all as the dense model
# has heads; its D and feed-forward are those whose parameters match.
_LISTOPS = {
    "encoder_layers": 6,
    "encoder_embed_dim": 128,
    "encoder_ffn_embed_dim": 512,
    "encoder_attention_heads": 8,  # unused
    "encoder_normalize_before": True,
    "positions": "xl",
    "activation_fn": "relu",
    "initialization": "depth-scaled",  # of the attention; RoBERTa's for the rest
}
ENCODERS = {
    "switchhead_roberta_listops": _heads(2, 28, 4, 2) | {"encoder_ffn_embed_dim": 517},
    "transformer_xl_roberta_listops": _dense(8, 16),
    "transformer_xl_roberta_listops_2heads": _dense(2, 64),
}
register_models(
    "switchhead", "switchhead_roberta", {arch: _LISTOPS | v for arch, v in ENCODERS.items()}
)
