"""Direct effects: what a single head or value expert of an attention adds to the output by itself."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.switchhead import SwitchHeadAttention
from moa_fairseq.plugin.forward_context import forward_context


@dataclasses.dataclass
class Places:
    """The positions of the scores in B sequences in which N symbols are read twice.

    Args:
        tokens: the symbols, [B, 1 + 2·N].
        queries: the positions at which a symbol can be copied, [N − 1].
        keys: the position of the symbol to copy at each of them, [N − 1].
    """

    tokens: Tensor
    queries: Tensor
    keys: Tensor


@dataclasses.dataclass
class Copying:
    """The share of the symbol to copy in all logits that a part raises, [B, N − 1] for each part.

    Args:
        heads: the shares of each head or slot; empty if they cannot be measured.
        value_experts: the shares of each of the H·E value experts; empty without value experts.
    """

    heads: list[Tensor] = dataclasses.field(default_factory=list)
    value_experts: list[Tensor] = dataclasses.field(default_factory=list)


def value_routing(module: nn.Module, routings: dict[str, Routing]) -> Routing | None:
    """The routing of the value experts, or None if the attention has none; only SwitchHead may have them.

    Args:
        module: an attention.
        routings: side → the routing of that side.
    """
    if not isinstance(module, SwitchHeadAttention) or "v" not in module.experts:
        return None
    return routings["queries" if module.shares_selection else "keys"]


def direct_effects(
    model: nn.Module,
    module: Attention,
    call: dict[str, Any],
    places: Places,
    routings: dict[str, Routing],
) -> Copying:
    """Measure the copying of each head by passes of the module in which the other heads' results are zero.

    Args:
        model: a causal language model.
        module: one of its attentions.
        call: the keywords of the module's call.
        places: the positions of the scores.
        routings: side → the routing of this call.
    """
    decoder: Any = model.decoder
    effects = Copying()
    if decoder.adaptive_softmax is not None:
        return effects
    with _ablate_all_but(module, None) as head_counts:
        zero_pass = _output(module, call)  # only the biases
    if len(head_counts) != 1:  # the module attends in several parts
        return effects
    for head in range(head_counts[0]):
        with _ablate_all_but(module, head):
            effects.heads.append(_copying(decoder, _output(module, call) - zero_pass, places))
    values = value_routing(module, routings)
    if values is None:
        return effects
    for expert in range(values.num_experts):
        with _ablate_all_values_but(module, values.expert_ids == expert):
            copying = _copying(decoder, _output(module, call) - zero_pass, places)
            effects.value_experts.append(copying)
    return effects


def _output(module: Attention, call: dict[str, Any]) -> Tensor:
    """The output of an attention, [T, B, C]."""
    with forward_context(routings=()):
        output: Tensor = type(module).forward(module, **call)[0]
    return output


def _copying(decoder: Any, effect: Tensor, places: Places) -> Tensor:
    """The share of the symbol to copy, [B, N − 1], in all logits that an effect, [T, B, C], raises."""
    x = effect.transpose(0, 1)[:, places.queries]
    if isinstance(decoder.layer_norm, nn.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    gain = getattr(decoder.layer_norm, "weight", 1.0)
    bias = decoder.output_layer(torch.zeros_like(x[:1, :1]))
    logits = decoder.output_layer(x * gain) - bias  # [B, N − 1, V]
    raised = (logits - logits.mean(-1, keepdim=True)).relu()
    symbols = places.tokens[:, None, 1 : places.keys.numel() + 2].expand(-1, x.size(1), -1)
    copied = places.tokens[:, places.keys, None]
    total = raised.gather(2, symbols).sum(-1)
    return torch.where(total > 0, raised.gather(2, copied)[..., 0] / total, 0.0).cpu()


@contextmanager
def _ablate_all_but(module: Attention, head: int | None) -> Iterator[list[int]]:
    """Inside the block, the results of all heads but one are zero; each call adds the number of heads."""
    calls: list[int] = []

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        heads, weights = type(module).attend(module, *args, **kwargs)
        calls.append(heads.size(1))
        results = torch.zeros_like(heads)
        if head is not None:
            results[:, head] = heads[:, head]
        return results, weights

    vars(module)["attend"] = attend
    try:
        yield calls
    finally:
        del vars(module)["attend"]


@contextmanager
def _ablate_all_values_but(module: Any, chosen: Tensor) -> Iterator[None]:
    """Inside the block, only the gates of the value experts in the mask `chosen` are not zero."""

    def mask_gates(projection: nn.Module, args: tuple) -> tuple:
        rows, permutation, gates, *options = args
        return rows, permutation, gates * chosen, *options

    hook = module.v_proj.register_forward_pre_hook(mask_gates)
    try:
        yield
    finally:
        hook.remove()
