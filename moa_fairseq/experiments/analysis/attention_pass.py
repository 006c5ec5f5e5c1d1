"""A forward pass that keeps the attention weights and the routings of all modules."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.routing import Routing
from moa_fairseq.plugin.forward_context import NamedRoutings, collect_routings


class AttentionPass(NamedTuple):
    """What a forward pass computed.

    Args:
        weights: name of an attention → the weights of each head or slot, [H, B, T, S] float32 on the CPU.
        routings: the name and the routing of all routers, in forward order.
        output: the output of the model.
    """

    weights: dict[str, Tensor]
    routings: NamedRoutings
    output: Any


@torch.no_grad()
def pass_with_weights(
    model: nn.Module,
    net_input: dict[str, Any],
    after_each: Callable[..., None] | None = None,
    features_only: bool = True,
) -> AttentionPass:
    """Run a model once, and keep the weights of every attention.

    Args:
        model: the model, in evaluation mode.
        net_input: fairseq's arguments of the model.
        after_each: a function that is called as soon as an attention has run, with the attention's name, the
            module, the keywords of its call, its weights, and its routings as in `routings_of`.
        features_only: whether the output layer is left out.

    Raises:
        UserError: for a model without such attention.
    """
    _return_head_weights(model)
    weights_by_name: dict[str, Tensor] = {}
    request = {"need_weights": True, "need_head_weights": True}

    def keep_weights(
        name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any
    ) -> None:
        weights = result[1].float().cpu()
        weights_by_name[name] = weights
        if after_each is not None:
            after_each(name, module, kwargs, weights, routings_of(name, routings))

    with collect_routings() as routings, contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, (Attention, MultiheadAttention)):
                before = module.register_forward_pre_hook(
                    lambda module, args, kwargs: (args, kwargs | request), with_kwargs=True
                )
                after = module.register_forward_hook(partial(keep_weights, name), with_kwargs=True)
                hooks.enter_context(before)
                hooks.enter_context(after)
        output = model(**net_input, features_only=features_only)
    if not weights_by_name:
        raise UserError(f"{type(model).__name__} has no attention that this analysis knows.")
    return AttentionPass(weights_by_name, routings, output)


def routings_of(name: str, routings: NamedRoutings) -> dict[str, Routing]:
    """The routings of one module by side, "queries" or "keys".

    Args:
        name: the name of the module.
        routings: the routings of all modules.
    """
    by_side = {}
    for path, routing in routings:
        if path.removesuffix(f".{routing.side}") == name:
            by_side[routing.side] = routing
    return by_side


def _return_head_weights(model: Any) -> None:
    """Let fairseq's own layers return the weights of each head, from now on."""
    for module in model.modules():
        # Otherwise fairseq calls torch's fused layer, which returns no weights
        if hasattr(module, "ever_training"):
            module.ever_training = True
        if isinstance(module, MultiheadAttention):
            module.skip_embed_dim_check = True  # else fairseq averages the weights over the heads
