from moa_fairseq.plugin.archs import register_models
from moa_fairseq.plugin.families import register_family
from moa_fairseq.plugin.models.dense import TINY
from toy_family.attention import ParitySettings

register_family("parity", ParitySettings)
register_models("parity", "parity_transformer", {"parity_transformer_tiny": TINY})
