"""How far a measured difference can be trusted: intervals, tests and verdicts, two-sided throughout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from moa_fairseq.errors import UserError

ALPHA = 0.05
POWER = 0.8
BETTER = "better"
WORSE = "worse"
EQUIVALENT = "equivalent"
NOT_SIGNIFICANT = "equivalent before correction"
INCONCLUSIVE = "inconclusive"


class Difference(NamedTuple):
    """The mean of paired differences, with its interval and tests.

    Args:
        n: the number of differences.
        mean: their mean.
        low, high: the 95 % t interval.
        p: of the two-sided t test against 0.
        p_equivalent: the larger p of the two one-sided tests that the mean is within ± margin (TOST).
        minimum_detectable_effect: see the function of this name.
    """

    n: int
    mean: float
    low: float
    high: float
    p: float
    p_equivalent: float
    minimum_detectable_effect: float


def paired(differences: Sequence[float], margin: float) -> Difference:
    """Judge the differences of two systems, one for each seed.

    Args:
        differences: first minus second, of each seed.
        margin: what nobody would miss, in the same unit.

    Raises:
        UserError: for fewer than two, since one difference says nothing of its own spread, and for one that
            is not a number.
    """
    n = len(differences)
    if not np.isfinite(differences).all():
        raise UserError(
            "A difference is not a number: each system needs a run that did not diverge."
        )
    if n < 2:
        raise UserError(
            f"{n} paired runs: a difference needs at least two seeds to have an interval."
        )
    mean = float(np.mean(differences))
    error = float(stats.sem(differences))
    if min(differences) == max(differences):  # a rounded mean would differ from each of them
        mean, error = float(differences[0]), 0.0
    half = float(stats.t.ppf(1 - ALPHA / 2, n - 1)) * error
    if error == 0:
        return Difference(n, mean, mean, mean, float(mean == 0), float(abs(mean) >= margin), 0.0)
    p = 2 * float(stats.t.sf(abs(mean) / error, n - 1))
    p_equivalent = float(stats.t.sf((margin - abs(mean)) / error, n - 1))
    detectable = minimum_detectable_effect(error * math.sqrt(n), n)
    return Difference(n, mean, mean - half, mean + half, p, p_equivalent, detectable)


def minimum_detectable_effect(deviation: float, n: int) -> float:
    """The mean that a two-sided t test at 5 % finds with power 80 %.

    Args:
        deviation: the sample standard deviation of the differences.
        n: how many there are.

    Returns:
        In the unit of the deviation.
    """
    critical = stats.t.ppf(1 - ALPHA / 2, n - 1)
    error = deviation / math.sqrt(n)

    def missing(shift: float) -> float:  # the other tail is beyond what counts
        return float(stats.nct.sf(critical, n - 1, shift)) - POWER

    enough = 4.0
    while missing(enough) < 0:  # far beyond it scipy's noncentral t is not a number
        enough *= 1.5
    return float(optimize.brentq(missing, 0.0, enough)) * error


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p of each named test: with all of them below 5 %, a false one is among them in 5 %.

    Args:
        p_values: name of a test → its own p.

    Returns:
        Name → adjusted p, at most 1.
    """
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = highest
    return adjusted


def verdict(difference: Difference, p: float, p_equivalent: float) -> str:
    """What a contrast of losses shows. The rules apply in this order; results/PROTOCOL.md has them in words.

    EQUIVALENT: p_equivalent is below 5 %. This includes a difference that is significant and within the
    margin, because the margin was fixed beforehand as a difference that does not matter.
    BETTER, WORSE: p is below 5 %. The first system is better if its loss is lower.
    NOT_SIGNIFICANT: difference.p_equivalent is below 5 %. This single test excludes a difference beyond the
    margin; it does not hold for all contrasts of a study at once.
    INCONCLUSIVE: neither a difference nor its absence is shown.

    Args:
        difference: first minus second.
        p, p_equivalent: those of the difference, corrected for the number of contrasts.
    """
    if p_equivalent < ALPHA:
        return EQUIVALENT
    if p < ALPHA:
        return BETTER if difference.mean < 0 else WORSE
    return NOT_SIGNIFICANT if difference.p_equivalent < ALPHA else INCONCLUSIVE


def approximate_randomisation(
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    score: Callable[[NDArray[np.float64]], float],
    trials: int = 10_000,
    seed: int = 12345,
) -> float:
    """Two-sided p of the difference between two systems' mean corpus scores (Clark et al., 2011).

    In each trial the outputs of all seeds of a sentence are dealt anew to the two systems; p is the share of
    trials that differ by at least as much, the real one included. So it covers the choice of sentences. A run
    that is better in all of them is dealt away: for that see `paired`.

    Args:
        first, second: sufficient statistics of N sentences for S seeds of each system (S may differ), [S, N,
            F].
        score: the statistics of one corpus, [F] → what it scores.
        trials: how many.
        seed: of the dealing.
    """
    pooled = np.concatenate([first, second])  # [S1 + S2, N, F]
    ours = len(first)
    (runs, sentences, counts) = pooled.shape
    flat = pooled.reshape(-1, counts)  # rows: faster than take_along_axis
    place = np.arange(sentences)
    random = np.random.default_rng(seed)

    def difference(dealt: NDArray[np.float64]) -> float:
        totals = list(map(score, dealt.sum(axis=1)))
        return abs(float(np.mean(totals[:ours]) - np.mean(totals[ours:])))

    real = difference(pooled)
    as_large = 0
    for _ in range(trials):
        order = random.random((runs, sentences)).argsort(axis=0)
        as_large += difference(flat.take(order * sentences + place, axis=0)) >= real - 1e-12
    return (as_large + 1) / (trials + 1)
