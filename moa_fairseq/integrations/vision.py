"""MoH (arXiv 2410.11842) in timm's vision Transformers: ViT, DeiT and others with timm's plain attention.

`to_mixture_of_heads` converts a model in place. Its state dict is saved as that of any timm model, and is
loaded into a model that the same call has converted. The training loop adds `heads.balance_loss`.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from moa_fairseq.errors import UserError
from moa_fairseq.integrations.heads import HeadMixture, install
from moa_fairseq.integrations.mixture_settings import FUSED, MixtureSettings

try:
    from timm.models.vision_transformer import Attention
except RuntimeError as error:  # operator torchvision::nms does not exist
    raise UserError(
        f"timm cannot be imported ({error}): torchvision is built for another torch. For a CPU: pip install "
        "--force-reinstall torch torchvision --index-url https://download.pytorch.org/whl/cpu"
    ) from error


def to_mixture_of_heads(
    model: nn.Module, shared_heads: int | None = None, active: int | None = None, **settings: Any
) -> nn.Module:
    """Convert a timm model into a mixture of heads, in place.

    Args:
        model: a model whose attentions are timm's `Attention`, without a wrapper. Its class and parameters
            stay. An attention that pools tokens at the end stays dense.
        shared_heads, active, settings: fields of `MixtureSettings`; of the settings, router, scaling,
            straight_through and layers.

    Returns:
        The model.

    Raises:
        UserError: for a model that cannot be converted, which is then unchanged.
    """
    kind = type(model).__name__
    modules = [*model.modules()]
    for name in sorted(settings.keys() & {"balance", "output", "queries"}):
        raise UserError(
            f"{name}={settings[name]!r}: timm's models compute no loss and use fixed module names. Leave it "
            "out. For a balance term add 0.01 * heads.balance_loss(routings), with routings from "
            "heads.collect_routings, to your loss."
        )
    chosen = MixtureSettings.of({"shared_heads": shared_heads, "active": active, **settings})
    if HeadMixture in map(type, modules):
        raise UserError(
            f"{kind} is a mixture of heads already: create the dense model, and convert it."
        )
    kinds = {type(module) for module in modules if "Att" in type(module).__name__}
    unknown = {each for each in kinds - {Attention} if "Pool" not in each.__name__}
    if Attention not in kinds or unknown:
        names = [f"{each.__module__.rpartition('.')[2]}.{each.__name__}" for each in unknown]
        raise UserError(
            f"{kind} has {', '.join(sorted(names)) or 'no attention of its own'}. Only timm's plain "
            "Attention can be converted (vit_*, deit* and others); not Swin, MaxViT, EVA, or "
            "parallel blocks, which have no attention module."
        )
    sizes = []
    module: Any
    for module in modules:
        if type(module) is Attention:
            sizes.append((module, "proj", module.qkv.in_features, module.num_heads))
    install(sizes, replace(chosen, queries=FUSED), sizes[0][0].proj.weight.dtype)
    return model
