"""Which experts a model's routers chose for the tokens of a sentence, as the page's JSON has it."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moa_fairseq.experiments.analysis.routed_model import kind_of
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.routing import Routing

STRONGEST = 3  # number of keys that are shown for each token and slot


class RecordedPass(NamedTuple):
    """What is recorded of one forward pass over a batch.

    Args:
        weights: name of an attention → the weights of its heads or slots, [H, B, T, S].
        routings: name of a router → its routing.
        batch_size: B.
    """

    weights: dict[str, Tensor]
    routings: dict[str, Routing]
    batch_size: int


@dataclasses.dataclass
class Budget:
    """The bytes that the sentences of one run may take on the page.

    The first sentences have all details. Later sentences lack the strongest keys, and the last ones also lack
    the experts.

    Args:
        keys: once this many bytes are spent, sentences no longer have the strongest keys.
        experts: once this many bytes are spent, sentences no longer have experts.
        all: the limit for all sentences, in bytes.
        spent: the bytes of the sentences so far.
        with_keys: the number of sentences so far that have the strongest keys.
        with_experts: the number of sentences so far that have experts.
        count: the number of sentences so far.
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
        """Whether the last sentence exceeded the limit."""
        return self.spent > self.all

    def spend(self, sentence: Mapping[str, object]) -> None:
        """Count a sentence and its bytes.

        Args:
            sentence: the sentence as JSON has it.
        """
        self.with_keys += self.spent < self.keys
        self.with_experts += self.spent < self.experts
        self.count += 1
        self.spent += len(json.dumps(sentence, separators=(",", ":")))


@dataclasses.dataclass
class Router:
    """A router, or an attention without a router.

    Args:
        name: the name of the recorded routing: the attention's name, with ".keys" behind it if the router
            routes keys and values.
        module: the name of the attention.
        on: the side whose tokens are routed, "source" or "target".
        to: the side whose tokens are attended to; None for a router outside attention.
        routing: the routing of the first pass, which has the sizes; None in dense attention.
        slots: what the attention weights belong to: "slots" of the K chosen experts, "heads" of the groups of
            experts, "experts" of MAE, or the heads of a "dense" attention.
    """

    name: str
    module: str
    on: str
    to: str | None
    routing: Routing | None = None
    slots: str = "dense"

    def as_json(self) -> dict[str, Any]:
        """The router's properties on the page, without its load."""
        routing = self.routing
        layer = next((int(part) for part in self.name.split(".") if part.isdigit()), 0) + 1
        kind = kind_of(self.name)
        if kind == "other":  # σ-MoE
            kind = f"{self.name.split('.')[0]} {'feed-forward' if self.to is None else 'attention'}"
        about = {"name": self.name, "kind": kind, "layer": layer, "on": self.on, "to": self.to}
        if routing is None:
            return about | {"experts": 0}
        return about | {
            "experts": routing.num_experts,
            "per_token": routing.expert_ids.size(1),
            "groups": routing.groups,
            "shared": routing.shared,
            "scope": routing.scope,
            "slots": self.slots,
        }


class Routers:
    """The routers and the dense attentions of a model in the order in which they run.

    Args:
        model: the model of the run.
        pairs: whether the model translates: then the encoder reads the tokens of the source.
    """

    def __init__(self, model: nn.Module, pairs: bool) -> None:
        self.model = model
        self.pairs = pairs
        self.all: list[Router] = []

    def meet(self, recorded: RecordedPass) -> None:
        """List the routers of the first pass; later passes have the same ones.

        Args:
            recorded: any pass of the model.
        """
        if self.all:
            return
        for module, weights in recorded.weights.items():
            names = [name for name in recorded.routings if name in (module, f"{module}.keys")]
            for name in names:
                self.all.append(self._router(name, module, recorded.routings[name], weights))
            if not names:
                self.all.append(Router(module, module, self._side(module), self._memory(module)))
        for name, routing in recorded.routings.items():
            if name.removesuffix(".keys") not in recorded.weights:
                self.all.append(Router(name, name, self._side(name), None, routing))

    def _router(self, name: str, module: str, routing: Routing, weights: Tensor) -> Router:
        """The router that recorded a routing, in an attention with these weights."""
        slots = "heads"
        if isinstance(self.model.get_submodule(module), MixtureOfAttentiveExperts):
            slots = "experts"
        elif weights.size(0) == routing.expert_ids.size(1):
            slots = "slots"
        if routing.side == "keys":
            return Router(name, module, self._memory(module), None, routing, slots)
        return Router(name, module, self._side(module), self._memory(module), routing, slots)

    def _side(self, module: str) -> str:
        """The side whose tokens attend."""
        return "source" if self.pairs and module.startswith("encoder") else "target"

    def _memory(self, module: str) -> str:
        """The side whose tokens are attended to."""
        return "source" if module.endswith("encoder_attn") else self._side(module)

    def routes(
        self, recorded: RecordedPass, row: int, tokens: dict[str, Any], budget: Budget
    ) -> list[dict[str, list[int]]] | None:
        """What each router chose for a sentence.

        Args:
            recorded: a pass over the batch with the sentence.
            row: the index of the sentence in the batch.
            tokens: "source" and "target" → index of the positions of that row that are tokens, not padding.
            budget: how many bytes the page has left.

        Returns:
            For each router: "e", the experts of each token, the one with the largest gate first, [T·K]; "g",
            their gates in thousandths, [T·K]; "k", the strongest keys of each expert, each with its weight in
            thousandths, [T·K·3·2]. If a sequence is routed as a whole, "e" and "g" have one row, [K]. None if
            the page has no more space for experts.
        """
        if budget.spent >= budget.experts:
            return None
        size = recorded.batch_size
        routes = []
        for router in self.all:
            routing = recorded.routings.get(router.name)
            real = tokens[router.on]
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
                thousandths = 1000 * gates.gather(1, order).float()
                route["g"] = thousandths.round().long().flatten().tolist()
            if router.to is not None and budget.spent < budget.keys:
                weights = recorded.weights[router.module]
                maps = self._maps(router, weights[:, row], routing)[:, real]
                queries, keys = weights.shape[2:]
                carried = keys - queries if router.to == router.on else 0
                route["k"] = _strongest(maps, order, carried)
            routes.append(route)
        return routes

    def _maps(self, router: Router, weights: Tensor, routing: Routing | None) -> Tensor:
        """The attention of each slot, [K, T, S], from the attention of the heads, [H, T, S]."""
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
    """The positions of the strongest keys of each slot, with their weights in thousandths, [T·K·3·2].

    The slots of a token are in the given order [T, K]. The first `carried` keys are earlier text, and have
    negative positions.
    """
    by_token = maps.transpose(0, 1)  # [T, K, S]
    if order is not None:
        slots = order.expand(by_token.size(0), -1)[..., None]
        by_token = by_token.gather(1, slots.expand(-1, -1, by_token.size(2)))
    count = min(STRONGEST, by_token.size(2))
    values, positions = by_token.topk(count, -1)
    rows = torch.stack([positions - carried, (1000 * values).round().long()], -1)
    if count < STRONGEST:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, STRONGEST - count))
    return rows.flatten().tolist()


def _row(values: Tensor, row: int, size: int) -> Tensor:
    """The values of one sentence, [T, K], from those of a batch, [B·T, K]."""
    return values.detach().cpu().view(size, -1, values.size(1))[row]
