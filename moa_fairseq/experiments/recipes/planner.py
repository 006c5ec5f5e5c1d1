"""The cost of a recipe before it starts: parameters, MACs, updates, memory and hours.

Hours come from a measured speed if there is a record of this model on this card or on a card of its
generation; otherwise they are a rough range. Memory has two parts: what training keeps before the first
batch, and what a batch of train.max_tokens adds.
"""

import dataclasses
from functools import cache
from pathlib import Path

from fairseq.models import ARCH_MODEL_REGISTRY

from moa_fairseq.experiments.data.binarised import is_binarised
from moa_fairseq.experiments.recipes.batch import (
    BatchPlan,
    CorpusSize,
    fit_devices,
    plan_batch,
    planned_updates,
)
from moa_fairseq.experiments.recipes.hardware import (
    DEVICES,
    Hardware,
    device_kind,
)
from moa_fairseq.experiments.recipes.memory import disk, parameter_bytes
from moa_fairseq.experiments.recipes.precision import precision_name
from moa_fairseq.experiments.recipes.schema import MASKED_LM, Recipe
from moa_fairseq.experiments.recipes.speeds import (
    RecordedSpeed,
    RoughSpeed,
    nearest_speed,
    read_speeds,
)
from moa_fairseq.experiments.recipes.workload import Workload, workload
from moa_fairseq.experiments.records.json_files import Values
from moa_fairseq.experiments.scoring.complexity import Cost, count
from moa_fairseq.experiments.scoring.meta_model import build_meta_model
from moa_fairseq.experiments.tables import Column, Table, terminal_width

CUDA_BYTES = 1_000_000_000  # assumed size of CUDA's context and libraries
USABLE = 0.9  # fraction of a device's memory: the rest is lost between blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachinePlan:
    """The part of the plan that depends on the hardware. What is unknown is None.

    Args:
        device: the kind of GPU, see `device_kind`, or "CPU".
        count: the number of devices that were requested.
        precision: see `precision_name`.
        left_out: why some devices are left out, or "".
        batch: how an update is spread over the devices.
        tokens_per_update: the number of tokens per update, including padding.
        memory: bytes on each device before the first batch.
        batch_memory: bytes that a batch of train.max_tokens adds, about.
        fits: whether a device has the memory for both.
        most_tokens: about the largest train.max_tokens that fits.
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
    speed_origin: str | None
    speed_assumptions: list[str]
    updates_per_epoch: int | None
    updates: int | None
    target_tokens: int | None
    hours: list[float] | None

    @property
    def devices(self) -> str:
        """Such as "8×A100"."""
        return f"{self.count}×{self.device}"

    def row(self) -> dict[str, str]:
        """The machine's row of the table: heading → cell."""
        shortest_and_longest = dict.fromkeys(self.hours or [])
        return {
            "devices": self.devices,
            "precision": self.precision,
            "tokens/update": f"{self.tokens_per_update:,}",
            "updates": _number(self.updates),
            "GB at rest": _gigabytes(self.memory),
            "batch": _gigabytes(self.batch_memory) + ("!" if self.fits is False else ""),
            "fits": _number(_two_digits(self.most_tokens)),
            "disk, GB": _gigabytes(self.disk["total"]),
            "hours": " to ".join(f"{hours:,g}" for hours in shortest_and_longest) or "?",
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

    def as_dict(self) -> Values:
        """The plan as plain data, for JSON."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """The plan as a table for people."""
        corpus = self.corpus
        training_set = (
            "of unknown size: give --data a folder made by fairseq-preprocess for updates and hours"
        )
        if corpus:
            tokens = f"{corpus.source_tokens:,} source and {corpus.target_tokens:,} target tokens"
            vocabulary = f"{corpus.vocabulary:,} symbols"
            training_set = f"{corpus.name}: {tokens}, {vocabulary}; {corpus.origin}"
        source, target = self.mean_lengths
        macs = f"{self.macs_per_target_token:,} per target token, forward ({source} source, {target} target)"
        if self.not_counted:
            macs += f"; not those of {', '.join(self.not_counted)}"
        checkpoint = _gigabytes(self.hardware[0].disk["checkpoint"])
        return "\n".join(
            [
                f"parameters    {self.parameters:,}",
                f"MACs          {macs}",
                f"training set  {training_set}",
                self._table(),
                *self._notes(),
                f"A checkpoint has {checkpoint} GB.",
            ]
        )

    def _table(self) -> str:
        """A row for each machine."""
        rows = [machine.row() for machine in self.hardware]
        first, *names = rows[0]
        columns = [Column(first, first), *(Column(head, head, ">") for head in names)]
        return Table(columns, rows).text(terminal_width())

    def _notes(self) -> list[str]:
        """The lines below the table; a line that concerns several machines stands once."""
        unknown = "speed unknown: --stage train --record measures it"
        origins = [machine.speed_origin or unknown for machine in self.hardware]
        assumptions = []
        left_out: dict[str, list[str]] = {}  # reason → machines
        for machine in self.hardware:
            assumptions += [f"assumed: {each}" for each in machine.speed_assumptions]
            if machine.left_out:
                left_out.setdefault(machine.left_out, []).append(machine.devices)
        notes = [*dict.fromkeys(origins + assumptions)]
        notes += [f"{', '.join(devices)}: {reason}" for reason, devices in left_out.items()]
        notes += [
            "GB: on each device, at rest, and what a batch of train.max_tokens adds, about.",
            "fits: about the largest train.max_tokens that does.",
        ]
        if any(machine.fits is False for machine in self.hardware):
            notes.append("! does not fit: lower train.max_tokens.")
        return notes


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
    speeds = [speed for speed in read_speeds(results) if _matches(speed, recipe, work)]
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
    """The plan of a training on one machine, by the recorded speeds of its model."""
    requested = machine.devices
    recipe, machine, left_out = fit_devices(recipe, machine, data)
    batch = plan_batch(recipe.train, machine.devices)
    kind = device_kind(machine.name) if machine.gpus else "CPU"
    precision = precision_name(recipe.train.precision, machine, recipe.model)
    speed: RecordedSpeed | RoughSpeed | None = nearest_speed(speeds, kind, precision, batch.devices)
    per_parameter = parameter_bytes(recipe.training_flags, precision, machine.devices)
    at_rest = work.cost.total_parameters * per_parameter + (CUDA_BYTES if machine.gpus else 0)
    per_token = work.batch_bytes(precision, recipe.kind == MASKED_LM)
    batch_memory = round(per_token * batch.max_tokens)
    fits = most_tokens = None
    if device := DEVICES.get(kind):
        usable = USABLE * device.memory
        fits = at_rest + batch_memory <= usable
        most_tokens = max(0, int((usable - at_rest) / per_token))
        peak = device.peak_single if precision == "fp32" else device.peak_half
        speed = speed or RoughSpeed(work, peak)
    updates = planned_updates(recipe.train, batch, work.size)
    per_epoch = epochs = tokens = hours = None
    if work.size:
        per_epoch = work.size.updates_per_epoch(batch)
        if updates and per_epoch:
            epochs = updates // per_epoch
            tokens = updates / per_epoch * work.size.target_tokens
    if speed and updates and tokens:
        seconds = speed.seconds(batch, updates, tokens)
        hours = [float(f"{end / 3600:.{speed.digits}g}") for end in seconds]
    return MachinePlan(
        device=kind,
        count=requested,
        precision=precision,
        left_out=left_out,
        batch=batch,
        tokens_per_update=batch.effective,
        memory=at_rest,
        batch_memory=batch_memory,
        fits=fits,
        most_tokens=most_tokens,
        disk=disk(recipe, work.model, machine.gpus > 0, updates, epochs),
        speed_origin=speed.origin() if speed else None,
        speed_assumptions=speed.assumptions(kind, batch) if speed else [],
        updates_per_epoch=per_epoch,
        updates=None if tokens is None else updates,
        target_tokens=None if tokens is None else round(tokens),
        hours=hours,
    )


def _matches(speed: RecordedSpeed, recipe: Recipe, work: Workload) -> bool:
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
def _sizes_of(arch: str, vocabulary: int, lengths: tuple[int, int]) -> Values:
    """The sizes of an architecture with a vocabulary."""
    return _sizes(count(build_meta_model(arch, vocabulary), *lengths))


def _sizes(cost: Cost) -> Values:
    """Parameters and MACs, without the parameters of embeddings, which two models may share or not."""
    parameters = dict(cost.parameters)
    for part in ("embedding", "output"):
        parameters.pop(part, None)
    return {"parameters": parameters, "macs": cost.macs}


def _number(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _two_digits(number: int | None) -> int | None:
    """A number rounded down to two significant digits."""
    if number is None:
        return None
    step = 10 ** max(0, len(str(number)) - 2)
    return number // step * step


def _gigabytes(size: int | None) -> str:
    if size is None:
        return "?"
    return f"{size / 1e9:.2g}" if size < 1e9 else f"{size / 1e9:.1f}"
