"""The scores of prefix matching and copying of each head, see `induction_heads`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moa_fairseq.experiments.analysis.attention_pass import pass_with_weights
from moa_fairseq.experiments.analysis.direct_effects import (
    CopyingShares,
    Places,
    direct_effects,
    value_routing,
)
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.moa import MixtureOfAttention
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.switchhead import SwitchHeadAttention


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
        """The scores as JSON values; "map" is None, because it is a matrix for the picture alone."""
        return {
            "name": self.name,
            "label": self.label,
            "prefix": self.prefix,
            "copying": self.copying,
            "chosen": self.chosen,
            "experts": [part.record() for part in self.experts],
            "map": None,
        }


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
    places = Places(tokens.to(device))
    heads: list[HeadScore] = []

    def add_scores(
        name: str,
        module: nn.Module,
        call: dict[str, Any],
        weights: Tensor,
        routings: dict[str, Routing],
    ) -> None:
        copying = CopyingShares([], [])
        if isinstance(module, Attention):
            copying = direct_effects(model, module, call, places, routings)
        heads.extend(_module_scores(name, module, weights, routings, copying, places))

    attention_pass = pass_with_weights(
        model, {"src_tokens": places.tokens}, add_scores, features_only=False
    )
    likeliest = attention_pass.output[0][:, places.queries].argmax(-1)
    accuracy = (likeliest == places.tokens[:, places.keys]).double().mean().item()
    return heads, accuracy


def _module_scores(
    name: str,
    module: nn.Module,
    weights: Tensor,
    routings: dict[str, Routing],
    copying: CopyingShares,
    places: Places,
) -> list[HeadScore]:
    """The scores of a module's heads from the weights of its heads or slots, [H, B, T, S]."""
    heads = _heads(module, weights, routings, copying, places)
    attention = heads.weights[:, :, places.queries, places.keys]  # [H, B, N − 1]
    is_chosen = heads.is_chosen[:, :, places.queries]
    gates = _gates_of_heads(module, routings, places)
    values = value_routing(module, routings)
    scores = []
    for head, shares in enumerate(heads.copying):
        means = _mean_scores(attention[head], shares, is_chosen[head])
        score = HeadScore(name, heads.kind, head + 1, *means)
        if values is not None:
            score.experts = _value_scores(name, head, values, attention[head], copying, places)
        head_gates = {side: gate[head] for side, gate in gates.items()}
        score.map = HeadMap(heads.weights[head, 0], head_gates)
        scores.append(score)
    return scores


class _HeadTensors(NamedTuple):
    """What the heads of a module attend to.

    Args:
        kind: "head", or "expert" if an expert is a head.
        weights: the attention, [H, B, T, T].
        is_chosen: whether a token chose the head, [H, B, T].
        copying: the copying of each head, [B, N − 1]; None if it was not measured.
    """

    kind: str
    weights: Tensor
    is_chosen: Tensor
    copying: Sequence[Tensor | None]


def _heads(
    module: nn.Module,
    weights: Tensor,
    routings: dict[str, Routing],
    copying: CopyingShares,
    places: Places,
) -> _HeadTensors:
    """The heads of a module: the experts if each expert is a head."""
    routing = _routing_to_heads(module, routings)
    if routing is None:
        is_chosen = torch.ones(weights.shape[:3], dtype=torch.bool)
        return _HeadTensors("head", weights, is_chosen, copying.heads or [None] * len(weights))
    expert_of_slot, num_experts = _expert_of_slot(module, routing, places)
    is_taken = torch.ones_like(expert_of_slot, dtype=torch.bool)
    expert_of_query = expert_of_slot[:, :, places.queries]
    return _HeadTensors(
        "expert",
        _scatter_to_experts(weights, expert_of_slot, num_experts),
        _scatter_to_experts(is_taken, expert_of_slot, num_experts),
        _copying_by_expert(copying, expert_of_query, num_experts),
    )


def _routing_to_heads(module: nn.Module, routings: dict[str, Routing]) -> Routing | None:
    """The routing of the queries if each expert is a head, else None."""
    # MAE's experts share all heads, and SwitchHead's are projections
    if isinstance(module, (MixtureOfAttentiveExperts, SwitchHeadAttention)):
        return None
    return routings.get("queries")


def _expert_of_slot(module: nn.Module, routing: Routing, places: Places) -> tuple[Tensor, int]:
    """The expert in each slot of each token, [K, B, T], and E, the number of experts that are heads."""
    expert_ids = routing.expert_ids
    num_experts = routing.num_experts
    if isinstance(module, MixtureOfAttention):  # each head of an expert counts as one
        expert_ids = module.head_index(routing)
        num_experts *= module.heads_per_expert
    # [B·T, K] → [B, T, K] → [K, B, T]
    return expert_ids.view(*places.tokens.shape, -1).permute(2, 0, 1).cpu(), num_experts


def _scatter_to_experts(values: Tensor, expert_of_slot: Tensor, num_experts: int) -> Tensor:
    """Sort values of slots by the expert in each slot.

    Args:
        values: the values, [K, B, T, ...].
        expert_of_slot: the expert in each slot, [K, B, T].
        num_experts: E, the number of experts.

    Returns:
        The values of the experts, [E, B, T, ...]; zero for tokens that did not choose the expert.
    """
    index = expert_of_slot
    while index.dim() < values.dim():
        index = index[..., None]
    zeros = values.new_zeros(num_experts, *values.shape[1:])
    return zeros.scatter(0, index.expand_as(values), values)


def _copying_by_expert(
    copying: CopyingShares, expert_of_slot: Tensor, num_experts: int
) -> Sequence[Tensor | None]:
    """The copying of each expert, [B, N − 1]; None if it was not measured for slots or experts."""
    if len(copying.heads) == num_experts:  # MoH computes all heads
        return copying.heads
    if len(copying.heads) == len(expert_of_slot):
        return list(_scatter_to_experts(torch.stack(copying.heads), expert_of_slot, num_experts))
    return [None] * num_experts  # NAMOH attends in packed rows, which belong to no single expert


def _gates_of_heads(
    module: nn.Module, routings: dict[str, Routing], places: Places
) -> dict[str, Tensor]:
    """Side → the gates of SwitchHead's experts in the first sequence, [H, E, T]; {} for other families."""
    gates: dict[str, Tensor] = {}
    if not isinstance(module, SwitchHeadAttention):
        return gates
    for side, routing in routings.items():
        of_first = routing.gates_by_expert[: places.tokens.size(1)]  # [T, H·E]
        gates[side] = of_first.t().unflatten(0, (module.num_heads, -1)).float().cpu()
    if module.shares_selection:
        gates["keys"] = gates["queries"]
    return gates


def _value_scores(
    name: str,
    head: int,
    routing: Routing,
    attention: Tensor,
    copying: CopyingShares,
    places: Places,
) -> list[HeadScore]:
    """The scores of a head's value experts, over the queries whose key has a value from that expert."""
    scores = []
    shares: Sequence[Tensor | None] = copying.value_experts or [None] * routing.num_experts
    experts_per_head = routing.num_experts // routing.groups
    for expert in range(experts_per_head):
        index = head * experts_per_head + expert
        # [B·T] → [B, T] → [B, N − 1]
        is_chosen = (routing.expert_ids == index).any(1).view_as(places.tokens)[:, places.keys]
        means = _mean_scores(attention, shares[index], is_chosen.cpu())
        scores.append(HeadScore(name, "expert", expert + 1, *means))
    return scores


def _mean_scores(
    attention: Tensor, copying: Tensor | None, chosen: Tensor
) -> tuple[float, float | None, float]:
    """Prefix matching, copying and the share of the queries that chose the head, from [B, N − 1] each."""
    mean_copying = None if copying is None else _mean(copying[chosen])
    return _mean(attention[chosen]), mean_copying, _mean(chosen)


def _mean(values: Tensor) -> float:
    """The mean; 0 if no query chose the head."""
    return values.double().mean().item() if values.numel() else 0.0
