"""Which experts a model's routers chose for the tokens of a sentence, as the page's JSON has it."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moa_fairseq.experiments.analysis.routed_model import kind_of, layer_of
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.routing import Routing

STRONGEST = 3  # number of keys that are shown for each token and slot


class RecordedPass(NamedTuple):
    """What is recorded of one forward pass over a batch.

    Args:
        weights: name of an attention → the weights of its heads or slots, [H, B, T, S].
        routings: name of a router → its routing. The name is that of the attention or σ-MoE, with ".keys"
            behind it if the router routes keys and values.
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
        keys_limit: once this many bytes are spent, sentences no longer have the strongest keys.
        experts_limit: once this many bytes are spent, sentences no longer have experts.
        limit: the limit for all sentences, in bytes.
        spent: the bytes of the sentences so far.
        with_keys: the number of sentences so far that have the strongest keys.
        with_experts: the number of sentences so far that have experts.
        count: the number of sentences so far.
    """

    keys_limit: int
    experts_limit: int
    limit: int
    spent: int = 0
    with_keys: int = 0
    with_experts: int = 0
    count: int = 0

    @property
    def has_keys(self) -> bool:
        """Whether the next sentence has the strongest keys."""
        return self.spent < self.keys_limit

    @property
    def has_experts(self) -> bool:
        """Whether the next sentence has experts."""
        return self.spent < self.experts_limit

    @property
    def is_spent(self) -> bool:
        """Whether the last sentence exceeded the limit."""
        return self.spent > self.limit

    def spend(self, sentence: Mapping[str, object]) -> None:
        """Count a sentence and its bytes.

        Args:
            sentence: the sentence as JSON has it.
        """
        self.with_keys += self.has_keys
        self.with_experts += self.has_experts
        self.count += 1
        self.spent += len(json.dumps(sentence, separators=(",", ":")))


@dataclasses.dataclass
class Router:
    """A router, or an attention without a router.

    Args:
        name: the name of its routing, or of the attention.
        queries: the side whose tokens are routed, "source" or "target".
        keys: the side whose tokens are attended to; None for a router of keys or outside attention.
        example: a routing, which has the numbers of experts; None in dense attention.
        slot_kind: what the attention weights belong to: "slots" of the K chosen experts, "heads" of the
            groups of experts, "experts" of MAE, or the heads of a "dense" attention.
        expert_heads: the share of each head in each expert of MAE, [E, H]; None for other attentions.
    """

    name: str
    queries: str
    keys: str | None
    example: Routing | None
    slot_kind: str = "dense"
    expert_heads: Tensor | None = None

    def as_json(self) -> dict[str, Any]:
        """The router's properties on the page, without its load."""
        stack = self.name.split(".")[0]
        kind = kind_of(self.name)
        if kind == "other":  # σ-MoE
            kind = f"{stack} feed-forward" if self.keys is None else f"{stack} attention"
        about = {
            "name": self.name,
            "kind": kind,
            "layer": layer_of(self.name),
            "on": self.queries,
            "to": self.keys,
        }
        routing = self.example
        if routing is None:
            return about | {"experts": 0}
        return about | {
            "experts": routing.num_experts,
            "per_token": routing.expert_ids.size(1),
            "groups": routing.groups,
            "shared": routing.shared,
            "scope": routing.scope,
            "slots": self.slot_kind,
        }

    def route(
        self, recorded: RecordedPass, row: int, is_token: Tensor, with_keys: bool
    ) -> dict[str, list[int]]:
        """What the router chose for a sentence.

        Args:
            recorded: a pass over the batch with the sentence.
            row: the index of the sentence in the batch.
            is_token: whether each position of the queries is a token, not padding, [T].
            with_keys: whether the strongest keys are returned.

        Returns:
            "e", the experts of each token, the one with the largest gate first, [T·K]; "g", their gates in
            thousandths, [T·K]; "k", the strongest keys of each expert, each with its weight in thousandths,
            [T·K·3·2]. If a sequence is routed as a whole, "e" and "g" have one row, [K].
        """
        route = {}
        order = None
        routing = recorded.routings.get(self.name)
        if routing is not None:
            experts = _row(routing.expert_ids, row, recorded.batch_size)
            gates = _row(routing.gates, row, recorded.batch_size)
            if routing.scope == "tokens":
                experts = experts[is_token]
                gates = gates[is_token]
            order = gates.argsort(dim=-1, descending=True, stable=True)
            experts = experts.gather(1, order)
            route["e"] = experts.flatten().tolist()
            route["g"] = _thousandths(gates.gather(1, order)).flatten().tolist()
        if with_keys and self.keys is not None:
            weights = recorded.weights[self.name]
            maps = weights[:, row, is_token]
            if self.expert_heads is not None:  # MAE: the mean of an expert's heads
                maps = torch.tensordot(self.expert_heads, maps, dims=1)
                order = experts
            elif order is not None:  # SwitchHead: K / H slots in a row are those of one head
                slots = torch.arange(order.size(1))
                maps = maps[slots * len(maps) // len(slots)]
            queries, keys = weights.shape[2:]
            # In self-attention, earlier text may come before the sentence (Transformer-XL)
            carried = keys - queries if self.keys == self.queries else 0
            route["k"] = _strongest(maps, order, carried)
        return route


def routers_of(model: nn.Module, recorded: RecordedPass, is_translation: bool) -> list[Router]:
    """The routers and the dense attentions of a model in the order in which they run; σ-MoEs come last.

    Args:
        model: the model.
        recorded: any pass of the model.
        is_translation: whether the model translates: then the encoder reads the tokens of the source.
    """
    names = []
    for attention in recorded.weights:
        routed = [name for name in recorded.routings if name.removesuffix(".keys") == attention]
        names += routed or [attention]
    names += [name for name in recorded.routings if name not in names]
    return [_router(name, model, recorded, is_translation) for name in names]


def _router(name: str, model: nn.Module, recorded: RecordedPass, is_translation: bool) -> Router:
    """The router or dense attention of a name."""
    queries = "source" if is_translation and name.startswith("encoder") else "target"
    example = recorded.routings.get(name)
    attention = name.removesuffix(".keys")
    if attention not in recorded.weights:
        return Router(name, queries, None, example)
    keys = "source" if attention.endswith("encoder_attn") else queries
    if example is None:
        return Router(name, queries, keys, None)
    slot_kind = "heads"
    expert_heads = None
    module = model.get_submodule(attention)
    if isinstance(module, MixtureOfAttentiveExperts):
        slot_kind = "experts"
        heads = module.heads_of_experts().cpu()
        expert_heads = heads / heads.sum(1, keepdim=True)
    elif len(recorded.weights[attention]) == example.expert_ids.size(1):
        slot_kind = "slots"
    if name.endswith(".keys"):
        return Router(name, keys, None, example, slot_kind)
    return Router(name, queries, keys, example, slot_kind, expert_heads)


def _strongest(maps: Tensor, order: Tensor | None, carried: int) -> list[int]:
    """The positions of the strongest keys of each slot, with their weights in thousandths, [T·K·3·2].

    Args:
        maps: the attention of each slot, [K, T, S].
        order: the slots of each token in the order of the page, [T or 1, K]; None: the order of the maps.
        carried: the number of keys before the sentence; their positions are negative.
    """
    by_token = maps.transpose(0, 1)  # [T, K, S]
    if order is not None:
        tokens = torch.arange(len(by_token))[:, None]
        by_token = by_token[tokens, order]
    count = min(STRONGEST, by_token.size(2))
    values, positions = by_token.topk(count, -1)
    keys = torch.stack([positions - carried, _thousandths(values)], -1)
    return torch.nn.functional.pad(keys, (0, 0, 0, STRONGEST - count)).flatten().tolist()


def _thousandths(values: Tensor) -> Tensor:
    return (1000 * values).round().long()


def _row(values: Tensor, row: int, batch_size: int) -> Tensor:
    """The values of one sentence, [T, K], from those of a batch, [B·T, K]."""
    return values.detach().cpu().view(batch_size, -1, values.size(1))[row]
