"""fairseq's JSON log lines: collected in train.jsonl, shown as progress, summarised for result.json.

fairseq's own --log-file opens the file once more in every epoch, so that it has epoch N's lines
N times; the records are therefore taken from the standard output of `--log-format json`.
"""

import dataclasses
import datetime
import json
import math
import re
import reprlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write, disk_errors

# A number has a largest length, so that an endless line of digits is searched only once.
_COUNT = r"[0-9][0-9,]{0,30}"
_PARAMETERS = re.compile(rf"num\. (?:shared|expert) model params: ({_COUNT})")
_UPDATED = re.compile(rf"(?<![0-9,])({_COUNT}) of {_COUNT} parameters are updated")
_LOADED = re.compile(r" \(epoch [0-9]{1,18} @ ([0-9]{1,18}) updates\)")
_NUMBER_KEYS = ("epoch", "update", "num_updates", "train_num_updates", "valid_num_updates")
_SKIPPED = re.compile(r"\bwill be skipped\b|\bskipping\b")
_TRAINING_BEGINS = "Start iterating over samples"
# The logger that reports on the kernels
_KERNEL_CHECK = " | moa_fairseq.plugin.patches.kernel_check | "
LogRecord = dict[str, Any]  # a line of fairseq's log


def parse_record(line: str) -> LogRecord | None:
    """The JSON object at the end of a fairseq log line, or None; NaN and infinite losses are accepted."""
    start = line.find("| {")
    text = line[start + 2 :] if start >= 0 else line
    if not text.startswith("{"):
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # all errors of JSON for a text
        return None
    if isinstance(record, dict) and "epoch" in record:
        return record
    return None


def key_of_bad_number(record: LogRecord) -> str | None:
    """The key of an epoch or a number of updates that is not a number; None if all is well."""
    for key in _NUMBER_KEYS:
        if key in record and finite(record[key]) is None:
            return key
    return None


def finite(value: Any) -> float | None:
    """A number in fairseq's log, as a number or as text; None for anything else, also infinity and NaN."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # text of no number, or an int beyond all floats
        return None
    return number if math.isfinite(number) else None


def read_records(path: Path) -> Iterator[LogRecord]:
    """The records of a train.jsonl; a last line that was cut off by a crash is skipped.

    Raises:
        UserError: for a record without a sensible epoch or number of updates; the message names the line.
    """
    if path.is_file():
        with open(path, encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                record = parse_record(line.strip())
                if record is None:
                    continue
                if wrong := key_of_bad_number(record):
                    raise UserError(
                        f"{path}, line {number}: {wrong} is {reprlib.repr(record[wrong])}, which is not a "
                        "number. Delete this damaged line."
                    )
                yield record


def updates_of(record: LogRecord) -> int:
    """Number of updates at which a record was written."""
    for key in ("num_updates", "train_num_updates", "valid_num_updates"):
        if key in record:
            return int(finite(record[key]) or 0)
    return 0


def prune(path: Path, updates: int) -> None:
    """Remove the records after some update: training resumes there and writes them again.

    Args:
        path: the train.jsonl.
        updates: the number of updates of the last record to keep.
    """
    records = list(read_records(path))
    retained = [record for record in records if updates_of(record) <= updates]
    if len(retained) < len(records):
        with atomic_write(path) as stream:
            for record in retained:
                stream.write(f"{json.dumps(record)}\n")


def summarise(path: Path) -> dict[str, Any]:
    """A summary of a training in a few numbers.

    Args:
        path: the train.jsonl.

    Returns:
        "updates", "epochs", "train_seconds", "tokens_per_second" (target tokens) and the last "valid_ppl", if
        there is one.

    Raises:
        UserError: see `read_records`.
    """
    records = list(read_records(path))
    # An interrupted epoch ends twice; its last record covers all of it.
    epochs = {finite(record["epoch"]): record for record in records if "train_loss" in record}
    tokens = seconds = previous_updates = 0.0
    for record in epochs.values():  # not by fairseq's times, which are whole seconds
        updates = updates_of(record)
        speed = finite(record.get("train_wps")) or 0.0
        epoch_tokens = (finite(record.get("train_wpb")) or 0.0) * (updates - previous_updates)
        previous_updates = updates
        if speed:
            tokens += epoch_tokens
            seconds += epoch_tokens / speed
    tokens_per_second = finite(tokens / seconds) if seconds else None
    summary: dict[str, Any] = {
        "updates": max(map(updates_of, records), default=0),
        "epochs": len(epochs),
        "train_seconds": round(seconds, 1) if math.isfinite(seconds) else None,
        "tokens_per_second": None if tokens_per_second is None else round(tokens_per_second, 1),
    }
    validations = [record for record in records if "valid_loss" in record]
    if validations and "valid_accuracy" not in validations[-1]:
        summary["valid_ppl"] = finite(validations[-1].get("valid_ppl") or 0)
    return summary


@dataclasses.dataclass
class TrainLog:
    """Receives the lines of a running fairseq-train, saves the records and shows the progress.

    Args:
        path: the train.jsonl to which records are added.
        max_epoch, max_update: the end of the training, for the remaining time.
        parameters: the numbers of parameters in fairseq's log, shared ones and those of experts.
        updated: the number of trained parameters, if the task logs it.
        started: the start of this session by time.monotonic(), in seconds, and the fraction of the training
            that was done then; None until they are known.
        resumes: whether this session resumes from a checkpoint; the first record gives the fraction done.
        skipped: messages about skipped sentences, which fairseq repeats in every epoch.
    """

    path: Path
    max_epoch: int | None
    max_update: int | None
    parameters: list[int] = dataclasses.field(default_factory=list)
    updated: int | None = None
    started: tuple[float, float] | None = None
    resumes: bool = False
    skipped: set[str] = dataclasses.field(default_factory=set)

    def __call__(self, line: str) -> None:
        """Take one line of standard output."""
        record = parse_record(line)
        if record is not None:
            # A bad number is another program's, which may not end a training
            if not key_of_bad_number(record):
                self._save(record)
                self._show(record)
        elif match := _PARAMETERS.search(line):
            self.parameters.append(_count(match))
        elif match := _UPDATED.search(line):
            self.updated = _count(match)
            print(f"  {match.group(0)}", flush=True)
        elif _KERNEL_CHECK in line:
            self._print(f"  {line.partition(_KERNEL_CHECK)[2]}")
        elif _SKIPPED.search(line):
            message = line.rsplit(" | ", 1)[-1]
            if message not in self.skipped:
                self.skipped.add(message)
                self._print(f"  fairseq: {message}")
        elif _TRAINING_BEGINS in line and not (self.started or self.resumes):
            self.started = (time.monotonic(), 0.0)
        elif "Loaded checkpoint " in line and (match := _LOADED.search(line)):
            updates = _count(match)
            prune(self.path, updates)
            self.resumes = updates > 0
            if self.resumes:  # a pretrained model counts from 0
                print(f"  resuming from update {updates:,}", flush=True)

    def _save(self, record: LogRecord) -> None:
        """Add a record to the file, on a new line even if a crash cut off the last line."""
        text = f"{json.dumps(record)}\n"
        with disk_errors(self.path), open(self.path, "a+b") as stream:
            stream.seek(max(0, stream.tell() - 1))
            if stream.read(1) not in (b"", b"\n"):
                text = f"\n{text}"
            stream.write(text.encode())

    def _show(self, record: LogRecord) -> None:
        """Show a record as a line of progress."""
        epoch = int(finite(record["epoch"]) or 0)
        updates = updates_of(record)
        if "valid_loss" in record:
            name = "accuracy" if "valid_accuracy" in record else "ppl"
            score = record.get(f"valid_{name}", "?")
            self._print(f"  epoch {epoch}: valid {name} {score}, update {updates:,}")
        elif "train_loss" in record:
            state = f"train loss {record['train_loss']}, {record.get('train_wps', '?')} tokens/s"
            self._print(f"  epoch {epoch}: {state}{self._time_left(epoch, updates)}")
        else:
            end = f" (of {self.max_epoch} epochs)"
            if self.max_update:
                end = f" of {self.max_update:,}"
            state = f"loss {record.get('loss', '?')}, {record.get('wps', '?')} tokens/s"
            remaining = self._time_left(finite(record.get("update", epoch - 1)) or 0.0, updates)
            self._print(
                f"  epoch {epoch}, update {updates:,}{end}: {state}{remaining}", replaceable=True
            )

    def _time_left(self, epochs: float, updates: int) -> str:
        """The remaining time at the speed of this session; "" while it is unknown."""
        now = time.monotonic()
        goals = ((epochs, self.max_epoch), (updates, self.max_update))
        fraction = max((number / goal for number, goal in goals if goal), default=0.0)
        self.started = self.started or (now, fraction)
        began, first_fraction = self.started
        if fraction <= first_fraction or fraction >= 1:
            return ""
        seconds = max(0.0, (now - began) / (fraction - first_fraction) * (1 - fraction))
        return f", about {datetime.timedelta(seconds=round(seconds))} left"

    @staticmethod
    def _print(text: str, replaceable: bool = False) -> None:
        """Print a line. On a terminal it replaces a replaceable line before it."""
        if sys.stdout.isatty():
            print(f"\r\x1b[K{text}", end="" if replaceable else "\n", flush=True)
        else:
            print(text, flush=True)


def _count(match: re.Match[str]) -> int:
    return int(match.group(1).replace(",", ""))
