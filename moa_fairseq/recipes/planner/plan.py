"""The bill before the start: what a recipe costs in parameters, MACs, updates, memory and hours."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from tabulate import tabulate

from moa_fairseq.evaluation.complexity import Cost, count
from moa_fairseq.recipes.batch import fit_devices, plan_batch, planned_updates, training_set
from moa_fairseq.recipes.corpus_size import CorpusSize
from moa_fairseq.recipes.hardware import DEVICES, Hardware, assumed_hardware, precision_name
from moa_fairseq.recipes.planner.memory import (
    disk,
    estimate_memory,
    layers_of,
    logits_per_token,
    measure_activations,
)
from moa_fairseq.recipes.planner.throughput import Row, device_kind, expected_speed, seconds_per_update
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.running import command_line

COUNTS = (1, 8, 32)
# An update of MAE-7 base without and with a G step, in updates of the dense base model (results/benchmarks,
# coordinate_descent): 1.20 on average with a G step in every fifth epoch; the paper says 1.2.
F_STEP, WITH_G_STEP = 1.04, 1.85
# Where neither the table nor data says how many symbols there are.
FALLBACK_VOCABULARY = 32000
UNKNOWN_SPEED = (
    "speed unknown: --stage train --record measures it; the MACs of a mixture do not tell its time"
)
ADAPTIVE = "How often words are rare decides the memory of an adaptive softmax: give --data its folder."


@dataclasses.dataclass(frozen=True)
class Workload:
    """What does not depend on the hardware: the model, its cost on sentences of mean length, the corpus.

    logits: of a token; None for an adaptive softmax without data.
    """

    model: Any
    cost: Cost
    vocabulary: int
    source_length: int
    target_length: int
    size: Optional[CorpusSize]
    logits: Optional[float]

    @property
    def macs_per_target_token(self) -> float:
        """Multiply-accumulates of a forward pass over a sentence pair, per target token."""
        return self.cost.total_macs / self.target_length


def workload(recipe: Recipe, data: Optional[Path]) -> Workload:
    """Build the model without weights and count it. data: a folder made by fairseq-preprocess, or None."""
    from moa_fairseq.evaluation.skeleton import build_skeleton

    size = training_set(recipe, data)
    vocabulary = size.vocabulary if size else FALLBACK_VOCABULARY
    flags = command_line.flags({**recipe.model.as_flags(), "arch": None})
    model = build_skeleton(recipe.model.arch, vocabulary, "separate", flags)
    lengths = _mean_lengths(recipe, size)
    logits = logits_per_token(recipe, model, vocabulary, data)
    return Workload(model, count(model, *lengths), vocabulary, *lengths, size, logits)


def _mean_lengths(recipe: Recipe, size: Optional[CorpusSize]) -> Tuple[int, int]:
    """Tokens of a source and a target sentence; of a language model's sample, its whole length."""
    sample = recipe.training_flags.get("tokens-per-sample")
    if sample or size is None or not size.sentences:
        return int(sample or 512), int(sample or 512)
    source, target = size.source_tokens / size.sentences, size.target_tokens / size.sentences
    return max(1, round(source)), max(1, round(target))


def plan(recipe: Recipe, work: Workload, machines: List[Hardware], rows: List[Row]) -> Dict[str, Any]:
    """The plan as plain data. machines: the hardware to plan for; rows: measured speeds."""
    size = work.size

    # All machines are GPUs in half precision, or in another that the recipe names; or the one is a CPU.
    precision = precision_name(recipe.train.precision, machines[0], recipe.model)
    lengths = (work.source_length, work.target_length)
    kept = measure_activations(recipe, work.model, lengths, work.vocabulary, precision, machines[0].gpus > 0)
    return {
        "experiment": recipe.experiment,
        "parameters": work.cost.total_parameters,
        "macs_per_target_token": round(work.macs_per_target_token),
        "attention_macs_per_target_token": round(work.cost.attention_macs / work.target_length),
        "output_macs_per_target_token": round(work.cost.macs["output"] / work.target_length),
        "mean_lengths": [work.source_length, work.target_length],
        "corpus": dataclasses.asdict(size) if size else None,
        "not_counted": work.cost.not_counted,
        "hardware": [_plan_for(recipe, work, machine, rows, kept) for machine in machines],
    }


def _plan_for(
    recipe: Recipe,
    work: Workload,
    machine: Hardware,
    rows: List[Row],
    kept: float,
) -> Dict[str, Any]:
    """Batch, memory, speed and hours on one kind of machine. kept: bytes of a token."""
    asked, (machine, fewer) = machine.devices, fit_devices(recipe, machine)
    batch = plan_batch(recipe.train, machine.devices)
    kind = device_kind(machine.name) if machine.gpus else "CPU"
    precision = precision_name(recipe.train.precision, machine, recipe.model)
    memory = estimate_memory(
        work.model,
        kept,
        work.logits,
        batch.max_tokens,
        precision,
        machine.devices,
        recipe.training_flags,
    )
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
        "memory": {**dataclasses.asdict(memory), "total": memory.total},
        "memory_of_device": capacity,
        "fits": memory.total <= capacity if capacity and memory.total else None,
    }
    factor, macs = bcd_factor(recipe), work.macs_per_target_token
    routed = work.cost.macs["router"] / work.target_length
    if factor != 1:  # it was measured against the model without gates
        macs, routed = macs - routed, 0
    speed = None
    if kind:
        speed = expected_speed(
            rows, recipe.experiment, kind, machine.devices, macs, precision, is_mixture=routed > 0
        )
    if speed:
        if machine.gpus:
            fill = work.size.fill if work.size else 1.0
            least = seconds_per_update(len(layers_of(work.model)), batch.update_freq)
            speed = speed.no_faster_than(least, batch.effective * fill)
        speed = speed.divided_by(factor, "for block coordinate descent")
        entry.update(tokens_per_second=round(speed.tokens_per_second), speed_origin=speed.origin)
        entry["measured"] = speed.measured
    updates, epochs = planned_updates(recipe.train, batch, work.size), recipe.train.max_epoch
    if work.size and updates:
        per_epoch = work.size.updates_per_epoch(batch.effective, batch.devices, batch.update_freq)
        epochs, tokens = -(-updates // per_epoch), updates / per_epoch * work.size.target_tokens
        hours = tokens / speed.tokens_per_second / 3600 if speed else None
        entry.update(
            updates_per_epoch=per_epoch,
            updates=updates,
            epochs=round(updates / per_epoch, 2),
            target_tokens=round(tokens),
            hours=hours and float(f"{hours:.4g}"),
            device_hours=hours and float(f"{hours * batch.devices:.4g}"),
        )
    entry["disk"] = disk(recipe, work.model, machine.gpus > 0, updates, epochs)
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


def machines_to_plan(chosen: Hardware, gpus: Optional[int], device_name: Optional[str]) -> List[Hardware]:
    """The machine that was asked for; with no wish and no GPU here, every known GPU, 1, 8 and 32 of each."""
    if chosen.gpus or gpus == 0:
        return [chosen]
    names = [device_name] if device_name else list(DEVICES)
    counts = [gpus] if gpus else COUNTS
    return [assumed_hardware(name, count) for name in names for count in counts]


def as_text(report: Dict[str, Any]) -> str:
    """The plan as a table for people."""
    source, target = report["mean_lengths"]
    macs = f"{report['macs_per_target_token']:,} per target token, forward"
    facts = [
        ("parameters", f"{report['parameters']:,}"),
        ("MACs", f"{macs} ({source} source and {target} target tokens)"),
        (
            "",
            f"of it attention {report['attention_macs_per_target_token']:,}, output layer "
            f"{report['output_macs_per_target_token']:,}",
        ),
    ]
    if report["not_counted"]:
        facts.append(("", f"without those of {', '.join(report['not_counted'])}"))
    corpus = report["corpus"]
    if corpus:
        sentences = f"{corpus['sentences']:,} sentences, " if corpus["sentences"] else ""
        tokens = f"{corpus['source_tokens']:,} source and {corpus['target_tokens']:,} target tokens"
        size = f"{corpus['name']}: {sentences}{tokens}, {corpus['vocabulary']:,} symbols"
        facts += [("training set", size), ("", corpus["origin"])]
    else:
        remedy = "give --data a folder made by fairseq-preprocess for updates and hours"
        assumed = f"{FALLBACK_VOCABULARY:,} symbols assumed"
        facts.append(("training set", f"of unknown size: {remedy} ({assumed})"))
    disk = report["hardware"][0]["disk"]
    names = [_name(entry) for entry in report["hardware"]]
    table: List[Dict[str, str]] = []
    origins: Dict[str, List[str]] = {}
    for name, entry in zip(names, report["hardware"]):
        full = "!" if entry["fits"] is False else " "
        table.append(
            {
                "GPUs": name,
                "precision": entry["precision"],
                "tokens/update": f"{entry['tokens_per_update']:,}",
                "updates": _number(entry.get("updates")),
                "of them per epoch": _number(entry.get("updates_per_epoch")),
                "GB per GPU": _gigabytes(entry["memory"]["total"]) + full,
                "GB on disk": _gigabytes(entry["disk"]["total"]),
                "tokens/s": _number(entry.get("tokens_per_second")),
                "hours": _number(entry.get("hours")),
                "GPU hours": _number(entry.get("device_hours")),
            }
        )
        origins.setdefault(entry.get("speed_origin", UNKNOWN_SPEED), []).append(name)
    return "\n".join(
        [
            tabulate(facts, tablefmt="plain", disable_numparse=True),
            "",
            tabulate(table, "keys", "plain", disable_numparse=True, colglobalalign="right"),
            "",
            *(f"{origin} [{_listed(found)}]" for origin, found in origins.items()),
            *(f"{n}: {e['left_out']}" for n, e in zip(names, report["hardware"]) if e["left_out"]),
            "GB per GPU is an estimate from what autograd keeps on this CPU (its parts: "
            "moa_fairseq/recipes/planner/memory.py); ! does not fit.",
            *([ADAPTIVE] if report["hardware"][0]["memory"]["total"] is None else []),
            f"GB on disk: {disk['files'] or '?'} checkpoints of {_gigabytes(disk['checkpoint'])} GB, "
            f"an average of {_gigabytes(disk['average'])} GB; two more checkpoints while one is written.",
            "Validation, checkpoints and interruptions are not in the hours; small models use less of a GPU.",
        ]
    )


def _number(value: Optional[float]) -> str:
    """A count, or hours: whole ones from 100 on, else two digits."""
    if value is None:
        return "?"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.2g}"


def _gigabytes(size: Optional[int]) -> str:
    return "?" if size is None else f"{size / 1e9:,.1f}" if size >= 1e8 else f"{size / 1e9:.2g}"


def _name(entry: Dict[str, Any]) -> str:
    kind = device_kind(entry["device"]) or ("GPU" if entry["memory"]["fixed"] else "CPU")
    return f"{entry['count']} {kind}"


def _listed(names: List[str]) -> str:
    return ", ".join(names) if len(names) < 5 else "all" if len(names) > 11 else f"{names[0]} ... {names[-1]}"
