"""How a trained model spreads a data set over its experts (MoA Figs. 3 and 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Tuple

import torch
from torch import Tensor

from moa_fairseq.analysis.forward_passes import forward_passes
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.evaluation.trained_model import device_for, load_trained


@dataclass
class ExpertLoad:
    """What one router did with a data set, padding and experts that are always on (MoH) left out.

    counts [E]: how many tokens chose each expert. gate_mass [E]: the gates they gave it, added up.
    """

    name: str
    experts_per_token: int
    counts: Tensor
    gate_mass: Tensor

    @property
    def tokens(self) -> int:
        """Number of routed tokens."""
        return round(self.counts.sum().item() / self.experts_per_token)

    @property
    def load(self) -> Tensor:
        """Share of all choices that fell on each expert, [E], sum 1: the percentages of Fig. 3."""
        return self.counts / self.counts.sum()

    @property
    def gate_share(self) -> Tensor:
        """Share of all gate weight that each expert got, [E], sum 1. Even when K = E, this can differ."""
        return self.gate_mass / self.gate_mass.sum()

    def summary(self) -> Dict[str, Any]:
        """Plain data: sizes, shares, entropy in nats and as a fraction of log E, extremes, dead experts."""
        load, num_experts = self.load, self.counts.numel()
        entropy = torch.special.entr(load).sum().item()
        return {
            "name": self.name,
            "num_experts": num_experts,
            "experts_per_token": self.experts_per_token,
            "tokens": self.tokens,
            "entropy": entropy,
            "evenness": entropy / math.log(num_experts) if num_experts > 1 else 1.0,
            "max_load": load.max().item(),
            "min_load": load.min().item(),
            "dead_experts": int((self.counts == 0).sum()),
            "load": load.tolist(),
            "gate_share": self.gate_share.tolist(),
        }


class LoadCounter:
    """Adds up decisions, router by router, in the order in which they first ran."""

    def __init__(self) -> None:
        self._loads: Dict[str, ExpertLoad] = {}

    def add(self, decisions: Iterable[Tuple[str, RoutingDecision]]) -> None:
        """Count the decisions of one forward pass."""
        for name, decision in decisions:
            counts, mass = decision.expert_counts.double().cpu(), _gate_mass(decision).cpu()
            load = self._loads.get(name)
            if load is None:
                per_token = decision.expert_index.size(1) - decision.shared
                self._loads[name] = ExpertLoad(name, per_token, counts, mass)
            else:
                load.counts += counts
                load.gate_mass += mass

    def loads(self) -> List[ExpertLoad]:
        """One ExpertLoad per router."""
        return list(self._loads.values())


def _gate_mass(decision: RoutingDecision) -> Tensor:
    gate = decision.gate.detach().double()
    if decision.padding_mask is not None:
        gate = gate.masked_fill(decision.padding_mask.unsqueeze(1), 0.0)
    mass = gate.new_zeros(decision.num_experts)
    mass = mass.scatter_add(0, decision.expert_index.reshape(-1), gate.reshape(-1))
    return mass[decision.shared :]


def measure_expert_load(
    checkpoint: Path, data: Path, subset: str = "valid", max_tokens: int = 4096, cpu: bool = False
) -> List[ExpertLoad]:
    """Run `subset` of the binarised `data` through the model with teacher forcing, and count.

    Returns one ExpertLoad per router in forward order. Raises UserError if the checkpoint cannot be
    loaded, does not fit the data, or has no router, or if the subset does not exist or is empty.
    """
    model, task = load_trained(checkpoint, data)
    counter = LoadCounter()
    for _, decisions in forward_passes(task, model, subset, max_tokens, device_for(cpu)):
        counter.add(decisions)
    return counter.loads()
