"""How evenly a model uses its experts (MoA Figs. 3 and 4), as picture and numbers.

moa-fairseq analyze expert-load runs/B --output load.png --json load.json
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import nn

from moa_fairseq.experiments.analysis.plots import COLOURS, GREY, style
from moa_fairseq.experiments.analysis.result import Analysis
from moa_fairseq.experiments.analysis.routed_model import (
    RouterUse,
    by_kind,
    forward_passes,
    router_uses,
)
from moa_fairseq.experiments.tables import Column, Table, terminal_width

NAME = "expert-load"
SUMMARY = "how evenly a model uses its experts (MoA Figs. 3 and 4)"


# Columns for a router: the even share 1/E, the largest and the smallest share of an expert, and the entropy
# of the shares as a fraction of log E
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
    """This analysis has only the common flags."""


def analyze(args: argparse.Namespace, model: nn.Module, task: Any) -> Analysis:
    """How often the tokens of a data set chose each expert.

    Args:
        args: the flags: model (a path, for the title), subset, max_tokens (of a batch) and cpu.
        model, task: what `load_trained` returns.

    Raises:
        UserError: for a model without routers, and for a subset that does not exist or is empty.
    """
    passes = forward_passes(model, task, args.subset, args.max_tokens, args.cpu)
    uses = router_uses(routings for _, routings in passes)
    summaries = list(map(summary, uses))
    figure = draw_expert_load(summaries, f"Expert load of {args.model.name} on {args.subset}")
    rows = []
    for row in summaries:
        sizes = f"{row['experts_per_token']} of {row['num_experts']}"
        rows.append(dict(row, sizes=sizes, even=1 / row["num_experts"]))
    return Analysis([Table(COLUMNS, rows).text(terminal_width())], figure, {"modules": summaries})


def summary(use: RouterUse) -> dict[str, Any]:
    """How a router used its experts, as plain data.

    Args:
        use: the decisions of the router.

    Returns:
        "name"; "num_experts", E without shared experts; "experts_per_token", K; "tokens", their number, or
        that of the sequences if whole sequences are routed; "load" [E], the share of all choices that fell on
        each expert (the percentages of Fig. 3), with "max_load", "min_load", and its "entropy" in nats and as
        a fraction of log E ("evenness"); "dead_experts", the number of experts that were never chosen;
        "gate_share" [E], the share of all gate weight, which can be uneven even if K = E.
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
    """Draw a small panel for each router with its experts, the largest load first (MoA Figs. 3, 4).

    Bars are the share of all choices, dots the share of all gate weight; the dashed line is the even share
    1/E. Rows of panels are encoder, decoder and cross-attention, columns the layers.

    Args:
        summaries: what `summary` returns for each router.
        title: the title of the picture.
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
                panel.set_xticks(ranks, experts)
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
