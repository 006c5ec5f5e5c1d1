"""The bill before the start: what a recipe costs in parameters, MACs, updates, memory and hours."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Optional

from moa_fairseq.evaluation.complexity import Cost, count
from moa_fairseq.recipes.batch import BatchPlan, fit_devices, plan_batch, planned_updates
from moa_fairseq.recipes.corpus_size import CorpusSize, known_size, measured_size
from moa_fairseq.recipes.hardware import CAPABILITIES, Hardware, assumed_hardware, precision_flags
from moa_fairseq.recipes.planner.memory import estimate_memory, layers_of
from moa_fairseq.recipes.planner.throughput import (
    DEVICES,
    Row,
    device_kind,
    expected_speed,
    seconds_per_update,
)
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.running import command_line

COUNTS = (1, 8, 32)
# An update of MAE-7 base without and with a G step, in updates of the dense base model (results/benchmarks,
# coordinate_descent): 1.20 on average with a G step in every fifth epoch; the paper says 1.2.
F_STEP, WITH_G_STEP = 1.04, 1.85
# Where neither the table nor data says how many symbols there are.
FALLBACK_VOCABULARY = 32000


@dataclasses.dataclass(frozen=True)
class Workload:
    """What does not depend on the hardware: the model, its cost on sentences of mean length, the corpus."""

    model: Any
    cost: Cost
    vocabulary: int
    source_length: int
    target_length: int
    size: Optional[CorpusSize]

    @property
    def macs_per_target_token(self) -> float:
        """Multiply-accumulates of a forward pass over a sentence pair, per target token."""
        return self.cost.total_macs / self.target_length


def workload(recipe: Recipe, data: Optional[Path]) -> Workload:
    """Build the model without weights and count it. data: a folder made by fairseq-preprocess, or None."""
    from moa_fairseq.evaluation.skeleton import build_skeleton

    max_tokens = plan_batch(recipe.train, 1).max_tokens
    size = measured_size(recipe, data, max_tokens) if data else known_size(recipe)
    vocabulary = size.vocabulary if size else FALLBACK_VOCABULARY
    apart = ("arch", "share-all-embeddings", "share-decoder-input-output-embed")  # said in other words
    flags = {name: value for name, value in recipe.model.as_flags().items() if name not in apart}
    model = build_skeleton(recipe.model.arch, vocabulary, _embeddings(recipe), command_line.flags(flags))
    source_length, target_length = _mean_lengths(recipe, size)
    return Workload(
        model, count(model, source_length, target_length), vocabulary, source_length, target_length, size
    )


def _embeddings(recipe: Recipe) -> str:
    if recipe.model.share_all_embeddings:
        return "shared"
    flags = recipe.training_flags
    return "decoder" if flags.get("share-decoder-input-output-embed") else "separate"


def _mean_lengths(recipe: Recipe, size: Optional[CorpusSize]) -> tuple:
    """Tokens of a source and a target sentence; of a language model's sample, its whole length."""
    sample = recipe.training_flags.get("tokens-per-sample")
    if sample or size is None or not size.sentences:
        length = int(sample or 512)
        return length, length
    return tuple(max(1, round(n / size.sentences)) for n in (size.source_tokens, size.target_tokens))


def plan(recipe: Recipe, work: Workload, machines: List[Hardware], rows: List[Row]) -> Dict[str, Any]:
    """The plan as plain data. machines: the hardware to plan for; rows: measured speeds."""
    size = work.size
    return {
        "experiment": recipe.experiment,
        "parameters": work.cost.total_parameters,
        "macs_per_target_token": round(work.macs_per_target_token),
        "mean_lengths": [work.source_length, work.target_length],
        "corpus": dataclasses.asdict(size) if size else None,
        "not_counted": work.cost.not_counted,
        "hardware": [_on(recipe, work, machine, rows) for machine in machines],
    }


def _on(recipe: Recipe, work: Workload, machine: Hardware, rows: List[Row]) -> Dict[str, Any]:
    asked, (machine, fewer) = machine.devices, fit_devices(recipe, machine)
    batch = plan_batch(recipe.train, machine.devices)
    kind = device_kind(machine.name) if machine.gpus else "CPU"
    precision = (precision_flags(recipe.train.precision, machine, recipe.model) or ["--fp32"])[0][2:]
    flags = recipe.training_flags
    memory = estimate_memory(work.model, work.vocabulary, batch.max_tokens, precision, machine.devices, flags)
    if not machine.gpus:
        memory = dataclasses.replace(memory, fixed=0)
    capacity = DEVICES[kind].memory if kind in DEVICES else None
    entry: Dict[str, Any] = {
        "device": machine.name,
        "count": asked,
        "precision": precision,
        "batch": dataclasses.asdict(batch),
        "tokens_per_update": batch.effective,
        "left_out": fewer.removeprefix("WARNING: ") if fewer else None,
        "memory": memory.as_json(),
        "memory_of_device": capacity,
        "fits": memory.total <= capacity if capacity else None,
    }
    factor = bcd_factor(recipe)
    macs = work.macs_per_target_token
    if factor != 1:  # it was measured against the model without gates
        macs -= work.cost.macs["router"] / work.target_length
    speed = expected_speed(rows, recipe.experiment, kind, machine.devices, macs, precision) if kind else None
    if speed:
        if machine.gpus:
            fill = work.size.fill if work.size else 1.0
            least = seconds_per_update(len(layers_of(work.model)), batch.update_freq)
            speed = speed.no_faster_than(least, batch.effective * fill)
        speed = speed.divided_by(factor, "for block coordinate descent")
        entry.update(tokens_per_second=round(speed.tokens_per_second), speed_origin=speed.origin)
        entry["measured"] = speed.measured
    if work.size:
        entry.update(_duration(recipe, work.size, batch, speed.tokens_per_second if speed else None))
    return entry


def bcd_factor(recipe: Recipe) -> float:
    """Time of MAE's training by block coordinate descent as a multiple of its dense model's training."""
    flags = recipe.training_flags
    if not recipe.train.task.endswith("_bcd") or flags.get("bcd") != "alternate":
        return 1.0
    if flags.get("mae-gate") == "uniform":
        return F_STEP
    every = int(flags.get("bcd-g-every", 5))
    return ((every - 1) * F_STEP + WITH_G_STEP) / every


def _duration(recipe: Recipe, size: CorpusSize, batch: BatchPlan, speed: Optional[float]) -> Dict[str, Any]:
    """Updates and hours to the recipe's end: max_epoch or max_update, whichever comes first."""
    per_epoch = size.updates_per_epoch(batch.effective, batch.devices, batch.update_freq)
    updates = planned_updates(recipe.train, batch, size)
    epochs = updates / per_epoch
    tokens = epochs * size.target_tokens
    hours = tokens / speed / 3600 if speed else None
    return {
        "updates_per_epoch": per_epoch,
        "updates": updates,
        "epochs": round(epochs, 2),
        "target_tokens": round(tokens),
        "hours": _rounded(hours) if hours is not None else None,
        "device_hours": _rounded(hours * batch.devices) if hours is not None else None,
    }


def machines_to_plan(chosen: Hardware, gpus: Optional[int], device_name: Optional[str]) -> List[Hardware]:
    """The machine that was asked for; with no wish and no GPU here, every known GPU, 1, 8 and 32 of each."""
    if chosen.gpus or gpus == 0:
        return [chosen]
    names = [device_name] if device_name else list(CAPABILITIES)
    counts = [gpus] if gpus else COUNTS
    return [assumed_hardware(name, count) for name in names for count in counts]


def as_text(report: Dict[str, Any]) -> str:
    """The plan as a table for people."""
    source, target = report["mean_lengths"]
    lines = [
        f"parameters        {report['parameters']:,}",
        f"MACs              {report['macs_per_target_token']:,} per target token, forward "
        f"({source} source and {target} target tokens)",
    ]
    if report["not_counted"]:
        lines.append(f"                  without those of {', '.join(report['not_counted'])}")
    corpus = report["corpus"]
    if corpus:
        sentences = f"{corpus['sentences']:,} sentences, " if corpus["sentences"] else ""
        lines += [
            f"training set      {corpus['name']}: {sentences}{corpus['source_tokens']:,} source and "
            f"{corpus['target_tokens']:,} target tokens, {corpus['vocabulary']:,} symbols",
            f"                  {corpus['origin']}",
        ]
    else:
        lines.append(
            "training set      of unknown size: give --data a folder made by fairseq-preprocess for updates "
            f"and hours ({FALLBACK_VOCABULARY:,} symbols assumed)"
        )
    lines += [
        "",
        f"{'GPUs':>10} {'precision':>9} {'tokens/update':>13} {'updates':>9} {'of them per epoch':>17} "
        f"{'GB per GPU':>12} {'tokens/s':>10} {'hours':>9} {'GPU hours':>10}",
    ]
    lines += [_line(entry) for entry in report["hardware"]]
    origins = {}
    for entry in report["hardware"]:
        origins.setdefault(entry.get("speed_origin", "speed unknown"), []).append(_name(entry))
    lines += ["", *(f"{origin} [{_names(names)}]" for origin, names in origins.items())]
    left_out = [entry for entry in report["hardware"] if entry["left_out"]]
    lines += [f"{_name(entry)}: {entry['left_out']}" for entry in left_out]
    lines.append(
        "GB per GPU is an estimate (its formula: moa_fairseq/recipes/planner/memory.py); ! does not fit."
    )
    lines.append(
        "Validation, checkpoints and interruptions are not in the hours; small models use less of a GPU."
    )
    return "\n".join(lines)


def _line(entry: Dict[str, Any]) -> str:
    def number(key: str, form: str = ",") -> str:
        return format(entry[key], form) if entry.get(key) is not None else "?"

    full = "!" if entry["fits"] is False else " "
    memory = f"{entry['memory']['total'] / 1e9:.1f}{full}"
    return (
        f"{_name(entry):>10} {entry['precision']:>9} {number('tokens_per_update'):>13} "
        f"{number('updates'):>9} {number('updates_per_epoch'):>17} {memory:>12} "
        f"{number('tokens_per_second'):>10} {_hours(entry.get('hours')):>9} "
        f"{_hours(entry.get('device_hours')):>10}"
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _hours(hours: Optional[float]) -> str:
    return "?" if hours is None else f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}"


def _name(entry: Dict[str, Any]) -> str:
    return (
        f"{entry['count']} {device_kind(entry['device']) or ('GPU' if entry['memory']['fixed'] else 'CPU')}"
    )


def _names(names: List[str]) -> str:
    return ", ".join(names) if len(names) < 5 else "all" if len(names) > 11 else f"{names[0]} ... {names[-1]}"
