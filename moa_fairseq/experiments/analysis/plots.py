"""Colours, frames, labels and PNG files of all pictures. Nothing here needs a display."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.path import Path as Line  # here of two points
from matplotlib.text import Annotation, Text
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
# Places of a label around its point, the best first: distances in points, and directions in degrees
DISTANCES = (9, 16, 23, 30, 40, 50, 65, 80)
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
    centres = panel.transData.transform([(x, y) for x, y, _ in points])
    obstacles = [Bbox([centre, centre]).padded(5) for centre in centres]
    for stroke in strokes:
        ends = panel.transData.transform(stroke)
        obstacles.append(Bbox([ends.min(0), ends.max(0)]).padded(2))
    lines: list[Line] = []  # from points to their names
    for centre, point in zip(centres, points):
        for distance, angle in itertools.product(DISTANCES, ANGLES):
            label = _annotate(panel, point, distance, angle)
            label.update_positions(canvas.get_renderer())
            box = Text.get_window_extent(label)  # without the line
            middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
            line = Line([centre, middle])
            if label.arrow_patch:
                others = [obstacle for obstacle in obstacles if not obstacle.contains(*centre)]
                belongs = not any(map(line.intersects_bbox, others))
            else:  # without a line, a name belongs to the nearest point
                nearest = min(math.dist(other, middle) for other in centres)
                belongs = math.dist(centre, middle) == nearest
            if belongs and _is_free(box, panel, obstacles, lines):
                obstacles.append(box)
                if label.arrow_patch:
                    is_far = not box.padded(8).contains(*centre)
                    label.arrow_patch.set_visible(is_far)
                    if is_far:
                        lines.append(line)
                break
            label.remove()


def _annotate(
    panel: Axes, point: tuple[float, float, str], distance: float, angle: float
) -> Annotation:
    """Write the name of a point at a distance and an angle, with a line if the distance is not the least."""
    x, y, name = point
    direction = math.radians(angle)
    offset = (distance * math.cos(direction), distance * math.sin(direction))
    line = {"arrowstyle": "-", "linewidth": 0.5, "color": GREY, "shrinkB": 3}
    side = "center"
    if abs(angle) <= 22:
        side = "left"
    elif abs(angle) >= 158:
        side = "right"
    return panel.annotate(
        name,
        (x, y),
        offset,
        textcoords="offset points",
        fontsize=8.5,
        va="center",
        ha=side,
        arrowprops=line if distance > DISTANCES[0] else None,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},  # covers the grid
    )


def _is_free(box: Bbox, panel: Axes, obstacles: Sequence[Bbox], lines: Sequence[Line]) -> bool:
    """Whether a box lies within the panel, on no obstacle and on no line."""
    frame = panel.bbox
    if not (frame.x0 < box.x0 < box.x1 < frame.x1 and frame.y0 < box.y0 < box.y1 < frame.y1):
        return False
    if any(map(box.overlaps, obstacles)):
        return False
    return not any(line.intersects_bbox(box) for line in lines)
