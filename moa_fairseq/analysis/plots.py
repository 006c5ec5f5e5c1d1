"""What all pictures share: colours, frames, and the PNG file. Nothing here needs a display."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moa_fairseq.files import atomic_write

# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#666666"
DPI = 150


class Analysis(NamedTuple):
    """What an analysis found: the lines to print, its picture, and its numbers for --json."""

    lines: List[str]
    figure: Optional[Figure] = None
    report: Optional[Dict[str, Any]] = None


def save(figure: Figure, path: Path) -> None:
    """Write `figure` as a PNG, whole or not at all."""
    with atomic_write(path, "wb") as stream:
        figure.savefig(stream, format="png", dpi=DPI)


def style(panel: Axes) -> None:
    """No frame but the axes, and a light grid behind what is drawn."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(True, color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
