"""Learning curves out of fairseq's JSON log lines (train.jsonl, or what --log-file wrote)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from moa_fairseq.errors import UserError
from moa_fairseq.recipes.train_log import finite, read_records

METRICS = {
    "ppl": "perplexity",
    "nll_loss": "negative log-likelihood (bits per token)",
    "loss": "loss (bits per token)",
}


class Point(NamedTuple):
    """A value after so many updates and, where the log tells, seconds of training."""

    updates: int
    seconds: Optional[float]
    value: float


@dataclass
class LearningCurve:
    """One run: what it measured on training batches and on the validation set."""

    name: str
    train: List[Point] = field(default_factory=list)
    valid: List[Point] = field(default_factory=list)


def read_learning_curve(path: Path, metric: str = "ppl", from_epoch: int = 1) -> LearningCurve:
    """The curve of a run folder (its train.jsonl) or of a log file.

    metric: a key of METRICS. from_epoch: what was measured before this epoch is left out. Repeated lines
    count once (fairseq's --log-file writes epoch N's lines N times); where a resumed training repeats
    updates, the later record stands. The clock of such a training goes on from where the earlier one
    ended. Raises UserError if there is nothing to draw.
    """
    file = path / "train.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file} does not exist: name a run folder with a train.jsonl, or a JSON log.")
    curve = LearningCurve((path if path.is_dir() else path.parent).resolve().name)
    clock = _Clock()
    for record in _records(file):
        shown = int(finite(record["epoch"])) >= from_epoch
        if f"valid_{metric}" in record and shown:
            _append(curve.valid, record.get("valid_num_updates"), clock.now, record[f"valid_{metric}"])
        elif metric in record and "num_updates" in record:
            clock.set(record.get("wall"))
            if shown:
                _append(curve.train, record["num_updates"], clock.now, record[metric])
    if not curve.train and not curve.valid:
        if from_epoch > 1:
            raise UserError(f"{file} holds no {metric} of epoch {from_epoch} or later: lower --from-epoch.")
        raise UserError(f"{file} holds no {metric} of any update: was it written with --log-format json?")
    return curve


class _Clock:
    """fairseq's `wall` starts at zero in every process; this one goes on."""

    def __init__(self) -> None:
        self.now: Optional[float] = None
        self._before = self._last = 0.0

    def set(self, wall: Optional[str]) -> None:
        if wall is not None:
            seconds = finite(wall)
            if seconds is None:
                return
            if seconds < self._last:
                self._before += self._last
            self._last = seconds
            self.now = self._before + seconds


def _records(file: Path) -> Iterator[Dict[str, Any]]:
    """The records of the log, each once; a line that a crash cut off is passed over."""
    seen = set()
    for record in read_records(file):
        text = json.dumps(record)
        if text not in seen:
            seen.add(text)
            yield record


def _append(points: List[Point], updates: Any, seconds: Optional[float], value: Any) -> None:
    try:
        position, number = int(float(updates)), float(value)  # the value may be infinite
    except (TypeError, ValueError, OverflowError):
        return  # no measurement
    while points and points[-1].updates >= position:
        points.pop()
    points.append(Point(position, seconds, number))
