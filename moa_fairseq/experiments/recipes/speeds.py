"""Training speeds to plan with: recorded ones, read from a results folder, and a rough range without any."""

import dataclasses
import itertools
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.batch import BatchPlan
from moa_fairseq.experiments.recipes.hardware import DEVICES, device_kind
from moa_fairseq.experiments.recipes.workload import Workload
from moa_fairseq.experiments.records.json_files import read_json

_PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "amp": "amp"}
log = logging.getLogger(__name__)
OPERATIONS_PER_MAC = 6  # a MAC is two operations, and the backward pass costs two forward passes
# Measured fractions of the peak speed: MoA base and a dense Transformer big in
# results/benchmarks/training-cuda.json, both on an H200 and bound by the host. fairseq's own log of a dense
# Transformer big on 128 V100 (facebookresearch/fairseq#233, #361) lies between: 1.65 million target tokens a
# second of 221 million MACs each are 13.7 %.
UTILISATION = (0.044, 0.193)
# Shortest host time for a layer's part of a batch: a dense Transformer base and MoA big, ibidem.
HOST_SECONDS = (0.0039, 0.0077)


@dataclasses.dataclass(frozen=True)
class RecordedSpeed:
    """A measured speed of a training.

    Args:
        experiment: the name of the recipe; for a benchmark that of a recipe or an architecture.
        tokens_per_second: target tokens, of all devices together.
        device: see `device_kind`, or "CPU".
        count: the number of devices.
        precision: see `precision_name`; None in older records, which fit any precision.
        file: the folder and name of the record, such as "throughput/a.json".
        parameters: the number of the model's parameters; None in older records of runs.
        batch_tokens: tokens of each batch of a benchmark; None for a run.
        digits: significant digits of the hours in a plan.
    """

    experiment: str
    tokens_per_second: float
    device: str
    count: int
    precision: str | None
    file: str
    parameters: int | None = None
    batch_tokens: int | None = None
    digits: ClassVar[int] = 3

    def origin(self) -> str:
        """The source of this speed, for the plan."""
        source = f"recorded in {self.file} on {self.count} {self.device}"
        if self.batch_tokens:
            source += f", in batches of {self.batch_tokens:,} tokens"
        return source

    def assumptions(self, kind: str, batch: BatchPlan) -> list[str]:
        """What a plan assumes if the run differs from the recorded training.

        Args:
            kind: the device of the run, see `device_kind`.
            batch: the batch of the run.
        """
        assumptions = []
        if self.device != kind:
            assumptions.append(
                f"each {kind} is as fast as the {self.device}, which is of the same generation"
            )
        if batch.max_tokens < (self.batch_tokens or 0):
            assumptions.append(
                "a smaller batch (train.max_tokens) takes at most the time of the recorded one"
            )
        if batch.devices != self.count:
            assumptions.append("each of several devices is as fast as the recorded one")
        return assumptions

    def seconds(self, batch: BatchPlan, updates: int, tokens: float) -> list[float]:
        """The shortest and the longest time of a run, in seconds.

        Args:
            batch: the batch of the run.
            updates: the number of its updates.
            tokens: the number of its target tokens.
        """
        speed = self.tokens_per_second / self.count
        shortest = longest = tokens / (speed * batch.devices)
        largest = self.batch_tokens or 0
        if batch.max_tokens < largest:  # a pass may take as long as that of the recorded batch
            longest = max(longest, updates * batch.update_freq * largest / speed)
        return [shortest, longest]


@dataclasses.dataclass(frozen=True)
class RoughSpeed:
    """A range of speeds for a training without a record, see UTILISATION and HOST_SECONDS.

    Args:
        work: the training.
        peak: operations per second of a device.
        digits: significant digits of the hours in a plan.
    """

    work: Workload
    peak: float
    digits: ClassVar[int] = 2

    def origin(self) -> str:
        """The source of this speed, for the plan."""
        shares = " to ".join(f"{share:.1%}" for share in UTILISATION)
        return f"rough: {shares} of the peak, and the host's time"

    def assumptions(self, kind: str, batch: BatchPlan) -> list[str]:
        """None, since a range assumes nothing about a recorded training."""
        return []

    def seconds(self, batch: BatchPlan, updates: int, tokens: float) -> list[float]:
        """The shortest and the longest time of a run, see `RecordedSpeed.seconds`."""
        macs = self.work.macs_per_target_token * tokens
        operations = OPERATIONS_PER_MAC * macs / (self.peak * batch.devices)
        host = updates * batch.update_freq * _layers(self.work.model)
        shortest = max(operations / UTILISATION[1], host * HOST_SECONDS[0])
        longest = max(operations / UTILISATION[0], host * HOST_SECONDS[1])
        return [shortest, longest]


def _layers(model: nn.Module) -> int:
    """The number of layers of a model."""
    layers = 0
    for name, part in model.named_modules():
        if name.endswith("layers") and isinstance(part, nn.ModuleList):
            layers += len(part)
    return layers


def read_speeds(results: Path) -> list[RecordedSpeed]:
    """The recorded speeds in a results folder. Files without a speed, and damaged ones, are skipped.

    Args:
        results: the folder, with measured/, throughput/ and benchmarks/.
    """
    speeds: list[RecordedSpeed] = []
    patterns = ("measured/*.json", "throughput/*.json", "benchmarks/training*.json")
    for path in sorted(itertools.chain.from_iterable(map(results.glob, patterns))):
        parse = _speed_of_run
        if path.parent.name == "benchmarks":
            parse = _speeds_of_benchmark
        try:
            speeds += parse(read_json(path, ""), f"{path.parent.name}/{path.name}")
        except UserError as error:  # damaged
            log.warning("%s", error)
        except FileNotFoundError:
            log.debug("%s was removed meanwhile", path)
        except (ValueError, TypeError, KeyError, AttributeError):  # a strange file lacks any part
            log.debug("%s is not a record of a speed", path)
    return speeds


def _speed_of_run(record: Any, file: str) -> list[RecordedSpeed]:
    """The speed in a record of `moa-fairseq recipe --record`; [] if the run was too short for one."""
    device, count = _devices(record["hardware"])
    speed = float(record["tokens_per_second"])
    if not (speed > 0 and record.get("experiment")):
        return []
    return [
        RecordedSpeed(
            experiment=str(record["experiment"]),
            tokens_per_second=speed,
            device=device,
            count=count,
            precision=record.get("precision"),
            file=file,
            parameters=record.get("parameters"),
        )
    ]


def _speeds_of_benchmark(record: Any, file: str) -> list[RecordedSpeed]:
    """The speeds in a record of `benchmarks/training.py`, which has a row per recipe or architecture."""
    device, count = _devices(record["hardware"])
    speeds = []
    for name, row in record["rows"].items():
        speed = float(row["tokens_per_second"])
        if row["parameters"] > 0 and speed > 0 and name:
            speeds.append(
                RecordedSpeed(
                    experiment=name,
                    tokens_per_second=speed,
                    device=device,
                    count=count,
                    precision=_PRECISIONS[record["dtype"]],
                    file=file,
                    parameters=row["parameters"],
                    batch_tokens=record["batch"] * record["length"],
                )
            )
    return speeds


def _devices(hardware: Any) -> tuple[str, int]:
    """ "2 x NVIDIA A100 80GB PCIe" → ("A100", 2); anything else → ("CPU", 1)."""
    match = re.fullmatch(r"(\d+) x (.+)", str(hardware))
    if match:
        return device_kind(match[2]), int(match[1])
    return "CPU", 1


def nearest_speed(
    speeds: Sequence[RecordedSpeed], kind: str, precision: str, devices: int
) -> RecordedSpeed | None:
    """The speed to plan with: on the same card, else on one of its generation; of these the nearest count.

    Args:
        speeds: the recorded speeds of the experiment.
        kind: the device of the run, see `device_kind`.
        precision: see `precision_name`.
        devices: the number of devices of the run.
    """
    generation = []
    if kind in DEVICES:
        capability = DEVICES[kind].capability
        generation = [name for name, device in DEVICES.items() if device.capability == capability]
    candidates = [speed for speed in speeds if speed.precision in (None, precision)]
    for kinds in ([kind], generation):
        if matches := [speed for speed in candidates if speed.device in kinds]:
            return min(matches, key=lambda speed: abs(speed.count - devices))
    return None
