"""How far a measured difference can be trusted: intervals, tests and verdicts, two-sided throughout."""

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
        low, high: the ends of the mean's 95 % t interval.
        p: the p of the two-sided t test against 0.
        p_equivalent: the larger p of the two one-sided tests that the mean is within ± margin (TOST).
        minimum_detectable_effect: what the function with this name returns.
    """

    n: int
    mean: float
    low: float
    high: float
    p: float
    p_equivalent: float
    minimum_detectable_effect: float


def paired(differences: Sequence[float], margin: float) -> Difference:
    """Test the differences between two systems.

    Args:
        differences: the first system's result minus the second's, for each seed.
        margin: a mean within ± margin is too small to matter, in the unit of the differences.

    Raises:
        UserError: for fewer than two differences, which have no spread, and for one that is not finite.
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
        n: the number of differences.

    Returns:
        The mean, in the unit of the deviation.
    """
    critical = stats.t.ppf(1 - ALPHA / 2, n - 1)
    error = deviation / math.sqrt(n)

    def missing(shift: float) -> float:  # the power of the other tail is negligible
        return float(stats.nct.sf(critical, n - 1, shift)) - POWER

    enough = 4.0
    # In small steps, because scipy's noncentral t is NaN for a much larger shift
    while missing(enough) < 0:
        enough *= 1.5
    return float(optimize.brentq(missing, 0.0, enough)) * error


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p of several tests.

    If all tests with an adjusted p below 5 % are called significant, the probability that any of them is
    wrong is at most 5 %.

    Args:
        p_values: name of a test → its p.

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
    """The verdict on a contrast of losses. The rules apply in this order; results/PROTOCOL.md explains them.

    EQUIVALENT: p_equivalent is below 5 %. This includes a difference that is significant and within the
    margin, because the margin was fixed beforehand as a difference that does not matter.
    BETTER, WORSE: p is below 5 %. The first system is better if its loss is lower.
    NOT_SIGNIFICANT: difference.p_equivalent is below 5 %. This single test excludes a difference beyond the
    margin; it does not hold for all contrasts of a study at once.
    INCONCLUSIVE: neither a difference nor its absence is shown.

    Args:
        difference: the difference between the first and the second system.
        p, p_equivalent: the two p of the difference, corrected for the number of contrasts.
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

    In each trial, the outputs of each sentence are dealt at random to the seeds of the two systems. p is the
    share of trials, with the real outputs as one more, in which the systems differ by at least as much as in
    reality. So p covers the choice of sentences. It does not cover the luck of single trainings, because the
    outputs of a run that is better in all sentences are dealt to both systems: for that see `paired`.

    Args:
        first, second: the sufficient statistics of N sentences for S seeds of each system, [S, N, F]; the
            systems may differ in S.
        score: a function from the statistics of one corpus, [F], to its score.
        trials: the number of trials.
        seed: the seed of the random numbers.
    """
    pooled = np.concatenate([first, second])  # [S1 + S2, N, F]
    ours = len(first)
    runs, sentences, counts = pooled.shape
    flat = pooled.reshape(-1, counts)  # taking rows is faster than take_along_axis
    columns = np.arange(sentences)
    random = np.random.default_rng(seed)

    def difference(outputs: NDArray[np.float64]) -> float:
        totals = list(map(score, outputs.sum(axis=1)))
        return abs(float(np.mean(totals[:ours]) - np.mean(totals[ours:])))

    real = difference(pooled)
    as_large = 0
    for _ in range(trials):
        order = random.random((runs, sentences)).argsort(axis=0)
        as_large += difference(flat.take(order * sentences + columns, axis=0)) >= real - 1e-12
    return (as_large + 1) / (trials + 1)
