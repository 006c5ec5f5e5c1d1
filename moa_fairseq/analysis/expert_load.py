"""How evenly a model uses its experts (MoA Figs. 3 and 4), as picture and numbers.

moa-fairseq analyze expert-load runs/B --output load.png --json load.json
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Dict, Iterable, List, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor

from moa_fairseq.analysis.plots import COLOURS, GREY, save, style
from moa_fairseq.analysis.routed_model import (
    add_model_arguments,
    by_kind,
    checkpoint_and_data,
    finish,
    forward_passes,
)
from moa_fairseq.attention.collector import NamedDecisions
from moa_fairseq.evaluation.trained_model import device_for, load_trained

NAME = "expert-load"
SUMMARY = "how evenly a model uses its experts (MoA Figs. 3 and 4)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    add_model_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")


def analyze(args: argparse.Namespace) -> int:
    """Run a data set through a model; draw and print where its tokens went."""
    checkpoint, data = checkpoint_and_data(args.model, args.data, args.max_tokens)
    loads = measure_expert_load(checkpoint, data, args.subset, args.max_tokens, args.cpu)
    summaries = [load.summary() for load in loads]
    save(draw_expert_load(loads, f"Expert load of {args.model.name} on {args.subset}"), args.output)
    report = {"checkpoint": str(checkpoint), "subset": args.subset, "modules": summaries}
    finish(_table(summaries), report, args.json, args.output)
    return 0


@dataclass
class ExpertLoad:
    """What one router did with a data set, without padding and without experts that are always on (MoH).

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
        """Share of all gate weight that each expert got, [E], sum 1. It can be uneven even if K = E."""
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


def measure_expert_load(
    checkpoint: Path, data: Path, subset: str = "valid", max_tokens: int = 4096, cpu: bool = False
) -> List[ExpertLoad]:
    """Run `subset` of the binarised `data` through the model with teacher forcing, and count.

    Returns one ExpertLoad per router in forward order. Raises UserError if the checkpoint cannot be
    loaded, does not fit the data, or has no router, or if the subset does not exist or is empty.
    """
    model, task = load_trained(checkpoint, data)
    return add_up(
        decisions for _, decisions in forward_passes(task, model, subset, max_tokens, device_for(cpu))
    )


def add_up(passes: Iterable[NamedDecisions]) -> List[ExpertLoad]:
    """The load of each router over several forward passes, in the order in which the routers first ran."""
    loads: Dict[str, ExpertLoad] = {}
    for name, decision in chain.from_iterable(passes):
        gate = decision.gate.detach().double()
        if decision.padding_mask is not None:
            gate = gate.masked_fill(decision.padding_mask.unsqueeze(1), 0.0)
        mass = gate.new_zeros(decision.num_experts)
        mass = mass.scatter_add(0, decision.expert_index.reshape(-1), gate.reshape(-1))[decision.shared :]
        load = loads.get(name)
        if load is None:
            experts, per_token = mass.numel(), decision.expert_index.size(1) - decision.shared
            zeros = torch.zeros(2, experts, dtype=torch.float64)
            load = loads[name] = ExpertLoad(name, per_token, zeros[0], zeros[1])
        load.counts += decision.expert_counts.double().cpu()
        load.gate_mass += mass.cpu()
    return list(loads.values())


def _table(summaries: List[Dict[str, Any]]) -> str:
    """One line per router: even share 1/E, largest and smallest share, entropy as a fraction of log E."""
    lines = [
        f"{'router':32}{'tokens':>10}{'K of E':>10}{'even':>8}{'most':>8}{'least':>8}{'entropy':>9}  dead"
    ]
    for row in summaries:
        sizes = f"{row['experts_per_token']} of {row['num_experts']}"
        even = 1 / row["num_experts"]
        shares = "".join(f"{share:8.1%}" for share in (even, row["max_load"], row["min_load"]))
        entropy = f"{row['evenness']:9.1%}{row['dead_experts']:6}"
        lines.append(f"{row['name']:32}{row['tokens']:10,}{sizes:>10}{shares}{entropy}")
    return "\n".join(lines)


def draw_expert_load(loads: Sequence[ExpertLoad], title: str = "") -> Figure:
    """One small panel per router: its experts by falling load (MoA Figs. 3 and 4).

    Bars are the share of all choices, dots the share of all gate weight; the dashed line is the even
    share 1/E. Rows of panels are encoder, decoder and cross-attention, columns the layers.
    """
    groups = by_kind(loads)
    columns = max(len(group) for group in groups.values())
    size = (max(1.75 * columns + 0.7, 5.0), 1.65 * len(groups) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(groups), columns, sharey="row", squeeze=False)
    for (label, group), row in zip(groups.items(), panels):
        for panel in row[len(group) :]:
            panel.set_axis_off()
        for load, panel in zip(group, row):
            _draw_load(panel, load)
        row[0].set_ylabel(label.replace(" ", "\n", 1), fontsize=8)
    for panel in panels[-1]:
        panel.set_xlabel("experts by load", fontsize=7)
    for number, panel in enumerate(panels[0], start=1):
        panel.set_title(f"layer {number}", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def _draw_load(panel: Axes, load: ExpertLoad) -> None:
    num_experts = load.counts.numel()
    shares = sorted(zip(load.load.tolist(), load.gate_share.tolist(), range(num_experts)), reverse=True)
    chosen, gates, experts = zip(*shares)
    ranks = range(1, num_experts + 1)
    panel.bar(ranks, chosen, color=COLOURS[5], width=0.85, label="share of choices")
    panel.plot(ranks, gates, ".", color=COLOURS[1], markersize=4, label="share of gate weight")
    panel.axhline(1 / num_experts, color=GREY, linewidth=0.8, linestyle="--", label="even share")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    panel.yaxis.set_major_locator(MaxNLocator(4))
    if num_experts <= 10:
        panel.set_xticks(list(ranks), [str(expert) for expert in experts])
    else:
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    style(panel)
    panel.grid(axis="x", visible=False)
    panel.tick_params(labelsize=7)
