"""The bill before the start: what a recipe costs in parameters, MACs, updates, memory and, roughly, hours.

Bytes of a parameter, with Adam's 8 (other optimizers: OPTIMIZER_BYTES):

    fp32, amp                 4 weight + 4 gradient + 8 Adam; amp + 2                              = 16, 18
    fp16, bf16                2 weight + 2 gradient + 4 master + 4 its gradient + 8 Adam           = 20
    several GPUs              + one gradient for the buckets that are reduced

Per token of --max-tokens: what autograd keeps, measured on this CPU with the recipe's own model of one and
two layers, and three rows of logits: log-probabilities, their gradient and that of the logits. Within 15 %
of whole updates on a CPU in fp32 (tests/recipes/test_memory.py). For a GPU the measurement stands in for its
fused attention and its masks of bytes; on GPUs this was not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional
from unittest import mock

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from torch import Tensor, nn

from moa_fairseq.data_prep.binarised import is_binarised
from moa_fairseq.evaluation.complexity import Cost, count
from moa_fairseq.evaluation.skeleton import build_skeleton
from moa_fairseq.recipes.batch import CorpusSize, fit, plan_batch, planned_updates, training_set
from moa_fairseq.recipes.hardware import DEVICES, Hardware, device_kind, precision_name
from moa_fairseq.recipes.schema import CLASSIFICATION, MASKED_LM, TRANSLATION, Recipe
from moa_fairseq.running import process
from moa_fairseq.tables import Column, Table

COUNTS = (1, 8, 32)
CUDA_BYTES = 1_000_000_000  # context and libraries, assumed
OPTIMIZER_BYTES = {"nag": 4, "sgd": 4, "adagrad": 4}  # of a parameter; of others Adam's 8
OPERATIONS_PER_MAC = 6  # a MAC is two operations, and the backward pass costs two forward passes
# fairseq's own log of a dense Transformer big on 128 V100 (facebookresearch/fairseq#233, #361): 1.65 million
# target tokens a second of 221 million MACs each are 13.7 % of the devices' peak.
UTILISATION = 0.137
FALLBACK_VOCABULARY = 32000  # where neither table, data nor recipe says how many symbols there are
_TOKENS, _SYMBOLS = 256, 100


class Workload(NamedTuple):
    """What does not depend on the hardware: the model, its cost on sentences of mean length, the corpus."""

    model: Any
    cost: Cost
    vocabulary: int
    lengths: List[int]
    size: Optional[CorpusSize]

    @property
    def macs_per_target_token(self) -> float:
        """Of a forward pass over a sentence pair."""
        return self.cost.total_macs / self.lengths[1]


def workload(recipe: Recipe, data: Optional[Path]) -> Workload:
    """Build the model without weights and count it. data: a folder made by fairseq-preprocess, or None."""
    size = training_set(recipe, data)
    vocabulary = size.vocabulary if size else recipe.data.bpe or FALLBACK_VOCABULARY
    model = _skeleton(recipe, vocabulary)
    sample = recipe.training_flags.get("tokens-per-sample")
    lengths = [int(sample or 512)] * 2
    if not sample and size and size.sentences:
        lengths = [max(1, round(n / size.sentences)) for n in (size.source_tokens, size.target_tokens)]
    return Workload(model, count(model, *lengths), vocabulary, lengths, size)


def _skeleton(recipe: Recipe, vocabulary: int, weights: bool = False, **more: Any) -> Any:
    line = process.flags({**recipe.model.as_flags(), **more, "arch": None})
    return build_skeleton(recipe.model.arch, vocabulary, "separate", line, weights=weights)


def plan(recipe: Recipe, data: Optional[Path], machines: List[Hardware], results: Path) -> Dict[str, Any]:
    """The plan as plain data.

    data: a binarised folder, or one that is not yet. machines: the hardware to plan for. results: where
    recorded speeds are.
    """
    data = data if data and is_binarised(data) else None
    work = workload(recipe, data)
    precision = precision_name(recipe.train.precision, machines[0], recipe.model)
    kept = kept_per_token(recipe, work, precision, machines[0].gpus > 0)
    speeds = [row for row in read_speeds(results) if row["experiment"] == recipe.experiment]
    return {
        "experiment": recipe.experiment,
        "parameters": work.cost.total_parameters,
        "mean_lengths": work.lengths,
        "not_counted": work.cost.not_counted,
        "macs_per_target_token": round(work.macs_per_target_token),
        "corpus": dataclasses.asdict(work.size) if work.size else None,
        "hardware": [_plan_for(recipe, machine, data, work, kept, speeds) for machine in machines],
    }


def _plan_for(
    recipe: Recipe, machine: Hardware, data: Optional[Path], work: Workload, kept: float, speeds: List[Any]
) -> Dict[str, Any]:
    asked, (recipe, machine, left_out) = machine.devices, fit(recipe, machine, data)
    batch = plan_batch(recipe.train, machine.devices)
    updates = planned_updates(recipe.train, batch, work.size)
    per_epoch = work.size.updates_per_epoch(batch) if work.size else None
    epochs = updates // per_epoch if updates and per_epoch else None
    kind = device_kind(machine.name) if machine.gpus else "CPU"
    precision = precision_name(recipe.train.precision, machine, recipe.model)
    device, logits = DEVICES.get(kind), logits_per_token(recipe, work, data)
    memory, speed, origin = None, None, {}
    if logits is not None:
        a_parameter = parameter_bytes(recipe.training_flags, precision, machine.devices)
        memory = round((kept + 12 * logits) * batch.max_tokens) + work.cost.total_parameters * a_parameter
        memory += CUDA_BYTES if machine.gpus else 0
    recorded = [row for row in speeds if row["device"] == kind]
    if recorded:
        row = min(recorded, key=lambda row: abs(row["count"] - batch.devices))
        speed = row["tokens_per_second"] * batch.devices / row["count"]
        origin = {"speed_origin": f"recorded in {row['file']} on {row['count']} {kind}"}
    elif device:
        peak = device.peak_single if precision == "fp32" else device.peak_half
        speed = peak * UTILISATION / (OPERATIONS_PER_MAC * work.macs_per_target_token) * batch.devices
        origin = {"speed_origin": f"rough: {UTILISATION:.1%} of the peak, what a dense Transformer reached"}
    entry = {
        **{"device": kind, "count": asked, "precision": precision, "left_out": left_out},
        **{"batch": dataclasses.asdict(batch), "tokens_per_update": batch.effective, "memory": memory},
        "fits": memory <= device.memory if device and memory else None,
        **origin,
        "disk": disk(recipe, work.model, machine.gpus > 0, updates, epochs),
    }
    if work.size and updates and per_epoch:
        tokens = updates / per_epoch * work.size.target_tokens
        entry.update(updates_per_epoch=per_epoch, updates=updates, target_tokens=round(tokens))
        entry["hours"] = float(f"{tokens / speed / 3600:.2g}") if speed else None
    return entry


def parameter_bytes(flags: Mapping[str, Any], precision: str, devices: int) -> int:
    """Bytes that training keeps of a parameter on each of the devices."""
    half = precision in ("fp16", "bf16")
    efficient = flags.get("memory-efficient-fp16") or flags.get("memory-efficient-bf16")
    weight, adam = 2 if half else 4, OPTIMIZER_BYTES.get(str(flags.get("optimizer")), 8)
    whole = 2 * weight + adam + (8 if half and not efficient else 0) + 2 * (precision == "amp")
    if flags.get("ddp-backend") == "fully_sharded":
        return -(-whole // devices)
    sharded = adam - adam // devices if flags.get("zero-sharding") == "os" else 0
    return whole - sharded + (weight if devices > 1 else 0)


def logits_per_token(recipe: Recipe, work: Workload, data: Optional[Path]) -> Optional[float]:
    """How many logits a token of --max-tokens has, on average.

    Of an adaptive softmax every token has those of the frequent words, and only the tokens in a further band
    those of that band: dict.txt in `data` says how many; None without it.
    """
    adaptive = getattr(getattr(work.model, "decoder", None), "adaptive_softmax", None)
    share = {CLASSIFICATION: 0.0, MASKED_LM: float(recipe.training_flags.get("mask-prob") or 0.15)}
    if adaptive is None:
        return share.get(recipe.kind, 1.0) * work.vocabulary
    if data is None:
        return None
    counts, cutoff = Dictionary.load(str(data / "dict.txt")).count, adaptive.cutoff
    bands = [(high - low) * sum(counts[low:high]) for low, high in zip(cutoff, cutoff[1:])]
    return float(cutoff[0] + len(bands) + sum(bands) / sum(counts))


def disk(
    recipe: Recipe, model: nn.Module, on_gpu: bool, updates: Optional[int], epochs: Optional[int]
) -> Dict[str, Optional[int]]:
    """Bytes of the checkpoints and the average that a training leaves, as fairseq writes them.

    A checkpoint has the weights and what the optimizer remembers, in fp32 whatever the precision. A tied
    weight stands in it once for each of its names if it comes from a GPU. updates, epochs: whole ones of the
    training, None if that is not known. "checkpoint": of one file, two more of which are there while a new
    one is written; "total" is None where nothing limits their number.
    """
    flags, own = recipe.training_flags, dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - own.keys()
    state = [values for name, values in model.state_dict().items() if on_gpu or name not in tied]
    weights = sum(values.numel() * values.element_size() for values in state)
    remembered = OPTIMIZER_BYTES.get(str(flags.get("optimizer")), 8)
    size = weights * (2 if flags.get("store-ema") else 1)
    if not flags.get("no-save-optimizer-state"):
        size += remembered * sum(parameter.numel() for parameter in own.values())

    def number(most: float, done: Optional[int], interval: int) -> float:
        return min(most, math.inf if done is None else done // interval)

    keep, interval = flags.get("keep-interval-updates", -1), flags.get("save-interval-updates")
    last_epochs = number(recipe.train.keep_last_epochs, epochs, flags.get("save-interval", 1))
    kept = 1.0  # checkpoint_last.pt
    kept += 0 if flags.get("disable-validation") else 1 + flags.get("keep-best-checkpoints", 0)
    kept += 0 if flags.get("no-epoch-checkpoints") else last_epochs
    kept += number(keep if keep > 0 else math.inf, updates, interval) if interval else 0
    saves = recipe.finetune != "noft" and not flags.get("no-save")
    files = 0 if not saves else None if kept == math.inf else int(kept)
    total = None if files is None else files * size + (weights if recipe.average else 0)
    return {"checkpoint": size, "files": files, "total": total}


def kept_per_token(recipe: Recipe, work: Workload, precision: str, on_gpu: bool) -> float:
    """Bytes that a forward pass keeps for the backward pass, per token of --max-tokens, logits aside.

    Models of one layer, and of two in encoder or decoder, say what a layer keeps: all layers keep the same.
    With activation checkpointing it is that of one layer, and the inputs of the others.
    """
    names = ("EncoderLayer", "DecoderLayer", "EncoderLayerBase", "DecoderLayerBase")
    sides = {side: getattr(work.model, side, nn.Module()).modules() for side in ("encoder", "decoder")}
    depths = {side: sum(type(m).__name__.endswith(names) for m in found) for side, found in sides.items()}
    adaptive = any("adaptive" in type(module).__name__.lower() for module in work.model.modules())
    more = {"arch": None, **{key: rate for key, rate in recipe.training_flags.items() if "dropout" in key}}
    recompute = bool(recipe.training_flags.get("checkpoint-activations"))
    if recipe.kind != TRANSLATION:
        more["tokens-per-sample"] = work.lengths[1]

    @functools.cache
    def kept(deeper: str = "", checkpointing: bool = recompute) -> int:
        layers = {f"{side}-layers": 1 + (side == deeper) for side, depth in depths.items() if depth}
        vocabulary = work.vocabulary if adaptive else _SYMBOLS  # what is kept does not depend on it
        changed = {**more, "checkpoint-activations": checkpointing, **layers}
        with torch.random.fork_rng(devices=[]):
            model = _skeleton(recipe, vocabulary, weights=True, **changed).train()
            model = model.bfloat16() if precision in ("fp16", "bf16") else model
            gpu = _gpu_kernels() if on_gpu else contextlib.nullcontext()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"), gpu:
                few, twice = (_kept_bytes(model, recipe, work.lengths, n * sentences) for n in (1, 2))
        return twice - few  # without what does not grow, such as masks and autocast's weights

    sentences = max(1, _TOKENS // max(work.lengths))
    total, one_layer = kept(), 0
    for side, depth in depths.items():
        if depth:
            total += (depth - 1) * (kept(side) - kept())
            if recompute:  # one layer at a time is there in whole
                one_layer = max(one_layer, kept(side, False) - kept("", False))
    return (total + one_layer) / (sentences * max(work.lengths))


def _kept_bytes(model: Any, recipe: Recipe, lengths: List[int], sentences: int) -> int:
    source, target = (torch.randint(5, _SYMBOLS, (sentences, length)) for length in lengths)
    read: Dict[str, Any] = {"src_tokens": source, "features_only": True}
    if recipe.kind == TRANSLATION:
        read.update(src_lengths=torch.full((sentences,), lengths[0]), prev_output_tokens=target)
    chunks = recipe.training_flags.get("carried-chunks")
    if chunks:
        model.decoder.carry_context(chunks)
        with torch.no_grad():
            for chunk in range(chunks):
                model(**read, chunk=chunk)
        read["chunk"] = chunks
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: Dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**read)  # holds the storages: no address can have stood for two of them
    del output
    return sum(size for address, size in storages.items() if address not in parameters)


class _FusedAttention(torch.autograd.Function):
    """What the fused attention of a GPU keeps: no attention weights. Its result here is zero."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor]) -> Tensor:
        out = q.new_zeros(*q.shape[:-1], v.size(-1))
        ctx.save_for_backward(q, k, v, mask, out, torch.zeros(q.shape[:-1]))
        return out


@contextlib.contextmanager
def _gpu_kernels() -> Iterator[None]:
    """A block in which attention and dropout keep on a CPU what they keep on a GPU."""

    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Optional[Tensor] = None, *_: Any, **__: Any):
        return _FusedAttention.apply(q, k, v, attn_mask)

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p else x

    with mock.patch.multiple(F, scaled_dot_product_attention=attention, dropout=dropout):
        yield


def read_speeds(results: Path) -> List[Dict[str, Any]]:
    """The recorded speeds in a results folder, with device (as device_kind) and count."""
    rows: List[Dict[str, Any]] = []
    for path in sorted([*results.glob("measured/*.json"), *results.glob("throughput/*.json")]):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            found = re.fullmatch(r"(\d+) x (.+)", str(row["hardware"]))
            count, kind = (int(found[1]), device_kind(found[2])) if found else (1, "CPU")
            if float(row["tokens_per_second"]) > 0 and row["experiment"]:
                rows.append(
                    {**row, "device": kind, "count": count, "file": f"{path.parent.name}/{path.name}"}
                )
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return rows


def as_text(report: Dict[str, Any]) -> str:
    """The plan as a table for people."""
    source, target = report["mean_lengths"]
    corpus, entries = report["corpus"], report["hardware"]
    size = "of unknown size: give --data a folder made by fairseq-preprocess for updates and hours"
    if corpus:
        tokens = f"{corpus['source_tokens']:,} source and {corpus['target_tokens']:,} target tokens"
        size = f"{corpus['name']}: {tokens}, {corpus['vocabulary']:,} symbols; {corpus['origin']}"
    macs = f"{report['macs_per_target_token']:,} per target token, forward ({source} source, {target} target)"
    missing = f"; not those of {', '.join(report['not_counted'])}" if report["not_counted"] else ""
    table = [
        {
            "devices": f"{entry['count']} {entry['device']}",
            "precision": entry["precision"],
            "tokens/update": f"{entry['tokens_per_update']:,}",
            "updates": f"{entry['updates']:,}" if "updates" in entry else "?",
            "GB each": f"{_gigabytes(entry['memory'])}{'!' if entry['fits'] is False else ''}",
            "disk, GB": _gigabytes(entry["disk"]["total"]),
            "hours, roughly": f"{entry['hours']:,g}" if entry.get("hours") else "?",
        }
        for entry in entries
    ]
    unknown = "speed unknown: --stage train --record measures it"
    return "\n".join(
        [
            f"parameters    {report['parameters']:,}",
            f"MACs          {macs}{missing}",
            f"training set  {size}",
            Table([Column(key, key, ">" * (key != "devices")) for key in table[0]], table).text(),
            *dict.fromkeys(entry.get("speed_origin", unknown) for entry in entries),
            *(f"{e['count']} {e['device']}: {e['left_out']}" for e in entries if e["left_out"]),
            f"! does not fit. A checkpoint has {_gigabytes(entries[0]['disk']['checkpoint'])} GB.",
        ]
    )


def _gigabytes(size: Optional[int]) -> str:
    return "?" if size is None else f"{size / 1e9:.2g}" if size < 1e9 else f"{size / 1e9:.1f}"
