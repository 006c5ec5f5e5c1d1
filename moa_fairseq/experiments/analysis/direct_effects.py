"""What single heads and value experts of an attention write by themselves: their direct effects."""

from __future__ import annotations

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
    """Where scores are taken in sequences of N symbols, read twice.

    Args:
        tokens: [B, 1 + 2·N].
        queries, keys: [N − 1]; the symbol to copy at place queries[i] stands at keys[i].
    """

    tokens: Tensor
    queries: Tensor
    keys: Tensor


@dataclasses.dataclass
class Copying:
    """The share of the symbol to copy in what raises logits, [B, N − 1] of the queries.

    Args:
        heads: of each head, or slot of heads; none if it is unknown.
        value_experts: of each of the H·E experts of the values.
    """

    heads: list[Tensor] = dataclasses.field(default_factory=list)
    value_experts: list[Tensor] = dataclasses.field(default_factory=list)


def value_routing(module: nn.Module, routings: dict[str, Routing]) -> Routing | None:
    """What chose the experts of the values, of SwitchHead with any.

    Args:
        module: an attention.
        routings: side → its routing.
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
    """The copying of each head, by passes of the module in which only that head has a result.

    Args:
        model: a causal language model.
        module: one of its attentions.
        call: the keywords of the module's call.
        places: where copying is taken.
        routings: side → routing of this call.
    """
    decoder: Any = model.decoder
    effects = Copying()
    if decoder.adaptive_softmax is not None:
        return effects
    with _ablate_all_but(module, None) as head_counts:
        zero_pass = _output(module, call)  # biases
    if len(head_counts) != 1:  # it attends in several parts
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
    """[T, B, C]"""
    with forward_context(routings=()):
        output: Tensor = type(module).forward(module, **call)[0]
    return output


def _copying(decoder: Any, effect: Tensor, places: Places) -> Tensor:
    """The share of the symbol to copy in all logits that an effect [T, B, C] raises, [B, N − 1]."""
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
    """Inside the block the results of all heads but one are zero; fills the list with the number of heads."""
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
    """Inside the block the gates of the values' experts are zero, except those that are `chosen`."""

    def mask_gates(projection: nn.Module, args: tuple) -> tuple:
        rows, permutation, gates, *options = args
        return rows, permutation, gates * chosen, *options

    hook = module.v_proj.register_forward_pre_hook(mask_gates)
    try:
        yield
    finally:
        hook.remove()
