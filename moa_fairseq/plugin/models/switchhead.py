"""SwitchHead and SwitchAll (arXiv 2312.07987): `--arch switchhead_lm_47m`, `switchall_lm_47m` and the rest.

Their dense counterparts, `transformer_xl_lm_47m` and relatives, are the same models without experts.
"""

from moa_fairseq.plugin.archs import register_models
from moa_fairseq.plugin.models.dense import TINY, lm_body


def _heads(heads: int, dim: int, experts: int = 1, k: int = 1) -> dict:
    """An attention with D = dim and E = experts; with one expert it is dense."""
    sizes = {
        "switchhead_heads": heads,
        "expert_dim": dim,
        "num_experts": experts,
        "experts_per_token": k,
    }
    return sizes | {"switchhead_experts": "none"} if experts == 1 else sizes


def _lm(layers: int, width: int, inner: int, *attention: int) -> dict:
    """A causal language model: `lm_body` with the attention of `_heads`."""
    return lm_body(layers, width, inner) | _heads(*attention)


def _sigma_moe(experts: int, dim: int, dropout: float = 0.0) -> dict:
    return {
        "sigma_moe_num_experts": experts,
        "sigma_moe_expert_dim": dim,
        "sigma_moe_experts_per_token": 4,
        "sigma_moe_expert_dropout": dropout,
    }


# Causal language models. Table 9 prints the layers, their width and the inner units of the feed-forward, then
# the attention's heads, D, E and k. The rows without E and k are dense.
_XL = {
    "switchhead_lm_47m": (16, 412, 2080, 2, 76, 5, 2),
    "switchhead_lm_262m": (18, 1024, 4147, 2, 132, 8, 4),
    "switchhead_lm_262m_h4": (18, 1024, 4188, 4, 112, 4, 2),  # for C4 and peS2o
    "switchhead_lm_enwik8": (12, 512, 2088, 2, 112, 4, 2),
    "transformer_xl_lm_47m": (16, 412, 2053, 10, 41),
    "transformer_xl_lm_262m": (18, 1024, 4110, 16, 64),
    "transformer_xl_lm_enwik8": (12, 512, 2053, 8, 64),
    # For small data and small machines: all attentions have 128,000 parameters, W_R included.
    "switchhead_lm_tiny": (4, 160, 640, 2, 30, 5, 2),
    "transformer_xl_lm_tiny": (4, 160, 640, 10, 16),
}
_ROPE = {
    "switchhead_rope_lm_45m": (16, 412, 2092, 2, 64, 5, 3),
    "switchhead_rope_lm_243m": (18, 1024, 4136, 4, 100, 4, 2),
    "transformer_rope_lm_45m": (16, 412, 2053, 10, 41),
    "transformer_rope_lm_244m": (18, 1024, 4110, 16, 64),
}
# SwitchAll. The feed-forward's experts replace --decoder-ffn-embed-dim; no dropout is inside them (App. A.5).
_SWITCHALL = {
    "switchall_lm_47m": _lm(16, 412, 2048, 2, 76, 5, 2) | _sigma_moe(16, 128),
    "switchall_lm_259m": _lm(18, 1024, 4096, 4, 112, 4, 2)
    | _sigma_moe(32, 128, dropout=0.1)
    | {"expert_dropout": 0.1},  # in the attention
    "switchall_lm_tiny": _lm(4, 160, 640, 2, 30, 5, 2) | _sigma_moe(16, 40),
}
LANGUAGE_MODELS = {arch: _lm(*sizes) for arch, sizes in _XL.items()} | _SWITCHALL
for arch, sizes in _ROPE.items():
    LANGUAGE_MODELS[arch] = _lm(*sizes) | {"positions": "rope-half"}
# The parameters of dense_transformer_lm_base
LANGUAGE_MODELS["switchhead_lm_base"] = _heads(heads=2, dim=101, experts=4, k=2)
register_models("switchhead", "switchhead_lm", LANGUAGE_MODELS)

# Translation; in cross-attention the source side is the encoder's output. By the paper's rule (section 3): as
# many experts in all as the dense model has heads, two heads, and D so that the parameters match: 1.03M for
# the 1.05M of transformer-base's attention, 65,500 for Tiny's 65,536.
register_models(
    "switchhead",
    "switchhead_transformer",
    {
        "switchhead_transformer_base": _heads(heads=2, dim=100, experts=4, k=2),
        "switchhead_transformer_tiny": TINY | _heads(heads=2, dim=42, experts=2, k=1),
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
    "switchhead_roberta_listops": _heads(heads=2, dim=28, experts=4, k=2)
    | {"encoder_ffn_embed_dim": 517},
    "transformer_xl_roberta_listops": _heads(heads=8, dim=16),
    "transformer_xl_roberta_listops_2heads": _heads(heads=2, dim=64),
}
register_models(
    "switchhead", "switchhead_roberta", {arch: _LISTOPS | v for arch, v in ENCODERS.items()}
)
