"""The picture of MAE's gates: entropy of each module, and which expert its instances go to."""

from __future__ import annotations

from typing import Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator, PercentFormatter

from moa_fairseq.analysis.gates import GateUse
from moa_fairseq.analysis.module_groups import grouped
from moa_fairseq.analysis.plots import COLOURS, GREY, style

FEW = 10  # experts whose shares are written into the heat map


def draw_gates(uses: Sequence[GateUse], title: str = "") -> Figure:
    """Left: H(g) of each layer against ln E, the uniform gate's. Right: layers × experts, shares as colours.

    One heat map per kind of attention, all in one scale. Uniform gates attribute nothing: there is no map
    of theirs.
    """
    groups = grouped(uses)
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
    panel.set_ylim(bottom=min(panel.get_ylim()[0], heights[0] - 0.05))  # rounding errors are no picture
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
