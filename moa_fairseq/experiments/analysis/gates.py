"""Entropy of MAE's gates, and the share of instances that prefer each expert (§5.1, Table 8).

  moa-fairseq analyze gates runs/mae7 --output gates.png --json gates.json

--untrained 1 gives values to compare with: those of untrained gates on the same inputs.
An instance is a sequence in the encoder and a position in a decoder, whose gates see the inputs so far. The
paper's entropies (1.91 nats for MAE-7, 2.02 for NOBCD, 2.08 = ln 8 for UNI-MAE-7) are means over encoder
layers on WMT14's development set. Experts are numbered from 0.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.plots import COLOURS, GREY, style
from moa_fairseq.experiments.analysis.result import Analysis
from moa_fairseq.experiments.analysis.routed_model import (
    RouterUse,
    by_kind,
    forward_passes,
    router_uses,
)
from moa_fairseq.experiments.tables import Column, Table, terminal_width, values_of
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.sequence_gate import gates_of

NAME = "gates"
SUMMARY = "entropy of MAE's gates and the experts they prefer (MAE §5.1, Table 8)"
FEW = 10  # the shares of up to ten experts fit on a line of the table, and into the fields of the picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    parser.add_argument(
        "--untrained",
        type=int,
        metavar="SEED",
        help="draw new weights for the gates, to see untrained gates on the same inputs",
    )


def analyze(args: argparse.Namespace, model: nn.Module, task: Any) -> Analysis:
    """The entropies of the gates on a data set, and the experts that they prefer.

    Args:
        args: the flags: untrained (a seed, or None), model (a path, for the title), subset, max_tokens (of a
            batch) and cpu.
        model: the model; with `untrained`, the weights of its gates are initialised again.
        task: what `load_trained` returns with the model.

    Raises:
        UserError: for a model without MAE's attention, and for a subset that does not exist or is empty.
    """
    learned = {}
    for module in model.modules():
        if isinstance(module, MixtureOfAttentiveExperts):
            learned[module.name] = module.gate is not None
    if not learned:
        raise UserError(
            f"{type(model).__name__} has no mixture of attentive experts, so it has no gates of MAE; "
            "`moa-fairseq analyze expert-load` shows the routers of MoA."
        )
    if args.untrained is not None:
        torch.manual_seed(args.untrained)
        for gate in gates_of(model):
            gate.reset_parameters()
    passes = forward_passes(model, task, args.subset, args.max_tokens, args.cpu)
    uses = router_uses(routings for _, routings in passes)
    summaries = [summary(use, learned[use.name]) for use in uses]
    means = mean_entropies(summaries)
    kind = "Gates"
    lines = _tables(summaries, means)
    if args.untrained is not None:
        kind = "Untrained gates"
        lines.append(
            f"The gates' weights were drawn anew with seed {args.untrained}: these gates are untrained."
        )
    if not all(learned.values()):
        lines.append(
            "Uniform gates prefer no expert: instances are attributed to none, and there are no shares."
        )
    figure = draw_gates(summaries, f"{kind} of {args.model.name} on {args.subset}")
    return Analysis(
        lines, figure, {"means": means, "modules": summaries, "untrained_seed": args.untrained}
    )


def summary(use: RouterUse, learned: bool) -> dict[str, Any]:
    """The decisions of one gate, as plain data.

    Args:
        use: the decisions of the gate.
        learned: whether the gate is learned; a uniform gate has no shares.

    Returns:
        "name"; "num_experts", E; "gate", "learned" or "uniform"; "instance", "position" or "sequence";
        "instances", their number; "entropy", the mean of H(g) over the instances in nats; "uniform_entropy",
        ln E; "shares" [E], the share of the instances that prefer each expert, or None.
    """
    shares = (use.favourites / use.favourites.sum()).tolist() if learned else None
    return {
        "name": use.name,
        "num_experts": use.counts.numel(),
        "gate": "learned" if learned else "uniform",
        "instance": "position" if use.scope == "tokens" else "sequence",
        "instances": use.instances,
        "entropy": use.total_entropy / use.instances,
        "uniform_entropy": math.log(use.counts.numel()),
        "shares": shares,
    }


def mean_entropies(summaries: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The mean entropy of the gates of each kind of attention, and of all gates.

    Args:
        summaries: what `summary` returns for each gate.

    Returns:
        Kind of attention, or "all" → "modules", the number of gates, and the means of "entropy" and
        "uniform_entropy" in nats.
    """
    means: dict[str, dict[str, float]] = {}
    for label, group in (by_kind(summaries) | {"all": list(summaries)}).items():
        means[label] = {"modules": len(group)}
        for key in ("entropy", "uniform_entropy"):
            means[label][key] = sum(values_of(group, key)) / len(group)
    return means


def _tables(summaries: list[dict[str, Any]], means: dict[str, dict[str, float]]) -> list[str]:
    """A table with a line for each gate, and one with the mean of H(g) over layers, which the paper has."""
    rows = []
    for row in summaries:
        shares = row["shares"]
        text = "(uniform)"
        if shares and len(shares) <= FEW:
            text = " ".join(f"{100 * share:.1f}" for share in shares)
        elif shares:
            text = f"{len(shares)} experts, {100 * min(shares):.1f} to {100 * max(shares):.1f}"
        rows.append(dict(row, instances=f"{row['instances']:,} {row['instance']}s", shares=text))
    entropies = [Column("entropy", "entropy", ".4f"), Column("uniform_entropy", "ln E", ".3f")]
    of_gates = [
        Column("name", "gate"),
        Column("instances", "instances", ">"),
        *entropies,
        Column("shares", "share of each expert in %", ">"),
    ]
    of_kinds = [Column("kind", "mean over gates of"), Column("modules", "gates", "d"), *entropies]
    kinds = [{"kind": kind} | mean for kind, mean in means.items()]
    width = terminal_width()
    return [Table(of_gates, rows).text(width), "", Table(of_kinds, kinds).text(width)]


def draw_gates(summaries: Sequence[dict[str, Any]], title: str = "") -> Figure:
    """Draw the entropies and the shares of all gates.

    The left panel has H(g) of each layer, with a line at ln E, the entropy of a uniform gate. On the right,
    each kind of attention has a heat map of shares, layers × experts, all with the same scale. Uniform gates
    have no shares and no map.

    Args:
        summaries: what `summary` returns for each gate.
        title: the title of the picture.
    """
    groups = by_kind(summaries)
    maps = {label: group for label, group in groups.items() if group[0]["shares"]}
    layers = max(map(len, groups.values()))
    size = (4.2 + 3.4 * len(maps), max(3.5, 1.9 + 0.32 * layers))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, 1 + len(maps), squeeze=False)[0]
    _draw_entropies(panels[0], groups)
    columns = 2 if len(maps) < 2 else 4
    figure.legend(loc="outside lower left", ncols=columns, fontsize=8, frameon=False)
    largest = max(map(max, filter(None, values_of(summaries, "shares"))), default=0.0)
    for panel, (label, group) in zip(panels[1:], maps.items()):
        image = _draw_shares(panel, values_of(group, "shares"), largest)
        panel.set_title(label, fontsize=9)
    if maps:
        bar = figure.colorbar(image, ax=list(panels[1:]), format=PercentFormatter(1.0, decimals=0))
        bar.set_label("share of instances", fontsize=8)
        bar.ax.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_entropies(panel: Any, groups: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Draw H(g) against the layer, a line for each kind of attention, and ln E."""
    heights = set()
    for (label, group), colour, marker in zip(groups.items(), COLOURS, "osD^"):
        layers = range(1, len(group) + 1)
        panel.plot(layers, values_of(group, "entropy"), marker=marker, color=colour, label=label)
        heights.update(values_of(group, "uniform_entropy"))
    for height in sorted(heights):
        looks = {"color": GREY, "linestyle": "--", "linewidth": 1.0}
        panel.axhline(height, label=f"uniform gate, {height:.2f}", **looks)
    panel.set(xlabel="layer", ylabel="gate entropy H(g) in nats")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    # The axis is at least 0.05 nats high, so that rounding errors look small
    panel.set_ylim(bottom=min(panel.get_ylim()[0], min(heights) - 0.05))
    style(panel)


def _draw_shares(panel: Any, shares: list[list[float]], largest: float) -> Any:
    """Draw a heat map, layers × experts, with numbers if there are few experts. Returns the image."""
    image = panel.imshow(shares, cmap="Blues", vmin=0.0, vmax=largest, aspect="auto")
    panel.set(xlabel="expert", ylabel="layer")
    panel.set_yticks(range(len(shares)), range(1, len(shares) + 1))
    panel.tick_params(labelsize=8)
    if len(shares[0]) > FEW:
        return image
    panel.set_xticks(range(len(shares[0])))
    for layer, row in enumerate(shares):
        for expert, share in enumerate(row):
            colour = "white" if share > 0.6 * largest else "black"
            place = {"ha": "center", "va": "center", "fontsize": 7, "color": colour}
            panel.text(expert, layer, f"{100 * share:.0f}", **place)
    return image
