"""Intervals, tests and verdicts against cases computed by hand and against sacreBLEU's."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest
from scipy import stats

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring.significance import (
    BETTER,
    EQUIVALENT,
    INCONCLUSIVE,
    NOT_SIGNIFICANT,
    WORSE,
    approximate_randomisation,
    holm,
    minimum_detectable_effect,
    paired,
    verdict,
)


def test_a_paired_difference_by_hand():
    # mean 2, deviation 1, standard error 1/√3; t(2) is 4.302653 at 97.5 %
    found = paired([1.0, 2.0, 3.0], margin=0.5)
    assert found.n == 3 and found.mean == 2.0
    assert found.high - found.mean == pytest.approx(4.302653 / math.sqrt(3), abs=1e-6)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    # t = 2√3; of t with two degrees of freedom P(|T| > t) = 1 − t/√(2 + t²)
    assert found.p == pytest.approx(1 - 2 * math.sqrt(3) / math.sqrt(14), abs=1e-12)
    # TOST: the bound that is nearer lies at (0.5 − 2)·√3
    shift = 1.5 * math.sqrt(3)
    assert found.p_equivalent == pytest.approx(
        0.5 * (1 + shift / math.sqrt(2 + shift**2)), abs=1e-12
    )


NUMBERS = st.floats(-5, 5, width=16)


@given(st.lists(NUMBERS, min_size=2, max_size=9), st.floats(0, 5, width=16))
def test_paired_agrees_with_scipys_tests(differences, margin):
    found = paired(differences, margin)
    assume(len(set(differences)) > 1)
    result = stats.ttest_1samp(differences, 0.0)
    interval = result.confidence_interval(0.95)
    assert (found.p, found.low, found.high) == pytest.approx(
        (result.pvalue, interval.low, interval.high)
    )
    sides = (
        stats.ttest_1samp(differences, bound, alternative=way).pvalue
        for bound, way in ((-margin, "greater"), (margin, "less"))
    )
    assert found.p_equivalent == pytest.approx(max(sides))


@given(st.floats(-5, 5), st.integers(2, 9), st.floats(-1, 1, width=16))
def test_equal_differences_have_no_spread(value, n, beyond):
    """Also where their mean is rounded."""
    margin = abs(value) + beyond
    expected = (n, value, value, value, value == 0, margin <= abs(value), 0.0)
    assert paired([value] * n, margin) == expected


def test_one_difference_has_no_interval():
    with pytest.raises(UserError, match="two seeds"):
        paired([0.5], 0.1)
    with pytest.raises(UserError, match="diverge"):
        paired([float("nan"), 1.0], 0.1)


@pytest.mark.parametrize("n", [2, 5, 12])
def test_the_minimum_detectable_effect_is_found_in_80_percent(n):
    shift = minimum_detectable_effect(1.0, n)
    draws = np.random.default_rng(n).normal(shift, 1.0, (20_000, n))
    assert (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05).mean() == pytest.approx(
        0.8, abs=0.015
    )


@given(st.lists(st.floats(0, 1) | st.sampled_from([0.01, 0.02]), min_size=1, max_size=5))
def test_holm_is_bonferronis_test_of_every_set_of_hypotheses(values):
    """Closed testing: a hypothesis falls if each set with it falls."""
    names = range(len(values))
    sets = [each for n in names for each in itertools.combinations(names, n + 1)]
    expected = {
        name: max(
            min(1.0, len(each) * min(values[i] for i in each)) for each in sets if name in each
        )
        for name in names
    }
    assert holm(dict(enumerate(values))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("differences", "p", "p_equivalent", "expected"),
    [
        ([-1.0, -1.1], 0.01, 0.9, BETTER),
        ([1.0, 1.1], 0.01, 0.9, WORSE),
        ([0.0, 0.001], 0.2, 0.01, EQUIVALENT),
        ([0.001, 0.0011], 0.01, 0.01, EQUIVALENT),  # significant, and too small to matter
        (
            [0.0, 0.001],
            0.2,
            0.2,
            NOT_SIGNIFICANT,
        ),  # within ± 0.1 by a single test, not by the corrected one
        ([0.0, 1.0], 0.2, 0.2, INCONCLUSIVE),
        ([-1.0, -1.1], 0.05, 0.9, INCONCLUSIVE),
    ],
)
def test_verdicts(differences, p, p_equivalent, expected):
    assert verdict(paired(differences, 0.1), p, p_equivalent) == expected


def _corpora(seed, runs, sentences=60):
    """Hypotheses of `runs` systems, each worse than the one before, and a reference."""
    random = np.random.default_rng(seed)
    reference = [
        " ".join(map(str, random.integers(0, 30, random.integers(4, 12))))
        for _ in range(sentences)
    ]
    spoilt = [
        [
            " ".join(w if random.random() > 0.2 + 0.03 * run else "x" for w in line.split())
            for line in reference
        ]
        for run in range(runs)
    ]
    return spoilt, reference


def _statistics(metric, hypotheses, reference):
    return np.array(metric._extract_corpus_statistics(hypotheses, [reference]), dtype=float)


def test_randomisation_agrees_with_sacrebleu():
    metric = BLEU(tokenize="none", force=True)
    (first, second), reference = _corpora(3, 2)

    def score(total):
        return metric._compute_score_from_stats([int(x) for x in total]).score

    statistics = [_statistics(metric, text, reference)[None] for text in (first, second)]
    ours = approximate_randomisation(*statistics, score, trials=4000)
    _, results = PairedTest(
        [("a", first), ("b", second)], {"BLEU": metric}, [reference], "ar", n_samples=4000
    )()
    theirs = results["BLEU"][1].p_value
    assert 0.005 < theirs < 0.6, "a case that tells something"
    assert ours == pytest.approx(theirs, abs=4 * math.sqrt(theirs * (1 - theirs) / 4000))


def test_randomisation_over_seeds_by_enumeration():
    """Two sentences, two seeds a system: all (4!)² ways to deal the outputs, by hand."""
    # [runs, N, 1]
    values = np.array([[[3.0], [1.0]], [[2.0], [4.0]], [[0.0], [1.0]], [[1.0], [0.0]]])

    def mean(runs):
        return float(np.mean([run.sum() for run in runs]))

    real = abs(mean(values[:2]) - mean(values[2:]))
    dealt = []
    for one, two in itertools.product(itertools.permutations(range(4)), repeat=2):
        runs = np.stack([values[list(one), 0], values[list(two), 1]], axis=1)
        dealt.append(abs(mean(runs[:2]) - mean(runs[2:])) >= real - 1e-12)
    found = approximate_randomisation(
        values[:2], values[2:], lambda total: float(total[0]), trials=20_000
    )
    assert found == pytest.approx(np.mean(dealt), abs=0.01)


def test_equal_systems_are_not_told_apart():
    values = np.random.default_rng(5).random((1, 20, 1))
    assert (
        approximate_randomisation(
            values, values.copy(), lambda total: float(total[0]), trials=100
        )
        == 1.0
    )


def test_only_the_t_test_sees_that_a_run_is_better_as_a_whole():
    """Two equal systems of five runs, whose quality differs from run to run: how often is p below 5 %?"""
    random = np.random.default_rng(1)
    found = []
    for trial in range(80):
        # Of sentences, of runs
        quality = random.normal(0, 0.7, 300) + random.normal(0, 0.08, (10, 1))
        right = random.binomial(8, 1 / (1 + np.exp(-quality)))
        # [runs, sentences, 2]
        counts = np.stack([right, np.full_like(right, 8)], axis=2).astype(float)
        p = approximate_randomisation(
            counts[:5], counts[5:], lambda c: c[0] / c[1], trials=100, seed=trial
        )
        scores = right.sum(axis=1)
        found.append((p < 0.05, paired((scores[:5] - scores[5:]).tolist(), 0).p < 0.05))
    by_randomisation, by_t_test = np.mean(found, axis=0)
    assert by_randomisation > 0.2 and by_t_test < 0.12


def test_no_number_of_trials_makes_p_zero():
    """Systems that differ in every sentence: none of 50 deals is as far apart, and the real one counts."""
    values = np.stack([np.ones((40, 1)), np.zeros((40, 1))])
    p = approximate_randomisation(
        values[:1], values[1:], lambda total: float(total[0]), trials=50
    )
    assert p == pytest.approx(1 / 51)
