"""Which experts a model's routers chose for the tokens of a sentence, as the page's JSON has it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from torch import Tensor, nn

from moa_fairseq.experiments.analysis.routed_model import kind_of
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.routing import Routing
from moa_fairseq.plugin.forward_context import NamedRoutings

STRONGEST = 3  # keys of a slot that are shown


@dataclasses.dataclass
class Budget:
    """The bytes that the sentences of one run may have on the page.

    The first sentences have all details; then the strongest keys are left out, then the experts.

    Args:
        keys: up to how many bytes sentences have strongest keys.
        experts: up to how many bytes they have experts.
        all: of all sentences.
        spent: so far.
        with_keys, with_experts, count: how many sentences have what.
    """

    keys: int
    experts: int
    all: int
    spent: int = 0
    with_keys: int = 0
    with_experts: int = 0
    count: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether the last sentence was one too many."""
        return self.spent > self.all

    def spend(self, sentence: dict[str, Any]) -> None:
        """Count a sentence.

        Args:
            sentence: as JSON has it.
        """
        self.with_keys += self.spent < self.keys
        self.with_experts += self.spent < self.experts
        self.count += 1
        self.spent += len(json.dumps(sentence, separators=(",", ":")))


@dataclasses.dataclass
class Router:
    """A router, or an attention without one.

    Args:
        name: as it is recorded; that of the attention, and ".keys" where it routes keys and values.
        module: of the attention.
        on: "source" or "target": whose tokens are routed.
        to: whose tokens they attend to; None where nothing is attended to.
        routing: the first one, for its sizes; None in dense attention.
        slots: of attention weights: "slots" of the K experts, "heads" of groups, "experts" of MAE, "dense".
    """

    name: str
    module: str
    on: str
    to: str | None
    routing: Routing | None = None
    slots: str = "dense"

    def as_json(self, model: nn.Module) -> dict[str, Any]:
        """What the page knows of it besides its load.

        Args:
            model: that it is part of.
        """
        routing = self.routing
        layer = next((int(part) for part in self.name.split(".") if part.isdigit()), 0) + 1
        kind = kind_of(self.name)
        if kind == "other":  # σ-MoE
            kind = f"{self.name.split('.')[0]} {'feed-forward' if self.to is None else 'attention'}"
        about = {"name": self.name, "kind": kind, "layer": layer, "on": self.on, "to": self.to}
        if routing is None:
            return {**about, "experts": 0}
        return {
            **about,
            "experts": routing.num_experts,
            "per_token": routing.expert_ids.size(1),
            "groups": routing.groups,
            "shared": routing.shared,
            "scope": routing.scope,
            "slots": self.slots,
        }


class Routers:
    """The routers of a model in the order in which they run, with its dense attentions.

    Args:
        model: of the run.
        pairs: whether it translates: then an encoder's tokens are the source's.
    """

    def __init__(self, model: nn.Module, pairs: bool) -> None:
        self.model = model
        self.pairs = pairs
        self.all: list[Router] = []

    def meet(self, weights: dict[str, Tensor], routings: NamedRoutings) -> None:
        """Note the routers of the first pass.

        Args:
            weights: of each attention, [H, B, T, S].
            routings: of the pass.
        """
        if self.all:
            return
        routings_by_name = dict(routings)
        for module in weights:
            is_routed = False
            for name, routing in routings_by_name.items():
                if name in (module, f"{module}.keys"):
                    is_routed = True
                    self.all.append(self._router(name, module, routing, weights[module]))
            if not is_routed:
                side = self._side(module, False)
                self.all.append(Router(module, module, side, self._memory(module)))
        for name, routing in routings:
            if name.removesuffix(".keys") not in weights:
                self.all.append(Router(name, name, self._side(name, False), None, routing))

    def _router(self, name: str, module: str, routing: Routing, weights: Tensor) -> Router:
        slots = "heads"
        if isinstance(self.model.get_submodule(module), MixtureOfAttentiveExperts):
            slots = "experts"
        elif weights.size(0) == routing.expert_ids.size(1):
            slots = "slots"
        of_keys = routing.side == "keys"
        to = None if of_keys else self._memory(module)
        return Router(name, module, self._side(module, of_keys), to, routing, slots)

    def _side(self, module: str, of_keys: bool) -> str:
        is_source = module.startswith("encoder") or (of_keys and module.endswith("encoder_attn"))
        return "source" if self.pairs and is_source else "target"

    def _memory(self, module: str) -> str:
        return "source" if module.endswith("encoder_attn") else self._side(module, False)

    def routes(
        self,
        weights: dict[str, Tensor],
        routings: NamedRoutings,
        row: int,
        size: int,
        places: dict[str, Any],
        budget: Budget,
    ) -> list[dict[str, list[int]] | None] | None:
        """Of each router what it chose for a sentence.

        Args:
            weights, routings: of a pass over a batch.
            row: of the sentence in the batch.
            size: of the batch, B.
            places: "source" and "target" → which positions of the row are tokens.
            budget: what is left of the page's size.

        Returns:
            For each router: "e", its experts, the heaviest first, [T·K]; "g", their gates in thousandths,
            [T·K]; "k", of each expert the strongest keys and their weights in thousandths, [T·K·3·2]. One row
            of "e" and "g" where a sequence is routed as a whole. None where the page has no more space.
        """
        if budget.spent >= budget.experts:
            return None
        routings_by_name = dict(routings)
        routes: list[dict[str, list[int]] | None] = []
        for router in self.all:
            routing = routings_by_name.get(router.name)
            real = places[router.on]
            route: dict[str, list[int]] = {}
            order = None
            if routing is not None:
                chosen = _row(routing.expert_ids, row, size)
                gates = _row(routing.gates, row, size)
                if routing.scope == "tokens":
                    chosen = chosen[real]
                    gates = gates[real]
                order = gates.argsort(dim=-1, descending=True, stable=True)
                route["e"] = chosen.gather(1, order).flatten().tolist()
                route["g"] = _thousandths(gates.gather(1, order))
            if router.to is not None and budget.spent < budget.keys:
                maps = self._maps(router, weights[router.module][:, row], routing)[:, real]
                queries, keys = weights[router.module].shape[2:]
                carried = keys - queries if router.to == router.on else 0
                route["k"] = _strongest(maps, order, carried)
            routes.append(route)
        return routes

    def _maps(self, router: Router, weights: Tensor, routing: Routing | None) -> Tensor:
        """Attention of each slot, [K, T, S], of heads [H, T, S]."""
        attention = self.model.get_submodule(router.module)
        if isinstance(attention, MixtureOfAttentiveExperts) and routing is not None:
            heads = attention.heads_of_experts().cpu()
            heads = heads / heads.sum(1, keepdim=True)
            experts = (heads @ weights.flatten(1)).view(-1, *weights.shape[1:])
            return experts if routing.chooses_all else experts[routing.expert_ids[0].cpu()]
        if router.slots == "heads" and routing is not None:
            count = routing.expert_ids.size(1)
            return weights[torch.arange(count) * weights.size(0) // count]
        return weights


def _strongest(maps: Tensor, order: Tensor | None, carried: int) -> list[int]:
    """The strongest keys of each slot in the order of its gates, and their weights, [T·K·3·2].

    The first `carried` keys are earlier text, and have negative places.
    """
    by_token = maps.transpose(0, 1)  # [T, K, S]
    if order is not None:
        slots = order.expand(by_token.size(0), -1)[..., None]
        by_token = by_token.gather(1, slots.expand(-1, -1, by_token.size(2)))
    count = min(STRONGEST, by_token.size(2))
    values, places = by_token.topk(count, -1)
    rows = torch.stack([places - carried, (1000 * values).round().long()], -1)
    if count < STRONGEST:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, STRONGEST - count))
    return rows.flatten().tolist()


def _row(values: Tensor, row: int, size: int) -> Tensor:
    """A sentence's part, [T, K], of a batch's values, [T·B, K]."""
    return values.detach().cpu().view(size, -1, values.size(1))[row]


def _thousandths(values: Tensor) -> list[int]:
    return (1000 * values.float()).round().long().flatten().tolist()
