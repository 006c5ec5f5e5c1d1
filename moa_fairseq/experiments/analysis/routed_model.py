"""What the analyses of one trained model share: a data set run through it, its modules by kind."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring.trained_model import batches, device_for
from moa_fairseq.plugin.forward_context import NamedRoutings, collect_routings

# First and last part of a module's path → label of its kind of attention, in the order of the pictures.
KINDS_OF_ATTENTION = {
    ("encoder", "self_attn"): "encoder self-attention",
    ("decoder", "self_attn"): "decoder self-attention",
    ("decoder", "encoder_attn"): "decoder cross-attention",
}


def forward_passes(
    args: argparse.Namespace, model: nn.Module, task: Any
) -> Iterator[tuple[dict[str, Any], NamedRoutings]]:
    """Run a subset through a model with routers, batch by batch, by teacher forcing.

    Args:
        args: subset, max_tokens (of a batch) and cpu.
        model: is put in evaluation mode on the device.
        task: fairseq's, which reads the data.

    Returns:
        (batch, routings of all routers in forward order) of every batch.

    Raises:
        UserError: if the model has no router, or if the subset does not exist or is empty.
    """
    device = device_for(args.cpu)
    empty = True
    model.to(device).eval()  # in fairseq's hub `eval` returns nothing
    for sample in batches(task, model, args.subset, args.max_tokens, device):
        with torch.no_grad(), collect_routings() as routings:
            # There is no router in the output layer
            model(**sample["net_input"], features_only=True)
        if not routings:
            raise UserError(
                f"This model has no router: {type(model).__name__} has no mixture of experts."
            )
        yield sample, routings
        empty = False
    if empty:
        raise UserError(
            f"The subset {args.subset} has no sentence of at most {args.max_tokens} tokens."
        )


@dataclass
class RouterUse:
    """What one router did with a data set, without padding and without experts that are always on (MoH).

    Args:
        name: of the router, as it is recorded.
        experts_per_token: K.
        counts: how many tokens (or sequences: `scope`) chose each expert, [E] float64.
        gate_mass: the gates that they gave each expert, added up, [E] float64.
        favourites: how many gave each column of the probabilities their greatest value, those of experts that
            are always on included, float64.
        scope: "tokens", or "sequences" where a sequence is routed as one.
        instances: how many tokens or sequences there were.
        total_entropy: Σ H(probabilities) over the instances, in nats.
    """

    name: str
    experts_per_token: int
    counts: Tensor
    gate_mass: Tensor
    favourites: Tensor
    scope: str = "tokens"
    instances: int = 0
    total_entropy: float = 0.0


def router_uses(passes: Iterable[NamedRoutings]) -> list[RouterUse]:
    """The use of each router over several forward passes, in the order in which the routers first ran.

    Args:
        passes: (name, routing) of all routers, for each pass.
    """
    uses: dict[str, RouterUse] = {}
    for name, routing in chain.from_iterable(passes):
        padding = routing.padding
        shared = routing.shared
        real = slice(None) if padding is None else ~padding
        index = routing.expert_ids.detach()[real]
        gate = routing.gates.detach()[real]
        probs = routing.probs.detach()[real]
        if name not in uses:
            counts, summed_probability = torch.zeros(
                2, routing.num_experts - shared, dtype=torch.float64
            )
            favourites = torch.zeros(probs.size(1), dtype=torch.float64)
            uses[name] = RouterUse(
                name, index.size(1) - shared, counts, summed_probability, favourites, routing.scope
            )
        use = uses[name]
        summed_probability = gate.new_zeros(routing.num_experts, dtype=torch.float64)
        use.counts += routing.expert_counts.double().cpu()
        use.gate_mass += summed_probability.scatter_add(
            0, index.flatten(), gate.double().flatten()
        )[shared:].cpu()
        use.favourites += torch.bincount(probs.argmax(-1), minlength=probs.size(1)).cpu()
        use.instances += len(probs)
        use.total_entropy += torch.special.entr(probs.double()).sum().item()
    return list(uses.values())


def kind_of(name: str) -> str:
    """The kind of attention of a module.

    "decoder.layers.3.encoder_attn" is a "decoder cross-attention"; its choice for keys and values, whose name
    ends in ".keys", is "decoder cross-attention, keys"; a name that fits nowhere is "other".
    """
    path = name.removesuffix(".keys").split(".")
    side = ", keys" if name.endswith(".keys") else ""
    return KINDS_OF_ATTENTION.get((path[0], path[-1]), "other") + side


def by_kind(summaries: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Measurements of modules by kind of attention, in the order of the pictures; no empty kinds.

    Args:
        summaries: one for each module, whose path it has as "name".
    """
    groups = {}
    for label, side in product((*KINDS_OF_ATTENTION.values(), "other"), ("", ", keys")):
        if group := [item for item in summaries if kind_of(item["name"]) == label + side]:
            groups[label + side] = group
    return groups
