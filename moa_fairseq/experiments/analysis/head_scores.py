"""The scores of prefix matching and copying of each head, see `induction_heads`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moa_fairseq.experiments.analysis.attention_maps import (
    gates_by_expert,
    pass_with_weights,
    routings_of,
)
from moa_fairseq.experiments.analysis.direct_effects import (
    Copying,
    Places,
    direct_effects,
    value_routing,
)
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.moa import MixtureOfAttention
from moa_fairseq.layers.moh import MixtureOfHeads
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.switchhead import SwitchHeadAttention
from moa_fairseq.plugin.forward_context import NamedRoutings


class HeadMap(NamedTuple):
    """The attention of a head in the first sequence.

    Args:
        weights: the weights, [T, T]; zero for symbols that did not choose the head.
        gates: side → the gates of the head's experts, [E, T].
    """

    weights: Tensor
    gates: dict[str, Tensor]


@dataclasses.dataclass
class HeadScore:
    """The scores of a head, or of a value expert of a head.

    Args:
        name: the module's path in the model.
        kind: "head", or "expert" if an expert is a head.
        number: the number of the head or expert, from 1.
        prefix: the score of prefix matching.
        copying: the score of copying; None if the module's output is not a sum over heads, or if the model
            has an adaptive softmax.
        chosen: the share of the symbols that chose the head or expert.
        experts: the scores of the head's value experts; empty without value experts.
        map: the attention in the first sequence; None for a value expert.
    """

    name: str
    kind: str
    number: int
    prefix: float
    copying: float | None
    chosen: float
    experts: list[HeadScore] = dataclasses.field(default_factory=list)
    map: HeadMap | None = None

    @property
    def label(self) -> str:
        """The kind with the number, such as "expert 3"."""
        return f"{self.kind} {self.number}"

    def record(self) -> dict[str, Any]:
        """The scores as JSON values; "map" is None."""
        keys = ("name", "label", "prefix", "copying", "chosen")
        record = {key: getattr(self, key) for key in keys}
        return record | {"experts": [part.record() for part in self.experts], "map": None}


def measure_heads(
    model: nn.Module, tokens: Tensor, device: torch.device
) -> tuple[list[HeadScore], float]:
    """The scores of every head in forward order.

    Args:
        model: a causal language model; it stays on the device, in evaluation mode.
        tokens: the symbols of B sequences, [B, 1 + 2·N]: </s>, and N different symbols twice.
        device: the device that the model runs on.

    Returns:
        The scores, and the share of the repeated symbols for which the model's likeliest symbol is right.

    Raises:
        UserError: for a model without attention of a kind that this analysis knows.
    """
    model = model.to(device).eval()
    tokens = tokens.to(device)
    length = tokens.size(1) // 2
    places = Places(tokens, torch.arange(length + 1, 2 * length), torch.arange(2, length + 1))
    effects: dict[str, Copying] = {}

    def watch(name: str, module: nn.Module, call: dict[str, Any], routings: NamedRoutings) -> None:
        if isinstance(module, Attention):
            sides = dict(routings_of(name, routings))
            effects[name] = direct_effects(model, module, call, places, sides)

    with torch.no_grad():
        weights_by_name, routings, _ = pass_with_weights(model, {"src_tokens": tokens}, watch)
        likeliest = model(tokens)[0][:, places.queries].argmax(-1)
    heads: list[HeadScore] = []
    for name, weights in weights_by_name.items():
        module = model.get_submodule(name)
        sides = dict(routings_of(name, routings))
        heads += _scores(name, module, weights, sides, effects.get(name, Copying()), places)
    return heads, (likeliest == tokens[:, places.keys]).double().mean().item()


def _scores(
    name: str,
    module: nn.Module,
    weights: Tensor,
    routings: dict[str, Routing],
    effects: Copying,
    places: Places,
) -> list[HeadScore]:
    """The scores of a module's heads from its weights, [H, B, T, S]."""
    copying = torch.stack(effects.heads) if effects.heads else None
    chosen = torch.ones(weights.shape[:3], dtype=torch.bool)
    kind = "head"
    routing = routings.get("queries")
    # In other families, tokens choose heads: MAE's experts share all heads, and SwitchHead's are projections
    shared = (MixtureOfAttentiveExperts, SwitchHeadAttention)
    if routing is not None and not isinstance(module, shared):
        kind = "expert"
        weights, chosen, copying = _by_expert(module, routing, weights, copying, places)
    attention = weights[:, :, places.queries, places.keys]  # [H, B, N − 1]
    chosen = chosen[:, :, places.queries]
    gates = _gates_of_heads(module, routings, places)
    values = value_routing(module, routings)
    scores = []
    for head, head_attention in enumerate(attention):
        effect = None if copying is None else copying[head]
        score = _head_score(name, kind, head + 1, head_attention, effect, chosen[head])
        if values is not None:
            score.experts = _value_scores(name, head, values, head_attention, effects, places)
        score.map = HeadMap(weights[head, 0], {side: gate[head] for side, gate in gates.items()})
        scores.append(score)
    return scores


def _gates_of_heads(
    module: nn.Module, routings: dict[str, Routing], places: Places
) -> dict[str, Tensor]:
    """Side → the gates of SwitchHead's experts in the first sequence, [H, E, T]; {} for other families."""
    gates: dict[str, Tensor] = {}
    if not isinstance(module, SwitchHeadAttention):
        return gates
    for side, routing in routings.items():
        by_expert = gates_by_expert(routing).cpu()
        gates[side] = by_expert.view(module.num_heads, -1, *places.tokens.shape)[:, :, 0]
    if module.shares_selection:
        gates["keys"] = gates["queries"]
    return gates


def _by_expert(
    module: nn.Module, routing: Routing, weights: Tensor, copying: Tensor | None, places: Places
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sort the weights and the copying of each slot by the expert in it, which is a head.

    Args:
        module: the attention.
        routing: the routing of its B·T queries.
        weights: the weights of the K slots, [K, B, T, S].
        copying: the copying of the slots or experts, [K or E, B, N − 1], or None.
        places: the positions of the scores.

    Returns:
        The weights of the experts, [E, B, T, S]; the tokens that chose each expert, [E, B, T] bool; the
        copying of the experts, [E, B, N − 1], or None.
    """
    count, batch, length, _ = weights.shape
    index = routing.expert_ids
    experts = routing.num_experts
    if isinstance(module, MixtureOfAttention):
        index = module.head_index(routing)
        experts *= module.heads_per_expert
    # [N, slots] → [slots, B, T]
    slots = index.view(batch, length, count).permute(2, 0, 1).cpu()
    by_expert = weights.new_zeros(experts, *weights.shape[1:])
    by_expert = by_expert.scatter(0, slots[..., None].expand_as(weights), weights)
    chosen = torch.zeros(experts, batch, length, dtype=torch.bool).scatter(0, slots, True)
    # NAMOH attends in packed rows, whose copying belongs to no single expert
    if copying is not None and len(copying) not in (count, experts):
        copying = None
    # The copying of MoH is already sorted by head
    if copying is not None and not isinstance(module, MixtureOfHeads):
        zeros = copying.new_zeros(experts, *copying.shape[1:])
        copying = zeros.scatter(0, slots[:, :, places.queries], copying)
    return by_expert, chosen, copying


def _value_scores(
    name: str, head: int, values: Routing, attention: Tensor, effects: Copying, places: Places
) -> list[HeadScore]:
    """The scores of a head's value experts, over the queries whose key has a value from that expert."""
    scores = []
    size = values.num_experts // values.groups
    for expert in range(size):
        index = head * size + expert
        is_chosen = (values.expert_ids == index).any(1).view_as(places.tokens)[:, places.keys]
        effect = effects.value_experts[index] if effects.value_experts else None
        scores.append(_head_score(name, "expert", expert + 1, attention, effect, is_chosen.cpu()))
    return scores


def _head_score(
    name: str, kind: str, number: int, attention: Tensor, copying: Tensor | None, chosen: Tensor
) -> HeadScore:
    """The means over the queries that chose the head; attention, copying and chosen are [B, N − 1]."""
    prefix = _mean(attention[chosen])
    effect = None if copying is None else _mean(copying[chosen])
    return HeadScore(name, kind, number, prefix, effect, _mean(chosen))


def _mean(values: Tensor) -> float:
    """The mean; 0 if no query chose the head."""
    return values.double().mean().item() if values.numel() else 0.0
