"""Colours, frames, labels and PNG files of all pictures. Nothing here needs a display."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.path import Path as Line
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from moa_fairseq.files import atomic_write

# A matplotlibrc in the working directory could ask for LaTeX, which can run programs
matplotlib.rcdefaults()

# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#666666"
# Each group has a marker as well as a colour, because some readers cannot tell the colours apart
MARKERS = tuple("os^DvPXp")
DPI = 150


class Analysis(NamedTuple):
    """The result of an analysis.

    Args:
        lines: the lines to print.
        figure: the picture, or None.
        report: the numbers for --json, or None.
    """

    lines: list[str]
    figure: Figure | None = None
    report: dict[str, Any] | None = None


# Directions in which a label may stand from its point, in degrees, the best first
ANGLES = (45, -45, 135, -135, 0, 180, 90, -90, 22, -22, 158, -158, 67, -67, 113, -113)


def save(figure: Figure, path: Path, description: str | None = None) -> None:
    """Write a PNG, whole or not at all.

    Args:
        figure: the picture.
        path: the file to write.
        description: a text that the file carries.
    """
    metadata = {"Description": description} if description else None
    with atomic_write(path, "wb") as stream:
        figure.savefig(stream, format="png", dpi=DPI, metadata=metadata)


def style(panel: Axes) -> None:
    """Draw only the left and the bottom line of the frame, and a light grid behind the data."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(True, color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)


def label_points(
    panel: Axes,
    points: Sequence[tuple[float, float, str]],
    strokes: Sequence[tuple[tuple[float, float], tuple[float, float]]] = (),
) -> None:
    """Write each name next to its point, where it covers no point, stroke or other name.

    A line joins a name to its point if they are far apart. A name for which the panel has no free space is
    left out. Call this function last, because it knows only what has been drawn, and the panel may not move.

    Args:
        panel: the panel with the points.
        points: x, y and name of each point, in data coordinates.
        strokes: the two ends of each horizontal or vertical line, such as an interval, in data coordinates.
    """
    canvas = FigureCanvasAgg(panel.get_figure(root=True))
    canvas.draw()
    pixels = panel.transData.transform([(x, y) for x, y, _ in points])
    boxes = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in pixels]
    for ends in strokes:
        (left_end, bottom), (right_end, top) = sorted(panel.transData.transform(ends).tolist())
        low, high = sorted((bottom, top))
        boxes.append(Bbox.from_extents(left_end - 2, low - 2, right_end + 2, high + 2))
    lines: list[Line] = []
    settings: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8.5, "va": "center"}
    # A white background covers the grid
    settings["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    for pixel, (x, y, name) in zip(pixels, points):
        foreign = [box for box in boxes if not box.contains(*pixel)]
        for distance, angle in itertools.product((9, 16, 23, 30, 40, 50, 65, 80), ANGLES):
            direction = math.radians(angle)
            offset = (distance * math.cos(direction), distance * math.sin(direction))
            arrow = None
            if distance > 9:
                arrow = {"arrowstyle": "-", "linewidth": 0.5, "color": GREY, "shrinkB": 3}
            side = _alignment(angle)
            text = panel.annotate(name, (x, y), offset, arrowprops=arrow, ha=side, **settings)
            text.update_positions(canvas.get_renderer())
            box = Text.get_window_extent(text)  # without the line
            middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
            path = Line([pixel, middle])
            clashes = [not _lies_within(box, panel), *map(box.overlaps, boxes)]
            clashes += [line.intersects_bbox(box) for line in lines]
            if arrow:
                clashes += map(path.intersects_bbox, foreign)
            else:  # without a line, a name belongs to the nearest point
                distances = [math.dist(other, middle) for other in pixels]
                clashes.append(min(distances) < math.dist(pixel, middle))
            if any(clashes):
                text.remove()
                continue
            boxes.append(box)
            if text.arrow_patch:
                is_far = not box.padded(8).contains(*pixel)
                text.arrow_patch.set_visible(is_far)
                if is_far:
                    lines.append(path)
            break


def _alignment(angle: int) -> str:
    """The side of a name that is next to its point, by the direction of the name in degrees."""
    if abs(angle) <= 22:
        return "left"
    return "right" if abs(angle) >= 158 else "center"


def _lies_within(box: Bbox, panel: Axes) -> bool:
    frame = panel.bbox
    return frame.x0 < box.x0 < box.x1 < frame.x1 and frame.y0 < box.y0 < box.y1 < frame.y1
