"""MoH (arXiv 2410.11842) in timm's vision Transformers: ViT, DeiT and what else has timm's plain attention.

`to_mixture_of_heads` turns a model in place. Its weights are kept as those of any model of timm's, by its state
dict, and loaded into a model that the same call has made.
"""

from typing import Optional, Sequence

import torch
from torch import nn

from moa_fairseq.errors import UserError
from moa_fairseq.integrations.heads import (
    HeadMixture,
    MixtureSettings,
    balance_loss,
    collect_routings,
)

try:
    from timm.models.vision_transformer import Attention
except RuntimeError as error:  # torchvision::nms does not exist
    raise UserError(
        f"timm cannot be imported, because torchvision is not built for this torch ({error}): install the "
        "two from one index, for a CPU `pip install torch torchvision --index-url "
        "https://download.pytorch.org/whl/cpu`."
    ) from error

__all__ = ["balance_loss", "collect_routings", "to_mixture_of_heads"]
OUTPUT, QUERIES = "proj", "qkv"  # timm's names; the second holds [q | k | v], head by head


def to_mixture_of_heads(
    model: nn.Module,
    shared_heads: Optional[int] = None,
    active: Optional[int] = None,
    router: str = "query-norm",
    scaling: str = "released",
    layers: Optional[Sequence[Optional[Sequence[int]]]] = None,
) -> nn.Module:
    """Turn a model of timm into a mixture of heads, in place.

    A balance loss is the training loop's to add: `balance_loss` of what `collect_routings` found.

    Args:
        model: whose attentions are timm's `Attention`, before a wrapper or torch.compile takes it. Its
            parameters and its class stay. An attention that pools tokens at the end stays dense.
        shared_heads, active, router, scaling, layers: see `MixtureSettings`.

    Returns:
        The model.

    Raises:
        UserError: for a model that cannot be one, which is then unchanged.
    """
    settings = MixtureSettings.of(
        {
            "shared_heads": shared_heads,
            "active": active,
            "router": router,
            "scaling": scaling,
            "layers": layers,
            "output": OUTPUT,
            "queries": QUERIES,
        }
    )
    kind = type(model).__name__
    modules = [*model.modules()]
    if any(isinstance(module, HeadMixture) for module in modules):
        raise UserError(f"{kind} is a mixture of heads already: make the dense model, and convert that.")
    attentions = [module for module in modules if type(module) is Attention]
    others = {
        f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}"
        for module in modules
        if "Att" in type(module).__name__ and "Pool" not in type(module).__name__
    }
    others -= {f"{Attention.__module__.rpartition('.')[2]}.{Attention.__name__}"}
    if not attentions or others:
        raise UserError(
            f"{kind} has {', '.join(sorted(others)) or 'no attention'}, but a mixture of heads can be made of "
            "timm's plain Attention alone: vision Transformers such as vit_* and deit*, not Swin, MaxViT, EVA "
            "or parallel blocks that have no module for their attention."
        )
    mixtures = []
    for attention, sizes in zip(attentions, settings.by_layer(len(attentions))):
        if sizes is not None:
            width, heads = attention.qkv.in_features, attention.num_heads
            made = HeadMixture(attention, width, heads, sizes, OUTPUT, settings, fused=True)
            weight = attention.proj.weight
            mixtures.append((attention, made.to(weight.device, weight.dtype)))
    for attention, made in mixtures:
        made.attach(attention)
    return model
