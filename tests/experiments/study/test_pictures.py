"""The pictures of a report: which are drawn, and the intervals in them."""

import warnings

import numpy as np
from played_study import STUDY, of_system, report_of

from moa_fairseq.experiments.study import pictures


def test_a_study_of_one_system_has_no_differences_to_draw(study, picture_names):
    alone = {"systems": {"A": STUDY["systems"]["A"]}, "contrasts": {}, "seeds": 2}
    study(**alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        report_of(study, **alone)
    assert picture_names() == {"branch"}


def test_a_point_of_the_picture_has_the_interval_of_its_mean():
    systems = [of_system("A"), of_system("B", loss=2.0, branch=0.5, deviation=None)]
    content = {"systems": systems}
    (panel,) = pictures._loss_against_start(content, {"": pictures.Look("black", "o")}).axes
    points = [line.get_xydata()[0].tolist() for line in panel.lines]
    assert points == [[1.0, 3.0], [0.5, 2.0]]
    (bar,) = panel.collections
    half = 3.182446 * 0.2 / 2  # of the t distribution with three degrees of freedom
    np.testing.assert_allclose(bar.get_segments(), [[(1, 3 - half), (1, 3 + half)]])
