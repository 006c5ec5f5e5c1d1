"""The cost of a recipe before it starts: parameters, MACs, updates, memory and hours.

Hours come from a measured speed, if there is a record of this model on this card or on a card of its
generation, otherwise they are a range. Memory is that before the first batch, and that added by a batch of
train.max_tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.models import ARCH_MODEL_REGISTRY
from torch import nn

from moa_fairseq import process
from moa_fairseq.experiments.data.binarised import is_binarised
from moa_fairseq.experiments.recipes.batch import (
    BatchPlan,
    CorpusSize,
    fit,
    plan_batch,
    planned_updates,
    training_set,
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
    nearest_speed,
    read_speeds,
    recorded_seconds,
    speed_origin,
)
from moa_fairseq.experiments.scoring.complexity import Cost, count
from moa_fairseq.experiments.scoring.meta_model import build_meta_model
from moa_fairseq.experiments.tables import Column, Table

CUDA_BYTES = 1_000_000_000  # context and libraries, assumed
OPERATIONS_PER_MAC = 6  # a MAC is two operations, and the backward pass costs two forward passes
# Measured fractions of the peak speed: MoA base and a dense Transformer big in
# results/benchmarks/training-cuda.json, both on an H200 and bound by the host. fairseq's own log of a dense
# Transformer big on 128 V100 (facebookresearch/fairseq#233, #361) lies between: 1.65 million target tokens a
# second of 221 million MACs each are 13.7 %.
UTILISATION = (0.044, 0.193)
# Shortest host time for a layer's part of a batch: a dense Transformer base and MoA big, ibidem.
HOST_SECONDS = (0.0039, 0.0077)
# Bytes that a batch in half precision holds for a token, fitted to the four peaks there: for a MAC of the
# attention and of the feed-forward, divided by the model's width, and for a symbol of the vocabulary.
BATCH_BYTES = {"attention": 1.94, "feed_forward": 2.46, "output": 12.7}
MASKED = 0.15  # fraction of a masked language model's tokens that have outputs
USABLE = 0.9  # fraction of a device's memory: the rest is lost between blocks
FALLBACK_VOCABULARY = 32000  # if table, data and recipe do not give the number of symbols


class Workload(NamedTuple):
    """The part of the plan that does not depend on the hardware.

    Args:
        model: on the meta device, without weights.
        cost: of a sentence pair of mean length.
        vocabulary: symbols of the dictionary.
        lengths: the mean length of source and target sentences, in tokens.
        size: of the training set, or None if unknown.
    """

    model: Any
    cost: Cost
    vocabulary: int
    lengths: list[int]
    size: CorpusSize | None

    @property
    def macs_per_target_token(self) -> float:
        """Of a forward pass over a sentence pair."""
        return self.cost.total_macs / self.lengths[1]

    def batch_bytes(self, precision: str, masked: bool) -> float:
        """Approximate memory of a batch, in bytes per token of max_tokens.

        Args:
            precision: see `precision_name`.
            masked: for a masked language model, which has outputs for some tokens only.
        """
        macs = {"attention": 0.0}
        for part, number in self.cost.macs.items():
            if part.endswith("attention"):
                macs["attention"] += number
        macs["feed_forward"] = self.cost.macs["feed_forward"]
        macs["output"] = self.cost.macs["output"] * (MASKED if masked else 1)
        per_token = sum(BATCH_BYTES[part] * number for part, number in macs.items())
        width = next(m.embedding_dim for m in self.model.modules() if isinstance(m, nn.Embedding))
        per_symbol = per_token / width / max(self.lengths)
        return per_symbol * (2 if precision == "fp32" else 1)


def workload(recipe: Recipe, data: Path | None) -> Workload:
    """Build the model without weights and count it.

    Args:
        recipe: with its model.
        data: a folder made by fairseq-preprocess, or None.

    Raises:
        UserError: for a model that fairseq does not build, and data that cannot be read.
    """
    size = training_set(recipe, data)
    vocabulary = recipe.data.bpe or FALLBACK_VOCABULARY
    if size:
        vocabulary = size.vocabulary
    line = process.flags(recipe.model.as_flags() | {"arch": None})
    model = build_meta_model(recipe.model.arch, vocabulary, "separate", line)
    sample = recipe.training_flags.get("tokens-per-sample")
    lengths = [int(sample or 512)] * 2
    if not sample and size and size.sentences:
        source = max(1, round(size.source_tokens / size.sentences))
        lengths = [source, max(1, round(size.target_tokens / size.sentences))]
    return Workload(model, count(model, *lengths), vocabulary, lengths, size)


def plan(
    recipe: Recipe, data: Path | None, machines: list[Hardware], results: Path
) -> dict[str, Any]:
    """The plan as plain data.

    Args:
        recipe: the training to plan.
        data: a folder, binarised or not yet.
        machines: the hardware to plan for.
        results: the folder of recorded speeds.

    Returns:
        The part that does not depend on the hardware, including MACs, and "hardware": for each machine its
        batch, updates, hours (two ends of a range, or None), and memory, batch_memory and disk in bytes.
    """
    data = data if data and is_binarised(data) else None
    work = workload(recipe, data)
    speeds = [row for row in read_speeds(results) if _is_of(row, recipe, work)]
    return {
        "experiment": recipe.experiment,
        "parameters": work.cost.total_parameters,
        "mean_lengths": work.lengths,
        "not_counted": work.cost.not_counted,
        "macs_per_target_token": round(work.macs_per_target_token),
        "corpus": dataclasses.asdict(work.size) if work.size else None,
        "hardware": [_plan_for(recipe, machine, data, work, speeds) for machine in machines],
    }


def _plan_for(
    recipe: Recipe, machine: Hardware, data: Path | None, work: Workload, speeds: list[Any]
) -> dict[str, Any]:
    """The entry of one machine in "hardware" of `plan`."""
    requested = machine.devices
    recipe, machine, left_out = fit(recipe, machine, data)
    batch = plan_batch(recipe.train, machine.devices)
    updates = planned_updates(recipe.train, batch, work.size)
    per_epoch = work.size.updates_per_epoch(batch) if work.size else None
    epochs = updates // per_epoch if updates and per_epoch else None
    kind = device_kind(machine.name) if machine.gpus else "CPU"
    device = DEVICES.get(kind)
    precision = precision_name(recipe.train.precision, machine, recipe.model)
    entry: dict[str, Any] = {
        "device": kind,
        "count": requested,
        "precision": precision,
        "left_out": left_out,
    }
    entry["batch"] = dataclasses.asdict(batch)
    entry["tokens_per_update"] = batch.effective
    entry.update(_memory(recipe, machine, work, precision, batch, device))
    entry["disk"] = disk(recipe, work.model, machine.gpus > 0, updates, epochs)
    record = nearest_speed(speeds, kind, precision, batch.devices)
    if record:
        entry.update(speed_origin(record, kind, batch))
    elif device:
        shares = " to ".join(f"{share:.1%}" for share in UTILISATION)
        entry["speed_origin"] = f"rough: {shares} of the peak, and the host's time"
    if work.size and updates and per_epoch:
        tokens = updates / per_epoch * work.size.target_tokens
        entry.update(updates_per_epoch=per_epoch, updates=updates, target_tokens=round(tokens))
        seconds: list[float] = []
        if record:
            seconds = recorded_seconds(record, batch, updates, tokens)
        elif device:
            peak = device.peak_single if precision == "fp32" else device.peak_half
            seconds = _estimated_seconds(work, batch, updates, tokens, peak)
        digits = 3 if record else 2
        entry["hours"] = [float(f"{each / 3600:.{digits}g}") for each in seconds] or None
    return entry


def _memory(
    recipe: Recipe,
    machine: Hardware,
    work: Workload,
    precision: str,
    batch: BatchPlan,
    device: Device | None,
) -> dict[str, Any]:
    """Bytes per device before the first batch and of a batch, whether they fit, and the largest batch."""
    at_rest = work.cost.total_parameters * parameter_bytes(
        recipe.training_flags, precision, machine.devices
    )
    at_rest += CUDA_BYTES if machine.gpus else 0
    per_token = work.batch_bytes(precision, recipe.kind == MASKED_LM)
    of_batch = round(per_token * batch.max_tokens)
    memory = {"memory": at_rest, "batch_memory": of_batch, "fits": None, "most_tokens": None}
    if device:
        usable = USABLE * device.memory
        memory.update(
            fits=at_rest + of_batch <= usable,
            most_tokens=max(0, int((usable - at_rest) / per_token)),
        )
    return memory


def _estimated_seconds(
    work: Workload, batch: BatchPlan, updates: int, tokens: float, peak: float
) -> list[float]:
    """The shortest and the longest time, in seconds.

    Args:
        work, batch, updates, tokens: of the training.
        peak: operations per second of a device.
    """
    operations = OPERATIONS_PER_MAC * work.macs_per_target_token * tokens / (peak * batch.devices)
    host = updates * batch.update_freq * _layers(work.model)
    shortest = max(operations / UTILISATION[1], host * HOST_SECONDS[0])
    longest = max(operations / UTILISATION[0], host * HOST_SECONDS[1])
    return [shortest, longest]


def _layers(model: nn.Module) -> int:
    layers = 0
    for name, part in model.named_modules():
        if name.endswith("layers") and isinstance(part, nn.ModuleList):
            layers += len(part)
    return layers


def _is_of(row: Mapping[str, Any], recipe: Recipe, work: Workload) -> bool:
    """Whether a recorded speed is of this experiment, or of an architecture of the same sizes."""
    if row["experiment"] == recipe.experiment:
        return True
    if "batch_tokens" not in row or row["experiment"] not in ARCH_MODEL_REGISTRY:
        return False
    if not 0.5 < row["parameters"] / work.cost.total_parameters < 2:  # for any vocabularies
        return False
    return _sizes(work.cost) == _sizes_of(row["experiment"], work.vocabulary, tuple(work.lengths))


@cache
def _sizes_of(arch: str, vocabulary: int, lengths: tuple[int, int]) -> dict[str, Any]:
    return _sizes(count(build_meta_model(arch, vocabulary), *lengths))


def _sizes(cost: Cost) -> dict[str, Any]:
    """Parameters and MACs, without the parameters of embeddings, which may be shared or not."""
    parameters = dict(cost.parameters)
    for part in ("embedding", "output"):
        parameters.pop(part, None)
    return {"parameters": parameters, "macs": cost.macs}


def as_text(report: dict[str, Any]) -> str:
    """The plan as a table for people.

    Args:
        report: see `plan`.
    """
    source, target = report["mean_lengths"]
    corpus = report["corpus"]
    entries = report["hardware"]
    size = "of unknown size: give --data a folder made by fairseq-preprocess for updates and hours"
    if corpus:
        tokens = f"{corpus['source_tokens']:,} source and {corpus['target_tokens']:,} target tokens"
        size = f"{corpus['name']}: {tokens}, {corpus['vocabulary']:,} symbols; {corpus['origin']}"
    macs = f"{report['macs_per_target_token']:,} per target token, forward ({source} source, {target} target)"
    missing = ""
    if report["not_counted"]:
        missing = f"; not those of {', '.join(report['not_counted'])}"
    unknown = "speed unknown: --stage train --record measures it"
    table = list(map(_row, entries))
    origins: dict[str, None] = {}
    assumptions: dict[str, None] = {}
    left_out: dict[str, list[str]] = {}
    advice = []
    for row, entry in zip(table, entries):
        origins[entry.get("speed_origin", unknown)] = None
        for note in entry.get("speed_assumptions", []):
            assumptions[f"assumed: {note}"] = None
        if entry["left_out"]:
            left_out.setdefault(entry["left_out"], []).append(row["devices"])
        if entry["fits"] is False:
            advice = ["! does not fit: lower train.max_tokens."]
    columns = [Column(key, key, ">" * (key != "devices")) for key in table[0]]
    return "\n".join(
        [
            f"parameters    {report['parameters']:,}",
            f"MACs          {macs}{missing}",
            f"training set  {size}",
            Table(columns, table).text(),
            *origins,
            *assumptions,
            *(f"{', '.join(devices)}: {reason}" for reason, devices in left_out.items()),
            "GB: on each device, at rest, and what a batch of train.max_tokens adds, about.",
            "fits: about the largest train.max_tokens that does.",
            *advice,
            f"A checkpoint has {_gigabytes(entries[0]['disk']['checkpoint'])} GB.",
        ]
    )


def _row(entry: dict[str, Any]) -> dict[str, str]:
    """The line of the table of one machine."""
    most = "?"
    if entry["most_tokens"] is not None:
        most = f"{_two_digits(entry['most_tokens']):,}"
    hours = dict.fromkeys(entry.get("hours") or [])
    return {
        "devices": f"{entry['count']}×{entry['device']}",
        "precision": entry["precision"],
        "tokens/update": f"{entry['tokens_per_update']:,}",
        "updates": f"{entry['updates']:,}" if "updates" in entry else "?",
        "GB at rest": _gigabytes(entry["memory"]),
        "batch": f"{_gigabytes(entry['batch_memory'])}{'!' if entry['fits'] is False else ''}",
        "fits": most,
        "disk, GB": _gigabytes(entry["disk"]["total"]),
        "hours": " to ".join(f"{each:,g}" for each in hours) or "?",
    }


def _two_digits(number: int) -> int:
    """Rounded down."""
    step = 10 ** max(0, len(str(number)) - 2)
    return number // step * step


def _gigabytes(size: int | None) -> str:
    if size is None:
        return "?"
    if size < 1e9:
        return f"{size / 1e9:.2g}"
    return f"{size / 1e9:.1f}"
