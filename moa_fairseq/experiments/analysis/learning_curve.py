"""Training (thin) and validation (thick) curves of several runs in one picture (MAE Fig. 3, App. B).

moa-fairseq analyze learning-curve runs/base runs/nobcd runs/mae7 --metric loss --from-epoch 8 --output c.png
"""

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.plots import COLOURS, style
from moa_fairseq.experiments.analysis.result import Analysis
from moa_fairseq.experiments.recipes.train_log import finite, read_records

NAME = "learning-curve"
SUMMARY = "training and validation curves of several runs (MAE Fig. 3)"
METRICS = {
    "ppl": "perplexity",
    "nll_loss": "negative log-likelihood (bits per token)",
    "loss": "loss (bits per token)",
    "accuracy": "accuracy (%)",
}
_SECONDS = {"minutes": 60, "hours": 3600}
MARKED_POINTS = 30  # curves of more validations have no dots, which would hide the other curves


class Point(NamedTuple):
    """One measurement.

    Args:
        updates: the number of updates before the measurement.
        seconds: the training time before the measurement; None if the log does not have it.
        value: the value of the metric, which may be infinite.
    """

    updates: int
    seconds: float | None
    value: float


@dataclass
class LearningCurve:
    """The curves of one run.

    Args:
        name: the name of the run in the legend.
        train: the measurements on training batches, by rising updates.
        valid: the measurements on the validation set, by rising updates.
    """

    name: str
    train: list[Point] = field(default_factory=list)
    valid: list[Point] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run folders, or JSON logs")
    add("--metric", choices=sorted(METRICS), default="ppl", help="what to draw (ppl)")
    add(
        "--from-epoch",
        type=int,
        default=1,
        metavar="N",
        help="leave out what was logged before epoch N (1)",
    )


def analyze(args: argparse.Namespace) -> Analysis:
    """The curves of all runs, and the best validation of each.

    Args:
        args: the flags: runs (folders or logs), metric and from_epoch.

    Raises:
        UserError: for a from_epoch below 1, and in the cases of `read_learning_curve`.
    """
    if args.from_epoch < 1:
        raise UserError(f"--from-epoch {args.from_epoch}: the first epoch is 1.")
    curves = [read_learning_curve(path, args.metric, args.from_epoch) for path in args.runs]
    paths = list(map(_named_path, args.runs))
    common = os.path.commonpath([path.parent for path in paths])
    lines = []
    for curve, path in zip(curves, paths):
        # Runs of different folders may have the same last name
        curve.name = path.relative_to(common).as_posix()
        if curve.valid:
            choose = max if args.metric == "accuracy" else min
            best = choose(curve.valid, key=lambda point: point.value)
            lines.append(
                f"{curve.name}: best valid {args.metric} {best.value:g} after {best.updates:,} updates"
            )
    figure = draw_learning_curves(curves, args.metric, from_zero=args.from_epoch == 1)
    return Analysis(lines, figure)


def _named_path(path: Path) -> Path:
    """The path whose name the curve gets: the run folder, or the log file without its ending."""
    if path.name == "train.jsonl":
        path = path.parent
    path = path.resolve()
    return path if path.is_dir() else path.with_suffix("")


def read_learning_curve(path: Path, metric: str = "ppl", from_epoch: int = 1) -> LearningCurve:
    """Read the curve of a run folder (its train.jsonl) or of a log file.

    If a log has records of epochs but not of updates, each epoch's mean is a point of the training curve.
    Repeated lines count once, because fairseq's --log-file writes the lines of epoch N N times. If a resumed
    training repeats updates, the later record counts.

    Args:
        path: the folder, or a log whose lines end in fairseq's JSON records (--log-format json).
        metric: a key of METRICS.
        from_epoch: measurements before this epoch are left out; the first epoch is 1.

    Raises:
        UserError: if the file does not exist, has a damaged record, or has no measurement of the metric.
    """
    file = path / "train.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"{file} does not exist: name a run folder of a recipe, or a log in JSON. A plain fairseq-train "
            "keeps none: save what it prints with --log-format json, or have it written with --log-file, too."
        )
    curve = LearningCurve(_named_path(path).name)
    epochs: list[Point] = []  # means of whole epochs
    unique = {json.dumps(record): record for record in read_records(file)}
    for record, seconds in _with_seconds(unique.values()):
        if (finite(record["epoch"]) or 0) < from_epoch:
            continue
        for prefix, points in (("", curve.train), ("train_", epochs), ("valid_", curve.valid)):
            updates = record.get(f"{prefix}num_updates")
            _append_if_measured(points, updates, seconds, record.get(prefix + metric))
    curve.train = curve.train or epochs
    if not curve.train and not curve.valid:
        if from_epoch > 1:
            raise UserError(
                f"{file} holds no {metric} of epoch {from_epoch} or later: lower --from-epoch."
            )
        raise UserError(
            f"{file} holds no {metric} of any update: was it written with --log-format json?"
        )
    return curve


def _with_seconds(
    records: Iterable[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], float | None]]:
    """Each record with the seconds of training before it; None before the first record with a time.

    fairseq's clock `wall` starts at zero in every process; here it continues from the end of the process
    before.
    """
    seconds: float | None = None
    last_wall = 0.0
    for record in records:
        wall = finite(record.get("wall"))
        if wall is not None:
            started_anew = wall < last_wall
            seconds = (seconds or 0.0) + (wall if started_anew else wall - last_wall)
            last_wall = wall
        yield record, seconds


def _append_if_measured(
    points: list[Point], updates: Any, seconds: float | None, value: Any
) -> None:
    """Append a measurement, unless a record has no numbers for it.

    It replaces measurements of the same or a later update, which a resumed training repeats.
    """
    try:
        # `finite` would drop an infinite value, which counts here
        point = Point(int(float(updates)), seconds, float(value))
    except (TypeError, ValueError, OverflowError):  # not a measurement
        return
    while points and points[-1].updates >= point.updates:
        points.pop()
    points.append(point)


def draw_learning_curves(
    curves: Sequence[LearningCurve], metric: str = "ppl", from_zero: bool = True
) -> Figure:
    """Draw validation curves (thick) and training curves (thin) of several runs.

    The left panel has updates as its axis. If every point has a time and the longest run took a minute, a
    right panel has the hours or minutes of training.

    Args:
        curves: the curves; each run has a colour.
        metric: a key of METRICS, which names the axis; the axis of perplexity is logarithmic.
        from_zero: whether the axes of updates and times begin at 0; otherwise they begin where the curves do.
    """
    unit = _unit_of_time(curves)
    figure = Figure(figsize=(10.5 if unit else 6, 4), layout="constrained")
    panels = figure.subplots(1, 2 if unit else 1, sharey=True, squeeze=False)[0]
    for curve, colour in zip(curves, cycle(COLOURS)):
        dot = "o" if len(curve.valid) <= MARKED_POINTS else None
        thick = {"linewidth": 1.8, "marker": dot, "markersize": 3.5}
        for kind, points, look in (
            ("training", curve.train, {"linewidth": 0.8, "alpha": 0.45}),
            ("validation", curve.valid, thick),
        ):
            if not points:
                continue
            updates, times, values = zip(*points)
            line = {"color": colour} | look
            panels[0].plot(updates, values, label=f"{curve.name}, {kind}", **line)
            if unit:
                panels[1].plot([time / _SECONDS[unit] for time in times], values, **line)
    panels[0].set(xlabel="updates", ylabel=METRICS[metric])
    if unit:
        panels[1].set(xlabel=f"{unit} of training")
    for panel in panels:
        style(panel)
        if from_zero:
            panel.set_xlim(left=0)
        if metric == "ppl":
            _scale_perplexity(panel)
    handles, labels = panels[0].get_legend_handles_labels()
    # Names of up to 32 letters fit into half the width of the picture
    columns = 2 if max(map(len, labels)) <= 32 else 1
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
    return figure


def _scale_perplexity(panel: Any) -> None:
    """Give a panel a logarithmic axis with round numbers: 10, 15, 20, 30, 40, 50, 70, 100."""
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.yaxis.set_minor_locator(NullLocator())


def _unit_of_time(curves: Sequence[LearningCurve]) -> str | None:
    """The unit of the axis of times; None for no axis."""
    longest = 0.0
    for curve in curves:
        for point in curve.train + curve.valid:
            if point.seconds is None:
                return None
            longest = max(longest, point.seconds)
    if longest < 60:  # the clock's whole seconds are too coarse
        return None
    return "hours" if longest >= 2 * 3600 else "minutes"
