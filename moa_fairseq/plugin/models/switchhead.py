"""SwitchHead and SwitchAll (arXiv 2312.07987): `--arch switchhead_lm_47m`, `switchall_lm_47m` and the rest.

Their dense counterparts, `transformer_xl_lm_47m` and relatives, are the same models without experts.
"""

from moa_fairseq.plugin.archs import register_models
from moa_fairseq.plugin.models.dense import TINY, lm_body


def _heads(*, heads: int, dim: int, experts: int = 1, k: int = 1) -> dict:
    sizes = {"switchhead_heads": heads, "expert_dim": dim}
    return sizes | {"num_experts": experts, "experts_per_token": k}


def _lm(*, layers: int, width: int, inner: int, **attention: int) -> dict:
    """A causal language model: `lm_body` with the attention of `_heads`."""
    return lm_body(layers, width, inner) | _heads(**attention)


def _sigma_moe(*, experts: int, dim: int, dropout: float = 0.0) -> dict:
    sizes = {"sigma_moe_num_experts": experts, "sigma_moe_expert_dim": dim}
    return sizes | {"sigma_moe_experts_per_token": 4, "sigma_moe_expert_dropout": dropout}


_DENSE = {"switchhead_experts": "none"}
_ROPE = {"positions": "rope-half"}

# Causal language models, with or without sigma-MoE (SwitchAll). Table 9 prints the layers, their width, the
# inner units of the feed-forward and the positions; and the attention's heads, D, E and k.
LANGUAGE_MODELS = {
    "switchhead_lm_47m": _lm(layers=16, width=412, inner=2080, heads=2, dim=76, experts=5, k=2),
    "switchhead_lm_262m": _lm(layers=18, width=1024, inner=4147, heads=2, dim=132, experts=8, k=4),
    # For C4 and peS2o
    "switchhead_lm_262m_h4": _lm(
        layers=18, width=1024, inner=4188, heads=4, dim=112, experts=4, k=2
    ),
    "switchhead_lm_enwik8": _lm(layers=12, width=512, inner=2088, heads=2, dim=112, experts=4, k=2),
    "switchhead_rope_lm_45m": _lm(layers=16, width=412, inner=2092, heads=2, dim=64, experts=5, k=3)
    | _ROPE,
    "switchhead_rope_lm_243m": _lm(
        layers=18, width=1024, inner=4136, heads=4, dim=100, experts=4, k=2
    )
    | _ROPE,
    # The feed-forward's experts replace --decoder-ffn-embed-dim, and have no dropout inside (App. A.5).
    "switchall_lm_47m": _lm(layers=16, width=412, inner=2048, heads=2, dim=76, experts=5, k=2)
    | _sigma_moe(experts=16, dim=128),
    "switchall_lm_259m": {
        **_lm(layers=18, width=1024, inner=4096, heads=4, dim=112, experts=4, k=2),
        **_sigma_moe(experts=32, dim=128, dropout=0.1),
        "expert_dropout": 0.1,  # in the attention
    },
    "transformer_xl_lm_47m": _lm(layers=16, width=412, inner=2053, heads=10, dim=41) | _DENSE,
    "transformer_xl_lm_262m": _lm(layers=18, width=1024, inner=4110, heads=16, dim=64) | _DENSE,
    "transformer_xl_lm_enwik8": _lm(layers=12, width=512, inner=2053, heads=8, dim=64) | _DENSE,
    "transformer_rope_lm_45m": _lm(layers=16, width=412, inner=2053, heads=10, dim=41)
    | _DENSE
    | _ROPE,
    "transformer_rope_lm_244m": _lm(layers=18, width=1024, inner=4110, heads=16, dim=64)
    | _DENSE
    | _ROPE,
    # For small data and small machines: all attentions have 128,000 parameters, W_R included.
    "transformer_xl_lm_tiny": _lm(layers=4, width=160, inner=640, heads=10, dim=16) | _DENSE,
    "switchhead_lm_tiny": _lm(layers=4, width=160, inner=640, heads=2, dim=30, experts=5, k=2),
    # The parameters of dense_transformer_lm_base
    "switchhead_lm_base": _heads(heads=2, dim=101, experts=4, k=2),
    "switchall_lm_tiny": _lm(layers=4, width=160, inner=640, heads=2, dim=30, experts=5, k=2)
    | _sigma_moe(experts=16, dim=40),
}
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
    "transformer_xl_roberta_listops": _heads(heads=8, dim=16) | _DENSE,
    "transformer_xl_roberta_listops_2heads": _heads(heads=2, dim=64) | _DENSE,
}
register_models(
    "switchhead", "switchhead_roberta", {arch: _LISTOPS | v for arch, v in ENCODERS.items()}
)
