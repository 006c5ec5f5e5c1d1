from moa_fairseq.models.dense import TINY
from moa_fairseq.transformer.archs import register_models
from moa_fairseq.transformer.families import register_family
from toy_family.attention import ParitySettings

register_family("parity", ParitySettings)
register_models("parity", "parity_transformer", {"parity_transformer_tiny": TINY})
