"""How decided the gates of MAE are, and whom they send to which expert (arXiv 2005.06537, §5.1, Table 8).

An instance is what a gate decides once for: a sequence in the encoder, a position in a decoder, whose
gates see the inputs up to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from moa_fairseq.analysis.forward_passes import forward_passes
from moa_fairseq.analysis.module_groups import grouped
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.attention.sequence_gate import gates_of
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.trained_model import device_for, load_trained


@dataclass
class GateUse:
    """What one gate did with a data set, padding left out.

    total_entropy: Σ H(g) over the instances, in nats. counts [E]: how many instances gave each expert the
    greatest weight; None for a uniform gate, which prefers nobody.
    """

    name: str
    num_experts: int
    per_position: bool
    instances: int = 0
    total_entropy: float = 0.0
    counts: Optional[Tensor] = None

    @property
    def entropy(self) -> float:
        """H(g) = −Σ g_i log g_i in nats, averaged over the instances."""
        return self.total_entropy / self.instances

    @property
    def uniform_entropy(self) -> float:
        """ln E: the entropy of a gate that weights all experts alike, the greatest there is."""
        return math.log(self.num_experts)

    @property
    def shares(self) -> Optional[List[float]]:
        """Share of the instances attributed to each expert, [E], sum 1; None for a uniform gate."""
        return None if self.counts is None else (self.counts / self.counts.sum()).tolist()

    def add(self, decision: RoutingDecision) -> None:
        """Count the instances of one forward pass."""
        probs = decision.probs.detach().double()
        if decision.padding_mask is not None:
            probs = probs[~decision.padding_mask]
        self.instances += probs.size(0)
        self.total_entropy += torch.special.entr(probs).sum().item()
        if self.counts is not None:
            self.counts += torch.bincount(probs.argmax(-1), minlength=self.num_experts).cpu()

    def summary(self) -> Dict[str, Any]:
        """Plain data: sizes, entropies in nats, shares (None for a uniform gate)."""
        return {
            "name": self.name,
            "num_experts": self.num_experts,
            "gate": "uniform" if self.counts is None else "learned",
            "instance": "position" if self.per_position else "sequence",
            "instances": self.instances,
            "entropy": self.entropy,
            "uniform_entropy": self.uniform_entropy,
            "shares": self.shares,
        }


class GateCounter:
    """Adds up the decisions of every mixture of attentive experts in a model, module by module."""

    def __init__(self, model: nn.Module) -> None:
        modules = [module for module in model.modules() if isinstance(module, MixtureOfAttentiveExperts)]
        if not modules:
            raise UserError(
                f"{type(model).__name__} has no mixture of attentive experts, so it has no gates of MAE; "
                "`moa-fairseq analyze expert-load` shows the routers of MoA."
            )
        self._uses = {}
        for module in modules:
            learned = module.gate is not None
            counts = torch.zeros(module.num_experts, dtype=torch.int64) if learned else None
            per_position = learned and module.causal
            self._uses[module.name] = GateUse(module.name, module.num_experts, per_position, counts=counts)

    def add(self, decisions: Iterable[Tuple[str, RoutingDecision]]) -> None:
        """Count the decisions of one forward pass."""
        for name, decision in decisions:
            self._uses[name].add(decision)

    def uses(self) -> List[GateUse]:
        """One GateUse per module."""
        return list(self._uses.values())


def mean_entropies(uses: Sequence[GateUse]) -> Dict[str, Dict[str, float]]:
    """Per kind of attention, and for all: its modules' mean entropy, and that of uniform gates."""
    return {
        label: {
            "entropy": sum(use.entropy for use in group) / len(group),
            "uniform_entropy": sum(use.uniform_entropy for use in group) / len(group),
            "modules": len(group),
        }
        for label, group in {**grouped(uses), "all": uses}.items()
    }


def measure_gates(
    checkpoint: Path,
    data: Path,
    subset: str = "valid",
    max_tokens: int = 4096,
    cpu: bool = False,
    untrained: Optional[int] = None,
) -> List[GateUse]:
    """Run `subset` of the binarised `data` through the model with teacher forcing, and count.

    A language model reads the subset in the blocks of its training. untrained: a seed by which the gates'
    weights are drawn anew first, as a new model's, the rest and the gates' statistics staying: what gates
    show on these inputs that nobody has trained. Raises UserError if the checkpoint
    cannot be loaded, does not fit the data or has no such gates, or if the subset does not exist or is
    empty.
    """
    model, task = load_trained(checkpoint, data)
    counter = GateCounter(model)
    if untrained is not None:
        torch.manual_seed(untrained)
        for gate in gates_of(model):
            gate.reset_parameters()
    for _, decisions in forward_passes(task, model, subset, max_tokens, device_for(cpu)):
        counter.add(decisions)
    return counter.uses()
