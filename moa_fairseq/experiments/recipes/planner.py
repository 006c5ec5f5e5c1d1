"""The cost of a recipe before it starts: parameters, MACs, updates, memory and hours.

Hours come from a measured speed if there is a record of this model on this card or on a card of its
generation; otherwise they are a rough range. Memory has two parts: what training keeps before the first
batch, and what a batch of train.max_tokens adds.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.models import ARCH_MODEL_REGISTRY

from moa_fairseq.experiments.data.binarised import is_binarised
from moa_fairseq.experiments.recipes.batch import (
    BatchPlan,
    CorpusSize,
    fit,
    plan_batch,
    planned_updates,
)
from moa_fairseq.experiments.recipes.hardware import (
    DEVICES,
    Device,
    Hardware,
    device_kind,
    precision_name,
)
from moa_fairseq.experiments.recipes.memory import disk, parameter_bytes
from moa_fairseq.experiments.recipes.schema import MASKED_LM, Recipe
from moa_fairseq.experiments.recipes.speeds import (
    RecordedSpeed,
    RoughSpeed,
    nearest_speed,
    read_speeds,
)
from moa_fairseq.experiments.recipes.workload import Workload, workload
from moa_fairseq.experiments.scoring.complexity import Cost, count
from moa_fairseq.experiments.scoring.meta_model import build_meta_model
from moa_fairseq.experiments.tables import Column, Table

CUDA_BYTES = 1_000_000_000  # assumed size of CUDA's context and libraries
USABLE = 0.9  # fraction of a device's memory: the rest is lost between blocks


class Memory(NamedTuple):
    """Memory of one device.

    Args:
        at_rest: bytes before the first batch.
        batch: bytes that a batch of train.max_tokens adds, about.
        fits: whether the device has both; None if its memory is unknown.
        most_tokens: about the largest train.max_tokens that fits; None likewise.
    """

    at_rest: int
    batch: int
    fits: bool | None = None
    most_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class MachinePlan:
    """The part of the plan that depends on the hardware. What is unknown is None.

    Args:
        device: the kind of GPU, see `device_kind`, or "CPU".
        count: the number of devices that were requested.
        precision: see `precision_name`.
        left_out: why some devices are left out, or "".
        batch: how an update is spread over the devices.
        tokens_per_update: the number of tokens per update, including padding.
        memory, batch_memory, fits, most_tokens: the memory of each device, see `Memory`.
        disk: the disk space of the checkpoints, see `disk`.
        speed_origin: the source of the speed.
        speed_assumptions: what is assumed because the run differs from the recorded training.
        updates_per_epoch, updates, target_tokens: their numbers, the last two for the whole training.
        hours: the duration of the training: the two ends of a range, equal for most recorded speeds.
    """

    device: str
    count: int
    precision: str
    left_out: str
    batch: BatchPlan
    tokens_per_update: int
    memory: int
    batch_memory: int
    fits: bool | None
    most_tokens: int | None
    disk: dict[str, int | None]
    speed_origin: str | None = None
    speed_assumptions: list[str] = dataclasses.field(default_factory=list)
    updates_per_epoch: int | None = None
    updates: int | None = None
    target_tokens: int | None = None
    hours: list[float] | None = None

    @property
    def devices(self) -> str:
        """Such as "8×A100"."""
        return f"{self.count}×{self.device}"

    def row(self) -> dict[str, str]:
        """The machine's row of the table: heading → cell."""
        most = "?"
        if self.most_tokens is not None:
            most = f"{_two_digits(self.most_tokens):,}"
        hours = dict.fromkeys(self.hours or [])
        return {
            "devices": self.devices,
            "precision": self.precision,
            "tokens/update": f"{self.tokens_per_update:,}",
            "updates": "?" if self.updates is None else f"{self.updates:,}",
            "GB at rest": _gigabytes(self.memory),
            "batch": f"{_gigabytes(self.batch_memory)}{'!' if self.fits is False else ''}",
            "fits": most,
            "disk, GB": _gigabytes(self.disk["total"]),
            "hours": " to ".join(f"{each:,g}" for each in hours) or "?",
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a training.

    Args:
        experiment: the recipe's name.
        parameters: the number of the model's parameters.
        mean_lengths: see `Workload.lengths`.
        not_counted: types of modules whose MACs are unknown.
        macs_per_target_token: see `Workload.macs_per_target_token`.
        corpus: the size of the training set, or None if it is unknown.
        hardware: one plan per machine.
    """

    experiment: str
    parameters: int
    mean_lengths: list[int]
    not_counted: list[str]
    macs_per_target_token: int
    corpus: CorpusSize | None
    hardware: list[MachinePlan]

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """The plan as a table for people."""
        size = (
            "of unknown size: give --data a folder made by fairseq-preprocess for updates and hours"
        )
        if corpus := self.corpus:
            tokens = f"{corpus.source_tokens:,} source and {corpus.target_tokens:,} target tokens"
            size = f"{corpus.name}: {tokens}, {corpus.vocabulary:,} symbols; {corpus.origin}"
        source, target = self.mean_lengths
        sentences = f"({source} source, {target} target)"
        macs = f"{self.macs_per_target_token:,} per target token, forward {sentences}"
        if self.not_counted:
            macs += f"; not those of {', '.join(self.not_counted)}"
        checkpoint = _gigabytes(self.hardware[0].disk["checkpoint"])
        return "\n".join(
            [
                f"parameters    {self.parameters:,}",
                f"MACs          {macs}",
                f"training set  {size}",
                self._table(),
                *self._notes(),
                f"A checkpoint has {checkpoint} GB.",
            ]
        )

    def _table(self) -> str:
        rows = [machine.row() for machine in self.hardware]
        first, *others = rows[0]
        columns = [Column(first, first), *(Column(head, head, ">") for head in others)]
        return Table(columns, rows).text()

    def _notes(self) -> list[str]:
        """The lines below the table; a line that concerns several machines stands once."""
        unknown = "speed unknown: --stage train --record measures it"
        origins: dict[str, None] = {}
        assumptions: dict[str, None] = {}
        left_out: dict[str, list[str]] = {}
        advice = []
        for machine in self.hardware:
            origins[machine.speed_origin or unknown] = None
            for assumption in machine.speed_assumptions:
                assumptions[f"assumed: {assumption}"] = None
            if machine.left_out:
                left_out.setdefault(machine.left_out, []).append(machine.devices)
            if machine.fits is False:
                advice = ["! does not fit: lower train.max_tokens."]
        return [
            *origins,
            *assumptions,
            *(f"{', '.join(devices)}: {reason}" for reason, devices in left_out.items()),
            "GB: on each device, at rest, and what a batch of train.max_tokens adds, about.",
            "fits: about the largest train.max_tokens that does.",
            *advice,
        ]


def plan(recipe: Recipe, data: Path | None, machines: list[Hardware], results: Path) -> Plan:
    """Plan a training on each of several machines.

    Args:
        recipe: the training.
        data: a folder, binarised or not yet.
        machines: the machines.
        results: the folder of recorded speeds.

    Raises:
        UserError: see `workload`.
    """
    data = data if data and is_binarised(data) else None
    work = workload(recipe, data)
    speeds = [speed for speed in read_speeds(results) if _is_of(speed, recipe, work)]
    return Plan(
        experiment=recipe.experiment,
        parameters=work.cost.total_parameters,
        mean_lengths=work.lengths,
        not_counted=work.cost.not_counted,
        macs_per_target_token=round(work.macs_per_target_token),
        corpus=work.size,
        hardware=[_plan_for(recipe, machine, data, work, speeds) for machine in machines],
    )


def _plan_for(
    recipe: Recipe,
    machine: Hardware,
    data: Path | None,
    work: Workload,
    speeds: list[RecordedSpeed],
) -> MachinePlan:
    requested = machine.devices
    recipe, machine, left_out = fit(recipe, machine, data)
    batch = plan_batch(recipe.train, machine.devices)
    kind = device_kind(machine.name) if machine.gpus else "CPU"
    precision = precision_name(recipe.train.precision, machine, recipe.model)
    device = DEVICES.get(kind)
    memory = _memory(recipe, machine, work, precision, batch, device)
    updates = planned_updates(recipe.train, batch, work.size)
    per_epoch = work.size.updates_per_epoch(batch) if work.size else None
    epochs = updates // per_epoch if updates and per_epoch else None
    tokens = None
    if work.size and updates and per_epoch:
        tokens = updates / per_epoch * work.size.target_tokens
    speed: RecordedSpeed | RoughSpeed | None = nearest_speed(speeds, kind, precision, batch.devices)
    if device and not speed:
        speed = RoughSpeed(work, device.peak_single if precision == "fp32" else device.peak_half)
    hours = None
    if speed and updates and tokens:
        hours = []
        for seconds in speed.seconds(batch, updates, tokens):
            hours.append(float(f"{seconds / 3600:.{speed.digits}g}"))
    return MachinePlan(
        device=kind,
        count=requested,
        precision=precision,
        left_out=left_out,
        batch=batch,
        tokens_per_update=batch.effective,
        memory=memory.at_rest,
        batch_memory=memory.batch,
        fits=memory.fits,
        most_tokens=memory.most_tokens,
        disk=disk(recipe, work.model, machine.gpus > 0, updates, epochs),
        speed_origin=speed.origin() if speed else None,
        speed_assumptions=speed.assumptions(kind, batch) if speed else [],
        updates_per_epoch=per_epoch,
        updates=updates if tokens else None,
        target_tokens=round(tokens) if tokens else None,
        hours=hours,
    )


def _memory(
    recipe: Recipe,
    machine: Hardware,
    work: Workload,
    precision: str,
    batch: BatchPlan,
    device: Device | None,
) -> Memory:
    bytes_each = parameter_bytes(recipe.training_flags, precision, machine.devices)
    at_rest = work.cost.total_parameters * bytes_each
    if machine.gpus:
        at_rest += CUDA_BYTES
    per_token = work.batch_bytes(precision, recipe.kind == MASKED_LM)
    of_batch = round(per_token * batch.max_tokens)
    if not device:
        return Memory(at_rest, of_batch)
    usable = USABLE * device.memory
    most_tokens = max(0, int((usable - at_rest) / per_token))
    return Memory(at_rest, of_batch, at_rest + of_batch <= usable, most_tokens)


def _is_of(speed: RecordedSpeed, recipe: Recipe, work: Workload) -> bool:
    """Whether a recorded speed is of this experiment, or of an architecture of the same sizes."""
    if speed.experiment == recipe.experiment:
        return True
    is_of_architecture = speed.batch_tokens is not None and speed.experiment in ARCH_MODEL_REGISTRY
    if not (is_of_architecture and speed.parameters):
        return False
    # A quick test, because the exact one below builds a model: another vocabulary changes the number less
    if not 0.5 < speed.parameters / work.cost.total_parameters < 2:
        return False
    return _sizes(work.cost) == _sizes_of(speed.experiment, work.vocabulary, tuple(work.lengths))


@cache
def _sizes_of(arch: str, vocabulary: int, lengths: tuple[int, int]) -> dict[str, Any]:
    return _sizes(count(build_meta_model(arch, vocabulary), *lengths))


def _sizes(cost: Cost) -> dict[str, Any]:
    """Parameters and MACs, without the parameters of embeddings, which two models may share or not."""
    parameters = dict(cost.parameters)
    for part in ("embedding", "output"):
        parameters.pop(part, None)
    return {"parameters": parameters, "macs": cost.macs}


def _two_digits(number: int) -> int:
    """A number rounded down to two significant digits."""
    step = 10 ** max(0, len(str(number)) - 2)
    return number // step * step


def _gigabytes(size: int | None) -> str:
    if size is None:
        return "?"
    if size < 1e9:
        return f"{size / 1e9:.2g}"
    return f"{size / 1e9:.1f}"
