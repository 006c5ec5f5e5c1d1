"""Draws the four mixtures: docs/mixtures-light.svg and docs/mixtures-dark.svg.

Two stand in a row, so that a telephone shows legible letters.

python docs/drawing.py
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from moa_fairseq.experiments.analysis.plots import COLOURS
from moa_fairseq.files import atomic_write

INK = {"light": "#1f2328", "dark": "#e6edf3"}
FAINT = {"light": "#c8ced5", "dark": "#4a525c"}
CHOSEN, ALWAYS = COLOURS[0], COLOURS[4]
WIDTH = 10.0  # of a panel, in its own units


class Panel:
    """One mixture: rows of boxes, from the token at the bottom to its output at the top."""

    def __init__(self, axes: Axes, theme: str, name: str, routed: str):
        self.axes, self.ink, self.faint = axes, INK[theme], FAINT[theme]
        axes.set(xlim=(0, WIDTH), ylim=(0, 12.4), aspect="equal")
        axes.axis("off")
        self.text(WIDTH / 2, 11.9, name, size=14, weight="bold")
        self.text(WIDTH / 2, 10.95, routed, size=10)

    def text(
        self, x: float, y: float, words: str, size: float = 9.5, weight: str = "normal"
    ) -> None:
        self.axes.text(
            x, y, words, size=size, weight=weight, color=self.ink, ha="center", va="center"
        )

    def box(
        self, x: float, y: float, width: float, height: float, colour: str = "", words: str = ""
    ) -> None:
        """A box with its lower left corner at (x, y): filled where it works for this token."""
        style = {"facecolor": colour, "edgecolor": colour} if colour else {"edgecolor": self.faint}
        shape = "round,pad=0,rounding_size=0.15"
        self.axes.add_patch(
            FancyBboxPatch(
                (x, y), width, height, boxstyle=shape, fill=bool(colour), linewidth=1.2, **style
            )
        )
        if words:
            self.axes.text(
                x + width / 2,
                y + height / 2,
                words,
                size=9.5,
                color=INK["light"],
                ha="center",
                va="center",
            )

    def row(
        self, left: float, y: float, width: float, colours: Sequence[str], height: float = 1.0
    ) -> None:
        """Boxes side by side over `width`; a colour each, or "" for one that rests."""
        step = width / len(colours)
        for place, colour in enumerate(colours):
            self.box(left + place * step + 0.08, y, step - 0.16, height, colour)

    def arrow(self, low: float, high: float, x: float = WIDTH / 2) -> None:
        arrow = {
            "arrowstyle": "-|>",
            "color": self.ink,
            "linewidth": 1.0,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        self.axes.annotate("", (x, high), (x, low), arrowprops=arrow)

    def ends(self, sum_of: str) -> None:
        """The token below, the weighted sum above."""
        self.text(WIDTH / 2, 0.35, "one token")
        self.arrow(0.7, 1.5)
        self.arrow(8.9, 9.6)
        self.text(WIDTH / 2, 10.0, sum_of)


def moa(axes: Axes, theme: str) -> None:
    panel = Panel(axes, theme, "MoA", "chooses heads: K of E experts")
    panel.ends("sum, weighted by the router")
    on = [CHOSEN, "", "", CHOSEN, "", CHOSEN, "", CHOSEN]
    panel.row(0.4, 7.6, 9.2, on)
    panel.text(5, 7.1, "output projections")
    panel.arrow(6.0, 6.7)
    panel.box(0.4, 4.7, 9.2, 1.1, ALWAYS, "keys and values, shared by all")
    panel.arrow(3.8, 4.5)
    panel.row(0.4, 2.6, 9.2, on)
    panel.text(5, 2.0, "query projections")


def mae(axes: Axes, theme: str) -> None:
    panel = Panel(axes, theme, "MAE", "weighs subsets: all heads but one")
    panel.ends("sum, weighted by the gate")
    weights = (0.2, 0.35, 1.0, 0.3, 0.5, 0.25)
    heads, step = len(weights), 1.1
    for expert, weight in enumerate(weights):
        y = 7.75 - expert * step
        panel.row(0.4, y, 6.2, [ALWAYS if head != expert else "" for head in range(heads)], 0.8)
        panel.box(7.0, y + 0.2, 2.6 * weight, 0.4, CHOSEN)
    panel.text(2.5, 1.72, "a row: one expert")
    panel.text(8.3, 1.72, "its weight")


def switchhead(axes: Axes, theme: str) -> None:
    panel = Panel(axes, theme, "SwitchHead", "chooses projections, in each head")
    panel.ends("sum of few heads")
    for left, values, outputs in ((0.3, (0, 2), (1, 2)), (5.3, (1, 3), (0, 3))):
        panel.row(left, 7.6, 4.4, [CHOSEN if expert in outputs else "" for expert in range(4)])
        panel.box(left + 0.1, 5.0, 4.2, 1.1, ALWAYS, "attention")
        panel.row(left, 2.6, 4.4, [CHOSEN if expert in values else "" for expert in range(4)])
        panel.arrow(3.8, 4.8, left + 2.2)
        panel.arrow(6.2, 6.8, left + 2.2)
    panel.text(5, 7.1, "experts: output projection")
    panel.text(5, 2.0, "experts: value projection")


def moh(axes: Axes, theme: str) -> None:
    panel = Panel(axes, theme, "MoH", "chooses heads; some always work")
    panel.ends("sum, weighted by the router")
    on = [ALWAYS, ALWAYS, CHOSEN, "", CHOSEN, CHOSEN, "", CHOSEN]
    for y, words in (
        (7.6, "output projections"),
        (5.0, "attention: keys and values per head"),
        (2.6, "queries"),
    ):
        panel.row(0.4, y, 9.2, on)
        panel.text(5, y - 0.5, words)
    panel.arrow(3.75, 4.25)
    panel.arrow(6.15, 6.85)


def draw(theme: str) -> bytes:
    """The picture as SVG; the same bytes for the same code."""
    matplotlib.rcParams.update({"svg.hashsalt": "mixtures", "svg.fonttype": "none"})
    figure = Figure(figsize=(5.4, 7.2), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    for axes, family in zip(figure.subplots(2, 2).flat, (moa, mae, switchhead, moh)):
        family(axes, theme)
    legend = ((CHOSEN, "chosen for this token"), (ALWAYS, "works for every token"), ("", "rests"))
    for place, (colour, words) in enumerate(legend):
        x = 0.04 + 0.36 * place
        edge = colour or FAINT[theme]
        figure.text(x, 0.005, "■" if colour else "□", color=edge, size=13, va="bottom")
        figure.text(x + 0.035, 0.009, words, color=INK[theme], size=9.5, va="bottom")
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return stream.getvalue()


if __name__ == "__main__":
    for theme in INK:
        with atomic_write(Path(__file__).with_name(f"mixtures-{theme}.svg"), "wb") as stream:
            stream.write(draw(theme))
