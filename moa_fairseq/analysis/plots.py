"""The pictures: learning curves and expert loads, as PNG. Nothing here needs a display."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from moa_fairseq.analysis.expert_load import ExpertLoad
from moa_fairseq.analysis.module_groups import grouped
from moa_fairseq.analysis.training_log import METRICS, LearningCurve, Point
from moa_fairseq.files import atomic_write

# Okabe and Ito's colours, told apart by every kind of eyesight
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#666666"
DPI = 150


def save(figure: Figure, path: Path) -> None:
    """Write `figure` as a PNG, whole or not at all."""
    with atomic_write(path, "wb") as stream:
        figure.savefig(stream, format="png", dpi=DPI)


def draw_learning_curves(
    curves: Sequence[LearningCurve], metric: str = "ppl", from_zero: bool = True
) -> Figure:
    """Validation (thick) and training (thin) curves of several runs in one picture.

    Left against updates; right against hours of training, if every log tells the time. from_zero: whether
    these begin at 0, or where the curves do.
    """
    timed = all(point.seconds is not None for curve in curves for point in curve.train + curve.valid)
    longest = max((point.seconds or 0 for curve in curves for point in curve.train + curve.valid), default=0)
    timed = timed and longest >= 60  # the clock counts whole seconds
    figure = Figure(figsize=(10.5 if timed else 6, 4), layout="constrained")
    panels = figure.subplots(1, 2 if timed else 1, sharey=True, squeeze=False)[0]
    unit, seconds = ("hours", 3600) if longest >= 2 * 3600 else ("minutes", 60)
    for curve, colour in zip(curves, _cycle(len(curves))):
        _draw_curve(panels[0], curve, colour, lambda point: point.updates)
        if timed:
            _draw_curve(panels[1], curve, colour, lambda point: point.seconds / seconds)
    panels[0].set(xlabel="updates", ylabel=METRICS[metric])
    if timed:
        panels[1].set(xlabel=f"{unit} of training")
    for panel in panels:
        style(panel)
        if from_zero:
            panel.set_xlim(left=0)
        if metric == "ppl":
            _logarithmic(panel)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _draw_curve(panel: Axes, curve: LearningCurve, colour: str, x) -> None:
    def line(points: List[Point], **style) -> None:
        panel.plot([x(point) for point in points], [point.value for point in points], color=colour, **style)

    line(curve.train, linewidth=0.8, alpha=0.45, label=f"{curve.name}, training")
    line(curve.valid, linewidth=1.8, marker="o", markersize=3.5, label=f"{curve.name}, validation")


def _logarithmic(panel: Axes) -> None:
    """A logarithmic perplexity axis with round numbers on it: 10, 15, 20, 30, 50, 70, 100."""
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.yaxis.set_minor_locator(NullLocator())


def draw_expert_load(loads: Sequence[ExpertLoad], title: str = "") -> Figure:
    """One small panel per router: its experts by falling load (MoA Figs. 3 and 4).

    Bars are the share of all choices, dots the share of all gate weight; the dashed line is the even
    share 1/E. Rows of panels are encoder, decoder and cross-attention, columns the layers.
    """
    groups = grouped(loads)
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
    shares = sorted(
        zip(load.load.tolist(), load.gate_share.tolist(), range(load.counts.numel())), reverse=True
    )
    ranks = range(1, len(shares) + 1)
    chosen, gates = [share for share, _, _ in shares], [gate for _, gate, _ in shares]
    panel.bar(ranks, chosen, color=COLOURS[5], width=0.85, label="share of choices")
    panel.plot(ranks, gates, ".", color=COLOURS[1], markersize=4, label="share of gate weight")
    panel.axhline(1 / len(shares), color=GREY, linewidth=0.8, linestyle="--", label="even share")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    panel.yaxis.set_major_locator(MaxNLocator(4))
    if len(shares) <= 10:
        panel.set_xticks(list(ranks), [str(expert) for _, _, expert in shares])
    else:
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    style(panel)
    panel.grid(axis="x", visible=False)
    panel.tick_params(labelsize=7)


def _cycle(number: int) -> List[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(number)]


def style(panel: Axes) -> None:
    """No frame but the axes, and a light grid behind what is drawn."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(True, color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
