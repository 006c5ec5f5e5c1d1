"""The pictures of a study's report, drawn from the report's data and readable on a phone."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from moa_fairseq.experiments.analysis.plots import COLOURS, GREY, MARKERS, label_points, style
from moa_fairseq.experiments.scoring.significance import (
    ALPHA,
    BETTER,
    EQUIVALENT,
    INCONCLUSIVE,
    NOT_SIGNIFICANT,
    WORSE,
)
from moa_fairseq.experiments.study.design import Study
from moa_fairseq.experiments.study.report import Report, difference_to_baseline
from moa_fairseq.experiments.tables import values_of

WIDTH = 5.6  # inches; if the picture is 400 pixels wide, a text of 9 points has letters of 9 pixels
SMALL = 9  # points; the size of labels and legends
# Letters that fit on a line: of the title across the picture, of a label on its left, of a legend
TITLE_LETTERS = 62
LABEL_LETTERS = 27
LEGEND_LETTERS = 84
LEGEND_MARK = 7  # letters that the mark of a legend's entry, and the space around it, take up
LINE_HEIGHT = 0.22  # inches of a line of a label


class Look(NamedTuple):
    """How a point is drawn."""

    colour: str
    marker: str


Looks = dict[str, Look]  # family of attention → look
VERDICTS = {
    BETTER: Look(COLOURS[0], "o"),
    WORSE: Look(COLOURS[1], "s"),
    EQUIVALENT: Look(COLOURS[2], "D"),
    NOT_SIGNIFICANT: Look(GREY, "D"),
    INCONCLUSIVE: Look(GREY, "x"),
}


class Interval(NamedTuple):
    """A row of a forest plot.

    Args:
        label: the name of the row, of one or more lines.
        look: the colour and the marker of its mean.
        dots: the differences of single seeds.
        difference: a mapping with `mean`, `low` and `high`; None if there is only one seed.
    """

    label: str
    look: Look
    dots: Sequence[float]
    difference: dict[str, Any] | None


class SystemPoint(NamedTuple):
    """A system's point in a picture of losses.

    Args:
        system: the system's key in the study, which is written next to the point.
        x, y: the position in data coordinates.
        interval: the ends of the vertical interval, or None if there is one seed.
    """

    system: str
    x: float
    y: float
    interval: tuple[float, float] | None


def draw(study: Study, content: Report) -> dict[str, Figure]:
    """The pictures of a report.

    Args:
        study: the study, with its labels and question.
        content: the report's data, as `report` returns it.

    Returns:
        Name of a file without its ending → the picture.
    """
    families = dict.fromkeys(values_of(content["systems"], "family"))
    looks = dict(zip(families, _look_cycle()))
    figures = {"branch": _loss_against_start(content, looks)}
    if len(content["systems"]) > 1:
        figures["differences"] = _differences(study, content, looks)
    if content.get("cache"):
        figures["cache"] = _loss_against_cache(content, looks)
    if study.levels:
        figures["generalisation"] = _generalisation(content)
    if content["contrasts"]:
        figures["contrasts"] = _contrasts(study, content)
    return figures


def _look_cycle() -> Iterator[Look]:
    """Looks that differ in colour and marker; after the last one they begin again."""
    return itertools.cycle(map(Look, (GREY, *COLOURS), MARKERS))


def forest(panel: Axes, rows: Sequence[Interval], band: float = 0) -> None:
    """Draw a line for each row, the first on top: its seeds, its mean and its interval.

    Args:
        panel: the empty panel to draw on.
        rows: the rows from the top down.
        band: the range ± band around 0 is grey.
    """
    style(panel)
    panel.grid(False, axis="y")
    panel.axvspan(-band, band, color="#eeeeee", zorder=0)
    panel.axvline(0, color=GREY, linewidth=0.8)
    heights: list[float] = []
    bottom = 0.0
    for row in rows:
        size = _lines_of(row)
        y = bottom + size / 2
        bottom += size
        heights.append(y)
        colour, marker = row.look
        panel.plot(row.dots, [y] * len(row.dots), ".", color=colour, alpha=0.4, markersize=5)
        if row.difference:
            ends = [row.difference["low"], row.difference["high"]]
            panel.plot(ends, [y, y], color=colour, linewidth=1.6)
            panel.plot([row.difference["mean"]], [y], marker, color=colour, markersize=6, mew=1.6)
    panel.set_yticks(heights, [row.label for row in rows], fontsize=SMALL)
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(bottom, 0)
    panel.margins(x=0.06)


def title(figure: Figure, text: str) -> None:
    """Write the question that a picture answers above it."""
    figure.suptitle(textwrap.fill(text, TITLE_LETTERS), x=0.01, ha="left", fontsize=11)


def verdict_key(figure: Figure, verdicts: Sequence[str]) -> None:
    """Explain the marks of verdicts below a picture."""
    _key(figure, [(VERDICTS[verdict], verdict) for verdict in VERDICTS if verdict in verdicts])


def _key(figure: Figure, entries: Sequence[tuple[Look, str]]) -> None:
    """Draw marks with their meaning below the picture, in as many columns as there is space for."""
    handles = []
    texts = []
    for (colour, marker), text in entries:
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", mew=1.6))
        texts.append(text)
    columns = min(len(texts), _legend_columns(texts))
    figure.legend(
        handles,
        texts,
        loc="outside lower left",
        ncols=columns,
        fontsize=SMALL,
        frameon=False,
        handletextpad=0.3,
        columnspacing=1.2,
    )


def _legend_columns(texts: Iterable[str]) -> int:
    """The number of columns of a legend."""
    return max(1, LEGEND_LETTERS // (max(map(len, texts)) + LEGEND_MARK))


def _figure(height: float) -> tuple[Figure, Axes]:
    """A figure of full width with one panel."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _wrapped(text: str) -> str:
    """A label in lines of LABEL_LETTERS."""
    return textwrap.fill(text, LABEL_LETTERS, break_on_hyphens=False)


def height_of(rows: Sequence[Interval]) -> float:
    """The inches that the rows of a forest plot need."""
    return LINE_HEIGHT * sum(map(_lines_of, rows))


def _lines_of(row: Interval) -> float:
    """The height of a row in lines of its label; the last line needs no space below it."""
    return 0.9 + row.label.count("\n")


def _contrasts(study: Study, content: Report) -> Figure:
    """Each contrast with its interval; colours and marks are verdicts."""
    rows = []
    for row in content["contrasts"]:
        first = study.systems[row["first"]].label
        second = study.systems[row["second"]].label
        label = f"{_wrapped(first)}\n{_wrapped(f'vs {second}')}"
        rows.append(Interval(label, VERDICTS[row["verdict"]], [], row))
    figure, panel = _figure(1.6 + height_of(rows))
    forest(panel, rows, study.margin)
    panel.set_xlabel("difference in validation loss (bits)\n← system better        system worse →")
    title(figure, study.question)
    verdict_key(figure, values_of(content["contrasts"], "verdict"))
    return figure


def _differences(study: Study, content: Report, looks: Looks) -> Figure:
    """Each system minus the first one: seeds, mean, interval, and a band of the first system's own seeds."""
    base, *other_systems = content["systems"]
    rows = []
    for row in other_systems:
        difference = difference_to_baseline(row, base, study.margin)
        rows.append(Interval(_wrapped(row["label"]), looks[row["family"]], *difference))
    figure, panel = _figure(1.6 + height_of(rows))
    forest(panel, rows, 2 * (base["deviation"] or 0))
    panel.set_xlabel(
        "difference in validation loss (bits)\n← better        worse →\ngrey: ± 2 SD of the reference's seeds"
    )
    title(figure, f"How does each system compare with “{base['label']}”?")
    _key(figure, list(zip(looks.values(), looks)))
    return figure


def _points(content: Report, looks: Looks, points: Sequence[SystemPoint]) -> tuple[Figure, Axes]:
    """Points with vertical intervals, and below them a legend that explains the systems' keys."""
    systems = {}
    entries = []
    for row in content["systems"]:
        look = looks[row["family"]]
        systems[row["system"]] = look
        entries.append((look, f"{row['system']}: {row['label']}"))
    columns = _legend_columns(text for _, text in entries)
    figure, panel = _figure(4.6 + 0.19 * math.ceil(len(entries) / columns))
    style(panel)
    for point in points:
        colour, marker = systems[point.system]
        panel.plot([point.x], [point.y], marker, color=colour, markersize=6)
        if point.interval:
            panel.vlines(point.x, *point.interval, color=colour, linewidth=1.2)
    _key(figure, entries)
    return figure, panel


def _name_points(panel: Axes, points: Sequence[SystemPoint], lines: Sequence[Any] = ()) -> None:
    """Write each system's key next to its point, where it covers no interval and no line."""
    names = []
    bars = []
    for point in points:
        names.append((point.x, point.y, point.system))
        if point.interval:
            low, high = point.interval
            bars.append(((point.x, low), (point.x, high)))
    label_points(panel, names, [*bars, *lines])


def _loss_against_start(content: Report, looks: Looks) -> Figure:
    """The final loss against the size of attention's output before training, ÷ that of the first system."""
    base = content["systems"][0]
    points = []
    for row in content["systems"]:
        ratio = row["branch"] / base["branch"] if base["branch"] else math.nan
        interval = None
        if row["deviation"] is not None:
            t = float(stats.t.ppf(1 - ALPHA / 2, row["n"] - 1))
            half = t * row["deviation"] / math.sqrt(row["n"])
            interval = (row["loss"] - half, row["loss"] + half)
        points.append(SystemPoint(row["system"], ratio, row["loss"], interval))
    figure, panel = _points(content, looks, points)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.margins(0.08, 0.08)
    low, high = panel.get_xlim()
    panel.set_xlim(min(low, 0.9), max(high, 1.1))  # so that small ratios look small
    panel.set_xlabel(
        f"size of attention's output before training ÷ that of {base['system']}\n"
        "vertical lines: 95 % intervals of the means"
    )
    panel.set_ylabel("validation loss (bits)")
    title(figure, "Does a small attention output before training go with a low final loss?")
    _name_points(panel, points)
    return figure


def _loss_against_cache(content: Report, looks: Looks) -> Figure:
    """The difference to the first system against bytes of cache, and a line along the Pareto front."""
    base = content["systems"][0]
    points = []
    front = []
    for row in content["cache"]:
        difference = row["loss"] - base["loss"]
        interval = (row["low"], row["high"]) if "low" in row else None
        points.append(SystemPoint(row["system"], row["cache_bytes"], difference, interval))
        if row["is_pareto_optimal"]:
            front.append((row["cache_bytes"], difference))
    figure, panel = _points(content, looks, points)
    panel.step(*zip(*front), where="post", color=GREY, linewidth=0.8, zorder=0)
    lines = []
    for (left_edge, above), (right, below) in itertools.pairwise(front):
        lines += [((left_edge, above), (right, above)), ((right, above), (right, below))]
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.minorticks_off()
    panel.margins(0.16, 0.08)
    panel.set_xlabel(
        "KV cache (bytes per token and layer)\ngrey line: the lowest mean loss with this cache or less"
    )
    panel.set_ylabel(f"validation loss − that of {base['system']} (bits)")
    title(figure, "Which attention has the lowest loss for its KV cache?")
    _name_points(panel, points, lines)
    return figure


def _generalisation(content: Report) -> Figure:
    """Validation loss against training loss, a line for each system: the mean of its seeds."""
    figure, panel = _figure(5.2)
    style(panel)
    base = content["systems"][0]
    for row, (colour, marker) in zip(content["systems"], _look_cycle()):
        # Without the first quarter, in which the losses fall steeply
        curve = np.reshape(row["curve"][len(row["curve"]) // 4 :], (-1, 2))
        dash = "-" if row["dropout"] == base["dropout"] else ":"
        panel.plot(*curve.T, marker + dash, color=colour, markersize=4, label=row["label"])
    panel.set_xlabel(
        "training loss, with dropout (bits)\ndotted: other dropout; compare dotted with dotted"
    )
    panel.set_ylabel("validation loss (bits)")
    title(figure, "Is the validation loss higher at equal training loss?")
    figure.legend(loc="outside lower left", ncols=2, fontsize=SMALL, frameon=False)
    return figure
