"""How evenly a model uses its experts (MoA Figs. 3 and 4), as picture and numbers.

moa-fairseq analyze expert-load runs/B --output load.png --json load.json
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import nn

from moa_fairseq.experiments.analysis.plots import COLOURS, GREY, Analysis, style
from moa_fairseq.experiments.analysis.routed_model import (
    RouterUse,
    by_kind,
    forward_passes,
    router_uses,
)
from moa_fairseq.experiments.tables import Column, Table

NAME = "expert-load"
SUMMARY = "how evenly a model uses its experts (MoA Figs. 3 and 4)"


# Of a router: the even share 1/E, its experts' largest and smallest, their entropy as a fraction of log E.
COLUMNS = (
    Column("name", "router"),
    Column("tokens", "tokens", ","),
    Column("sizes", "K of E", ">"),
    Column("even", "even", ".1%"),
    Column("max_load", "most", ".1%"),
    Column("min_load", "least", ".1%"),
    Column("evenness", "entropy", ".1%"),
    Column("dead_experts", "dead", "d"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no flags of its own."""


def analyze(args: argparse.Namespace, model: nn.Module, task: Any) -> Analysis:
    """Where the tokens of a data set went.

    Args:
        args: the flags: model (its path, for the title), subset, max_tokens (of a batch) and cpu.
        model, task: as `load_trained` gives them.

    Raises:
        UserError: for a model without routers, and for a subset that does not exist or is empty.
    """
    uses = router_uses(decisions for _, decisions in forward_passes(args, model, task))
    summaries = list(map(summary, uses))
    figure = draw_expert_load(summaries, f"Expert load of {args.model.name} on {args.subset}")
    rows = []
    for row in summaries:
        sizes = f"{row['experts_per_token']} of {row['num_experts']}"
        rows.append(dict(row, sizes=sizes, even=1 / row["num_experts"]))
    return Analysis([Table(COLUMNS, rows).text()], figure, {"modules": summaries})


def summary(use: RouterUse) -> dict[str, Any]:
    """How a router used its experts, as plain data.

    Returns:
        name, num_experts (E, without those that are always on), experts_per_token (K), tokens (sequences
        where these are routed); load [E]: the share of all choices that fell on each expert, the percentages
        of Fig. 3, its extremes max_load and min_load, its entropy in nats and as a fraction of log E
        ("evenness"); dead_experts: how many were never chosen; gate_share [E]: of all gate weight, which can
        be uneven even if K = E.
    """
    num_experts = use.counts.numel()
    load = use.counts / use.counts.sum()
    entropy = torch.special.entr(load).sum().item()
    return {
        "name": use.name,
        "num_experts": num_experts,
        "experts_per_token": use.experts_per_token,
        "tokens": use.instances,
        "entropy": entropy,
        "evenness": entropy / math.log(num_experts) if num_experts > 1 else 1.0,
        "max_load": load.max().item(),
        "min_load": load.min().item(),
        "dead_experts": int((use.counts == 0).sum()),
        "load": load.tolist(),
        "gate_share": (use.gate_mass / use.gate_mass.sum()).tolist(),
    }


def draw_expert_load(summaries: Sequence[dict[str, Any]], title: str = "") -> Figure:
    """One small panel per router: its experts by falling load (MoA Figs. 3 and 4).

    Bars are the share of all choices, dots the share of all gate weight; the dashed line is the even share
    1/E. Rows of panels are encoder, decoder and cross-attention, columns the layers.

    Args:
        summaries: of all routers, as `summary` makes them.
        title: above the picture.
    """
    groups = by_kind(summaries)
    columns = max(map(len, groups.values()))
    size = (max(1.75 * columns + 0.7, 5.0), 1.65 * len(groups) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(groups), columns, sharey="row", squeeze=False)
    for (label, group), row in zip(groups.items(), panels):
        row[0].set_ylabel(label.replace(" ", "\n", 1), fontsize=8)
        for panel in row[len(group) :]:
            panel.set_axis_off()
        for router, panel in zip(group, row):
            num_experts = router["num_experts"]
            ranked = sorted(
                zip(router["load"], router["gate_share"], range(num_experts)), reverse=True
            )
            load, gate_share, experts = zip(*ranked)
            ranks = range(1, num_experts + 1)
            panel.bar(ranks, load, color=COLOURS[5], width=0.85, label="share of choices")
            dots = {"color": COLOURS[1], "markersize": 4}
            panel.plot(ranks, gate_share, ".", label="share of gate weight", **dots)
            even = {"color": GREY, "linewidth": 0.8, "linestyle": "--"}
            panel.axhline(1 / num_experts, label="even share", **even)
            panel.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
            panel.yaxis.set_major_locator(MaxNLocator(4))
            if num_experts <= 10:
                panel.set_xticks(list(ranks), list(map(str, experts)))
            else:
                panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            style(panel)
            panel.grid(axis="x", visible=False)
            panel.tick_params(labelsize=7)
    for panel in panels[-1]:
        panel.set_xlabel("experts by load", fontsize=7)
    for number, panel in enumerate(panels[0], start=1):
        panel.set_title(f"layer {number}", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure
