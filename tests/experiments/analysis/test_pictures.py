"""What stands in the pictures: panels, order of bars, labels."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis import plots
from moa_fairseq.experiments.analysis.expert_load import draw_expert_load
from moa_fairseq.experiments.analysis.learning_curve import (
    LearningCurve,
    Point,
    draw_learning_curves,
)
from moa_fairseq.experiments.analysis.plots import label_points, save

ROOT = Path(__file__).resolve().parents[3]


def load(name, counts, gates=None):
    shares = [[value / sum(values) for value in values] for values in (counts, gates or counts)]
    return {
        "name": name,
        "num_experts": len(counts),
        "load": shares[0],
        "gate_share": shares[1],
    }


def visible(figure):
    return [panel for panel in figure.axes if panel.axison]


def test_experts_stand_in_the_order_of_their_load():
    figure = draw_expert_load([load("encoder.layers.0.self_attn", [1, 6, 3, 0], [2, 6, 2, 0])])
    (panel,) = visible(figure)
    assert [patch.get_height() for patch in panel.patches] == pytest.approx(
        [0.6, 0.3, 0.1, 0.0]
    )
    dots, even = panel.get_lines()
    assert list(dots.get_ydata()) == pytest.approx([0.6, 0.2, 0.2, 0.0])
    assert even.get_ydata()[0] == pytest.approx(1 / 4)
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["1", "2", "0", "3"]


def test_one_row_of_panels_per_kind_of_attention():
    names = [f"encoder.layers.{layer}.self_attn" for layer in range(3)]
    for layer in range(2):
        names += [f"decoder.layers.{layer}.self_attn", f"decoder.layers.{layer}.encoder_attn"]
    figure = draw_expert_load([load(name, [1, 2]) for name in names], "title")
    assert len(figure.axes) == 9 and len(visible(figure)) == 7
    labels = [panel.get_ylabel().replace("\n", " ") for panel in figure.axes[::3]]
    assert labels == [
        "encoder self-attention",
        "decoder self-attention",
        "decoder cross-attention",
    ]


def test_curves_against_updates_and_minutes():
    points = [Point(10, 60.0, 50.0), Point(20, 120.0, 25.0)]
    figure = draw_learning_curves(
        [LearningCurve("a", points, points[1:]), LearningCurve("b", points, [])]
    )
    updates, minutes = figure.axes
    assert list(updates.get_lines()[0].get_xdata()) == [10, 20]
    assert list(minutes.get_lines()[0].get_xdata()) == [1.0, 2.0]
    assert minutes.get_xlabel() == "minutes of training"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["a, training", "a, validation", "b, training"]  # b was never validated


@pytest.mark.parametrize("name", ["short", "experiment_with_a_rather_long_name_4k4e64d"])
def test_the_legend_lies_inside_the_picture(name):
    figure = draw_learning_curves(
        [LearningCurve(name, points := [Point(1, None, 5.0)], points)] * 3
    )
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= legend.x0 and legend.x1 <= figure.bbox.x1


def test_curves_from_a_later_epoch_on_begin_where_they_do():
    curves = [LearningCurve("a", [Point(100, None, 50.0), Point(200, None, 40.0)], [])]
    assert draw_learning_curves(curves).axes[0].get_xlim()[0] == 0
    assert draw_learning_curves(curves, from_zero=False).axes[0].get_xlim()[0] > 50


@pytest.mark.parametrize("seconds", [None, 12.0])
def test_no_panel_of_time_where_the_logs_do_not_tell(seconds):
    curve = LearningCurve("a", [Point(10, seconds, 50.0)], [])
    assert len(draw_learning_curves([curve], "nll_loss").axes) == 1


def test_pictures_are_written_whole(tmp_path):
    figure = draw_learning_curves(
        [LearningCurve("a", [Point(1, None, 5.0), Point(2, None, 4.0)], [])]
    )
    save(figure, tmp_path / "new" / "curve.png")
    assert (tmp_path / "new" / "curve.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "file").touch()
    with pytest.raises(UserError):
        save(figure, tmp_path / "file" / "curve.png")


def test_names_of_points_that_touch_stand_apart_and_each_at_its_own():
    figure = Figure(figsize=(4, 3), layout="constrained")
    panel = figure.subplots()
    points = [
        (1.0, 1.0, "A"),
        (1.0, 1.02, "BB"),
        (1.01, 1.01, "C"),
        (2.0, 2.0, "D"),
        (1.0, 1.04, "E"),
    ]
    panel.plot(*zip(*[point[:2] for point in points]), "o")
    label_points(panel, points)
    figure.canvas.draw()
    boxes = [Text.get_window_extent(text) for text in panel.texts]
    assert [text.get_text() for text in panel.texts] == [name for *_, name in points]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    places = panel.transData.transform([point[:2] for point in points])
    for text, box, own in zip(panel.texts, boxes, places):
        middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
        distances = [math.dist(place, middle) for place in places]
        assert text.arrow_patch or min(distances) == math.dist(own, middle)


def test_names_stand_clear_of_intervals():
    figure = Figure(figsize=(5, 4), layout="constrained")
    panel = figure.subplots()
    points = [(1.0, 1.0, "a long name"), (2.0, 1.5, "another name"), (1.5, 2.0, "a third name")]
    bars = [(x, y - 0.5, y + 0.5) for x, y, _ in points]
    panel.set(xlim=(0, 3), ylim=(0, 3))
    for x, low, high in bars:
        panel.vlines(x, low, high)
    label_points(panel, points, [((x, low), (x, high)) for x, low, high in bars])
    figure.canvas.draw()
    assert len(panel.texts) == len(points)
    for text, (x, low, high) in itertools.product(panel.texts, bars):
        box = Text.get_window_extent(text)
        (place, bottom), (_, top) = panel.transData.transform([(x, low), (x, high)])
        assert place < box.x0 or place > box.x1 or box.y0 > top or box.y1 < bottom


def test_settings_in_the_working_directory_start_no_latex(tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    program = (
        f"from {plots.__name__} import matplotlib; print(matplotlib.rcParams['text.usetex'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", program]
    said = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout == "False\n"
