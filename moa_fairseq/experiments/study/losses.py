"""What the runs of a study measured: their validation losses, also at equal training loss."""

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_fairseq.experiments.records.json_files import selected
from moa_fairseq.experiments.study.design import Records, Run, Study
from moa_fairseq.experiments.study.records import DIVERGED, Content

Losses = dict[str, dict[int, float]]  # system → seed → loss in bits


def losses_of(
    study: Study,
    runs: list[Run],
    records: Records,
    levels: NDArray[np.float64] | None = None,
) -> Losses:
    """The losses of the runs that have a record; a diverged run has the largest loss of all runs.

    Args:
        study: the study, which says how many validations are averaged.
        runs: the runs to read.
        records: name of a run → its record.
        levels: training losses in bits; the loss is the mean of the validation losses at these levels. None:
            it is the mean of the last validation losses.

    Returns:
        System → seed → loss in bits.
    """
    losses: Losses = {key: {} for key in study.systems}
    diverged = []
    for run in runs:
        record = records.get(run.name)
        if record is None:
            continue
        if has_diverged(study, record):
            diverged.append(run)
        elif levels is None:
            last = _last(study, record)
            losses[run.system][run.seed] = sum(last) / len(last)
        # By linear interpolation between the validations on both sides of each level
        elif pairs := pairs_of(record):
            train, valid = np.transpose(sorted(pairs.values()))
            losses[run.system][run.seed] = float(np.interp(levels, train, valid).mean())
    worst = max(itertools.chain(*map(dict.values, losses.values())), default=float("nan"))
    for run in diverged:
        losses[run.system][run.seed] = worst
    return losses


def common_levels(study: Study, records: list[Content]) -> NDArray[np.float64]:
    """Evenly spaced training losses that all records have, study.levels in number.

    They go from the lowest loss that all records reached to one bit above it, or to the highest loss that all
    records have, if that is lower.

    Args:
        study: the study, which says how many levels there are.
        records: the records of the compared runs; those that diverged do not count.

    Returns:
        The levels in bits; none if the records have no range of training losses in common.
    """
    lowest = 0.0
    highest = math.inf
    for record in records:
        pairs = pairs_of(record)
        if record["end"] != DIVERGED and pairs:
            train, _ = zip(*pairs.values())
            lowest = max(lowest, min(train))
            highest = min(highest, max(train))
    highest = min(highest, lowest + 1)
    if highest < lowest:
        return np.empty(0)
    return np.linspace(lowest, highest, study.levels)


def pairs_of(record: Content) -> dict[float, tuple[float, float]]:
    """The training and the validation loss of each validation that has both numbers.

    Args:
        record: the record of a run.

    Returns:
        Updates → (training loss, validation loss).
    """
    pairs = {}
    for row in record["curve"]:
        updates, train, valid = selected(row, ("updates", "train", "valid")).values()
        if None not in (updates, train, valid):
            pairs[updates] = (train, valid)
    return pairs


def _last(study: Study, record: Content) -> list[Any]:
    """The last validation losses of a run, whose mean is its loss; None for a loss that is not finite."""
    return [row.get("valid") for row in record["curve"]][-study.last :]


def has_diverged(study: Study, record: Content) -> bool:
    """Whether a run has no loss because it diverged.

    Args:
        study: the study, which says how many validations are averaged.
        record: the record of the run.
    """
    last = _last(study, record)
    return record["end"] == DIVERGED or not last or None in last
