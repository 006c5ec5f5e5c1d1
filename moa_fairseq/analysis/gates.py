"""Entropy of MAE's gates, and the share of instances that prefer each expert (§5.1, Table 8).

  moa-fairseq analyze gates runs/mae7 --output gates.png --json gates.json

--untrained 1 gives values to compare with: those of untrained gates on the same inputs.
An instance is a sequence in the encoder and a position in a decoder, whose gates see the inputs so far. The
paper's entropies (1.91 nats for MAE-7, 2.02 for NOBCD, 2.08 = ln 8 for UNI-MAE-7) are means over encoder
layers on WMT14's development set. Experts are numbered from 0.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor, nn

from moa_fairseq.analysis.plots import COLOURS, GREY, save, style
from moa_fairseq.analysis.routed_model import (
    add_model_arguments,
    by_kind,
    checkpoint_and_data,
    finish,
    forward_passes,
)
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.attention.sequence_gate import gates_of
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.trained_model import device_for, load_trained

NAME = "gates"
SUMMARY = "entropy of MAE's gates and the experts they prefer (MAE §5.1, Table 8)"
FEW = 10  # the shares of so many experts fit on a line of the table, and into the fields of the picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    add_model_arguments(parser)
    parser.add_argument(
        "--untrained",
        type=int,
        metavar="SEED",
        help="draw the gates' weights anew, as in a new model: shows untrained gates on the same inputs",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")


def analyze(args: argparse.Namespace) -> int:
    """Run a data set through a model; draw and print what its gates did."""
    checkpoint, data = checkpoint_and_data(args.model, args.data, args.max_tokens)
    uses = measure_gates(checkpoint, data, args.subset, args.max_tokens, args.cpu, args.untrained)
    summaries, means = [use.summary() for use in uses], mean_entropies(uses)
    kind = "Gates" if args.untrained is None else "Untrained gates"
    save(draw_gates(uses, f"{kind} of {args.model.name} on {args.subset}"), args.output)
    lines = _table(summaries, means)
    if args.untrained is not None:
        lines.append(
            f"The gates' weights were drawn anew with seed {args.untrained}: these gates are untrained."
        )
    if any(use.counts is None for use in uses):
        lines.append(
            "Uniform gates prefer no expert: instances are attributed to none, and there are no shares."
        )
    report = {"checkpoint": str(checkpoint), "subset": args.subset, "means": means, "modules": summaries}
    finish("\n".join(lines), {**report, "untrained_seed": args.untrained}, args.json, args.output)
    return 0


@dataclass
class GateUse:
    """What one gate did with a data set, padding left out.

    total_entropy: Σ H(g) over the instances, in nats. counts [E]: how many instances gave each expert the
    greatest weight; None for a uniform gate, which prefers no expert.
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
        """ln E: the entropy of a gate that weights all experts equally, the greatest possible."""
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


def uses_of(model: nn.Module) -> Dict[str, GateUse]:
    """An empty GateUse for each mixture of attentive experts in a model, by name. UserError if none."""
    uses = {}
    for module in model.modules():
        if isinstance(module, MixtureOfAttentiveExperts):
            learned = module.gate is not None
            counts = torch.zeros(module.num_experts, dtype=torch.int64) if learned else None
            per_position = learned and module.causal
            uses[module.name] = GateUse(module.name, module.num_experts, per_position, counts=counts)
    if not uses:
        raise UserError(
            f"{type(model).__name__} has no mixture of attentive experts, so it has no gates of MAE; "
            "`moa-fairseq analyze expert-load` shows the routers of MoA."
        )
    return uses


def mean_entropies(uses: Sequence[GateUse]) -> Dict[str, Dict[str, float]]:
    """Per kind of attention, and for all: its modules' mean entropy, and that of uniform gates."""
    return {
        label: {
            "entropy": sum(use.entropy for use in group) / len(group),
            "uniform_entropy": sum(use.uniform_entropy for use in group) / len(group),
            "modules": len(group),
        }
        for label, group in {**by_kind(uses), "all": uses}.items()
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

    A language model reads the subset in the blocks of its training. untrained: a seed with which the gates'
    weights are first drawn anew, as in a new model; all else, and the gates' statistics, stay. This shows
    untrained gates on these inputs. Raises UserError if the checkpoint cannot be loaded, does not fit the
    data or has no such gates, or if the subset does not exist or is empty.
    """
    model, task = load_trained(checkpoint, data)
    uses = uses_of(model)
    if untrained is not None:
        torch.manual_seed(untrained)
        for gate in gates_of(model):
            gate.reset_parameters()
    for _, decisions in forward_passes(task, model, subset, max_tokens, device_for(cpu)):
        for name, decision in decisions:
            uses[name].add(decision)
    return list(uses.values())


def _table(summaries: List[Dict[str, Any]], means: Dict[str, Dict[str, float]]) -> List[str]:
    """A line per gate, and then the paper's number: H(g) averaged over the layers."""
    lines = [f"{'gate':32}{'instances':>20}{'entropy':>9}{'ln E':>7}  share of each expert in %"]
    for row in summaries:
        instances = f"{row['instances']:,} {row['instance']}s"
        numbers = f"{row['entropy']:9.4f}{row['uniform_entropy']:7.3f}"
        shares = row["shares"]
        if shares is None:
            shown = "(uniform)"
        elif len(shares) <= FEW:
            shown = "".join(f"{100 * share:6.1f}" for share in shares)
        else:
            shown = f"{len(shares)} experts, {100 * min(shares):.1f} to {100 * max(shares):.1f}"
        lines.append(f"{row['name']:32}{instances:>20}{numbers}  {shown}")
    lines.append(f"{'mean over gates of':32}{'gates':>20}{'entropy':>9}{'ln E':>7}")
    for label, mean in means.items():
        lines.append(f"{label:32}{mean['modules']:20}{mean['entropy']:9.4f}{mean['uniform_entropy']:7.3f}")
    return lines


def draw_gates(uses: Sequence[GateUse], title: str = "") -> Figure:
    """Left: H(g) of each layer against ln E, the uniform gate's. Right: layers × experts, shares as colours.

    One heat map per kind of attention, all on one scale. Uniform gates attribute nothing and have no map.
    """
    groups = by_kind(uses)
    maps = {label: group for label, group in groups.items() if group[0].counts is not None}
    layers = max(len(group) for group in groups.values())
    size = (4.2 + 3.4 * len(maps), max(3.5, 1.9 + 0.32 * layers))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, 1 + len(maps), squeeze=False)[0]
    _draw_entropies(panels[0], groups)
    figure.legend(loc="outside lower left", ncols=2 if len(maps) < 2 else 4, fontsize=8, frameon=False)
    most = max((max(use.shares) for group in maps.values() for use in group), default=0.0)
    for panel, (label, group) in zip(panels[1:], maps.items()):
        image = _draw_shares(panel, group, most)
        panel.set_title(label, fontsize=9)
    if maps:
        bar = figure.colorbar(image, ax=list(panels[1:]), format=PercentFormatter(1.0, decimals=0))
        bar.set_label("share of instances", fontsize=8)
        bar.ax.tick_params(labelsize=8)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def _draw_entropies(panel: Axes, groups: dict) -> None:
    for (label, group), colour, marker in zip(groups.items(), COLOURS, "osD^"):
        numbers = range(1, len(group) + 1)
        panel.plot(numbers, [use.entropy for use in group], marker=marker, color=colour, label=label)
    heights = sorted({use.uniform_entropy for group in groups.values() for use in group})
    for height in heights:
        panel.axhline(height, color=GREY, linestyle="--", linewidth=1.0, label=f"uniform gate, {height:.2f}")
    panel.set(xlabel="layer", ylabel="gate entropy H(g) in nats")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_ylim(bottom=min(panel.get_ylim()[0], heights[0] - 0.05))  # rounding errors stay small
    style(panel)


def _draw_shares(panel: Axes, group: Sequence[GateUse], most: float) -> AxesImage:
    shares = numpy.array([use.shares for use in group])
    image = panel.imshow(shares, cmap="Blues", vmin=0.0, vmax=most, aspect="auto")
    layers, experts = shares.shape
    panel.set(xlabel="expert", ylabel="layer")
    panel.set_yticks(range(layers), [str(layer) for layer in range(1, layers + 1)])
    if experts <= FEW:
        panel.set_xticks(range(experts))
        for (layer, expert), share in numpy.ndenumerate(shares):
            colour = "white" if share > 0.6 * most else "black"
            text = f"{100 * share:.0f}"
            panel.text(expert, layer, text, ha="center", va="center", fontsize=7, color=colour)
    panel.tick_params(labelsize=8)
    return image
