from fairseq.models import register_model
from fairseq.models.transformer.transformer_legacy import base_architecture

from moa_fairseq.models.dense import TINY
from moa_fairseq.transformer.archs import register_arch
from moa_fairseq.transformer.families import register_family
from moa_fairseq.transformer.translation import MixtureTransformerModel
from toy_family.attention import ParitySettings

register_family("parity", ParitySettings)


@register_model("parity_transformer")
class ParityTransformerModel(MixtureTransformerModel):
    attention_family, default_arch = "parity", "parity_transformer_tiny"


register_arch("parity_transformer", "parity_transformer_tiny", base_architecture, TINY)
