"""What the analyses of a trained model share: running a data set through it, and its modules by kind."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring.trained_model import batches, device_for
from moa_fairseq.layers.routing import Routing
from moa_fairseq.plugin.forward_context import NamedRoutings, collect_routings

# First and last part of a module's path → label of its kind of attention, in the order of the pictures
KINDS_OF_ATTENTION = {
    ("encoder", "self_attn"): "encoder self-attention",
    ("decoder", "self_attn"): "decoder self-attention",
    ("decoder", "encoder_attn"): "decoder cross-attention",
}


def forward_passes(
    model: nn.Module, task: Any, subset: str, max_tokens: int, cpu: bool
) -> Iterator[tuple[dict[str, Any], NamedRoutings]]:
    """Run a subset through a model with routers, batch by batch, with teacher forcing.

    Args:
        model: the model, which is moved to the device and put in evaluation mode.
        task: fairseq's task, which reads the data.
        subset: the name of the subset, such as "valid".
        max_tokens: the largest number of tokens of a batch.
        cpu: whether the model runs on the CPU although there is a GPU.

    Yields:
        For every batch, the batch and the routings of all routers in forward order.

    Raises:
        UserError: if the model has no router, or if the subset does not exist or is empty.
    """
    device = device_for(cpu)
    empty = True
    model.to(device).eval()  # which returns nothing for a model of fairseq's hub
    for sample in batches(task, model, subset, max_tokens, device):
        with torch.no_grad(), collect_routings() as routings:
            # Without the output layer, which has no router and may have large logits
            model(**sample["net_input"], features_only=True)
        if not routings:
            raise UserError(
                f"This model has no router: {type(model).__name__} has no mixture of experts."
            )
        yield sample, routings
        empty = False
    if empty:
        raise UserError(f"The subset {subset} has no sentence of at most {max_tokens} tokens.")


@dataclass
class RouterUse:
    """The decisions of one router on a data set, without padding and without shared experts (MoH).

    An instance is a token, or a sequence if the router decides for whole sequences.

    Args:
        name: the name of the recorded routing.
        experts_per_token: K, the number of experts that each instance chooses.
        counts: the number of instances that chose each expert, [E] float64.
        gate_mass: the sum of the gates that the instances gave each expert, [E] float64.
        favourites: the number of instances whose largest probability is in each column of the probabilities,
            float64; here the shared experts' columns count.
        scope: "tokens" or "sequences", the kind of the instances.
        instances: the number of instances.
        total_entropy: the sum over the instances of the entropy of their probabilities, in nats.
    """

    name: str
    experts_per_token: int
    counts: Tensor
    gate_mass: Tensor
    favourites: Tensor
    scope: str = "tokens"
    instances: int = 0
    total_entropy: float = 0.0

    @classmethod
    def empty(cls, name: str, routing: Routing) -> "RouterUse":
        """No decisions yet, of the router that made `routing`."""
        counts, gate_mass = torch.zeros(
            2, routing.num_experts - routing.shared, dtype=torch.float64
        )
        favourites = torch.zeros(routing.probs.size(1), dtype=torch.float64)
        experts_per_token = routing.expert_ids.size(1) - routing.shared
        return cls(name, experts_per_token, counts, gate_mass, favourites, routing.scope)

    def add(self, routing: Routing) -> None:
        """Add the decisions of one forward pass."""
        real = slice(None) if routing.padding is None else ~routing.padding
        gates = routing.gates.detach()[real].double()
        probs = routing.probs.detach()[real]
        gate_mass = gates.new_zeros(routing.num_experts)
        gate_mass.scatter_add_(0, routing.expert_ids[real].flatten(), gates.flatten())
        favourites = torch.bincount(probs.argmax(-1), minlength=probs.size(1))
        self.counts += routing.expert_counts.double().cpu()
        self.gate_mass += gate_mass[routing.shared :].cpu()
        self.favourites += favourites.cpu()
        self.instances += len(probs)
        self.total_entropy += torch.special.entr(probs.double()).sum().item()


def router_uses(passes: Iterable[NamedRoutings]) -> list[RouterUse]:
    """The decisions of each router in several forward passes, in the order in which the routers first ran.

    Args:
        passes: for each pass, the name and the routing of all routers.
    """
    uses: dict[str, RouterUse] = {}
    for name, routing in chain.from_iterable(passes):
        if name not in uses:
            uses[name] = RouterUse.empty(name, routing)
        uses[name].add(routing)
    return list(uses.values())


def kind_of(name: str) -> str:
    """The kind of attention that a module's name says.

    "decoder.layers.3.encoder_attn" is a "decoder cross-attention". The name of its routing for keys and
    values ends in ".keys", and gives "decoder cross-attention, keys". Any other name gives "other".
    """
    path = name.removesuffix(".keys").split(".")
    side = ", keys" if name.endswith(".keys") else ""
    return KINDS_OF_ATTENTION.get((path[0], path[-1]), "other") + side


def layer_of(name: str) -> int:
    """The number of a module's layer, from 1; 1 for a module outside the layers."""
    return next((int(part) for part in name.split(".") if part.isdigit()), 0) + 1


def by_kind(summaries: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group measurements by the kind of attention, in the order of the pictures; no kind is empty.

    Args:
        summaries: the measurements of each module, whose path is their "name".
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for kind in (*KINDS_OF_ATTENTION.values(), "other"):
        groups |= {kind: [], f"{kind}, keys": []}
    for summary in summaries:
        groups[kind_of(summary["name"])].append(summary)
    return {kind: group for kind, group in groups.items() if group}
