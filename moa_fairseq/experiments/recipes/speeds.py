"""Recorded training speeds: read from a results folder, and the one to plan with."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.batch import BatchPlan
from moa_fairseq.experiments.recipes.hardware import DEVICES, device_kind
from moa_fairseq.experiments.records.json_files import read_json

_PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "amp": "amp"}
log = logging.getLogger(__name__)


def read_speeds(results: Path) -> list[dict[str, Any]]:
    """The recorded speeds in a results folder; unreadable files are skipped.

    The experiment of a benchmark's row is a recipe or an architecture.

    Args:
        results: the folder, with measured/, throughput/ and benchmarks/.

    Returns:
        Of each: experiment, parameters, tokens_per_second, device (see `device_kind`), count, precision and
        file; for benchmarks also batch_tokens.
    """
    rows: list[dict[str, Any]] = []
    places = ("measured/*.json", "throughput/*.json", "benchmarks/training*.json")
    for path in sorted(itertools.chain.from_iterable(map(results.glob, places))):
        try:
            row = read_json(path, "")
            shared = {"device": "CPU", "count": 1, "file": f"{path.parent.name}/{path.name}"}
            if match := re.fullmatch(r"(\d+) x (.+)", str(row["hardware"])):
                shared.update(device=device_kind(match[2]), count=int(match[1]))
            shared["precision"] = row.get("precision")
            measured = {row.get("experiment"): row}
            if path.parent.name == "benchmarks":
                shared["precision"] = _PRECISIONS[row["dtype"]]
                shared["batch_tokens"] = row["batch"] * row["length"]
                measured = {
                    name: values for name, values in row["rows"].items() if values["parameters"] > 0
                }
            for name, values in measured.items():
                speed = float(values["tokens_per_second"])
                if speed > 0 and name:
                    entry = {"experiment": str(name), "parameters": values.get("parameters")}
                    rows.append(entry | {"tokens_per_second": speed} | shared)
        except UserError as error:  # damaged
            log.warning("%s", error)
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            continue  # a record without a speed, or one that was removed meanwhile
    return rows


def nearest_speed(
    speeds: Sequence[dict[str, Any]], kind: str, precision: str, devices: int
) -> dict[str, Any] | None:
    """The speed to plan with: of this card, else of its generation, and of nearly so many devices.

    Args:
        speeds: see `read_speeds`.
        kind: see `device_kind`.
        precision: see `precision_name`.
        devices: their number.
    """
    generation = []
    if kind in DEVICES:
        capability = DEVICES[kind].capability
        generation = [name for name, device in DEVICES.items() if device.capability == capability]
    rows = [row for row in speeds if row["precision"] in (None, precision)]
    for kinds in ([kind], generation):
        if matches := [row for row in rows if row["device"] in kinds]:
            return min(matches, key=lambda row: abs(row["count"] - devices))
    return None


def speed_origin(row: Mapping[str, Any], kind: str, batch: BatchPlan) -> dict[str, Any]:
    """The source of a recorded speed, and the assumptions if the run differs from that training.

    Args:
        row: one of `read_speeds`.
        kind, batch: the device and the batch of the run.
    """
    tokens = row.get("batch_tokens")
    source = f"recorded in {row['file']} on {row['count']} {row['device']}"
    if tokens:
        source += f", in batches of {tokens:,} tokens"
    assumptions = []
    if row["device"] != kind:
        assumptions.append(
            f"each {kind} is as fast as the {row['device']}, which is of the same generation"
        )
    if tokens and batch.max_tokens < tokens:
        assumptions.append(
            "a smaller batch (train.max_tokens) takes at most the time of the recorded one"
        )
    if batch.devices != row["count"]:
        assumptions.append("each of several devices is as fast as the recorded one")
    return {"speed_origin": source, "speed_assumptions": assumptions}


def recorded_seconds(
    row: Mapping[str, Any], batch: BatchPlan, updates: int, tokens: float
) -> list[float]:
    """The shortest and the longest time of a training whose speed is recorded, in seconds.

    Args:
        row: one of `read_speeds`.
        batch, updates, tokens: of the run; its target tokens.
    """
    speed = row["tokens_per_second"] / row["count"]
    shortest = longest = tokens / (speed * batch.devices)
    largest = row.get("batch_tokens") or 0
    if batch.max_tokens < largest:  # a pass may take as long as that of the recorded batch
        longest = max(longest, updates * batch.update_freq * largest / speed)
    return [shortest, longest]
