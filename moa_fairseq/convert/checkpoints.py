"""Checkpoints as conversions read and write them: fairseq's .pt, or safetensors with its settings as JSON."""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict

from torch import Tensor

from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.average import shared_storage
from moa_fairseq.fairseq_patches.checkpoint_files import load_checkpoint, save_checkpoint
from moa_fairseq.files import atomic_write, refuse_irregular
from moa_fairseq.json_files import MAPPING, check_kinds, read_json

State = Dict[str, Tensor]
FORMATS = ("pt", "safetensors")
_NAMESPACE = "argparse.Namespace"  # the key under which JSON holds one
_REMEDY = "Name a pair of files that moa-fairseq convert --format safetensors wrote."


@dataclass
class Checkpoint:
    """What a conversion needs from a checkpoint.

    model: its weights. cfg: all of fairseq's settings, by group; an old checkpoint has all of them in the one
    group "model". settings: those of the model.
    """

    model: State
    cfg: Dict[str, Any]
    is_old: bool = False

    @property
    def settings(self) -> argparse.Namespace:
        """A copy of the model's settings, whether the checkpoint has them as a namespace or a dict."""
        group = self.cfg["model"]
        return argparse.Namespace(**copy.deepcopy(group if isinstance(group, dict) else vars(group)))


def read(path: Path) -> Checkpoint:
    """Read a checkpoint as data; no code in it is run.

    Raises UserError if it is missing, damaged, holds anything but tensors, containers and namespaces, or is
    not a checkpoint of a whole fairseq model.
    """
    state = _read_safetensors(path) if path.suffix == ".safetensors" else load_checkpoint(path)
    if not isinstance(state, dict):
        raise UserError(f"{path} is no fairseq checkpoint: it holds no model.")
    if "fsdp_metadata" in state:
        raise UserError(
            f"{path} is one of several shards that --ddp-backend fully_sharded wrote: save the whole model "
            "first (without --use-sharded-state)."
        )
    model, cfg, args = (state.get(key) for key in ("model", "cfg", "args"))
    if not isinstance(model, dict) or not _is_model(model):
        raise UserError(f"{path} is no fairseq checkpoint: it holds no model.")
    if isinstance(args, argparse.Namespace):
        return Checkpoint(model, {"model": args}, is_old=True)
    group = cfg.get("model") if isinstance(cfg, dict) else None
    if cfg is None or not isinstance(group, (dict, argparse.Namespace)):
        raise UserError(
            f"{path} does not say which model it holds (there is no cfg.model): it is not fairseq's."
        )
    return Checkpoint(model, cfg)


def _is_model(model: Dict[Any, Any]) -> bool:
    named = all(isinstance(name, str) and isinstance(value, Tensor) for name, value in model.items())
    return bool(model) and named


def write(checkpoint: Checkpoint, path: Path, file_format: str) -> None:
    """Write a checkpoint as fairseq does before its first update: without optimizer state.

    Raises UserError where it cannot be written; nothing half-written is left.
    """
    if file_format == "safetensors":
        _write_safetensors(checkpoint, path)
    else:
        save_checkpoint(_as_fairseq(checkpoint), path)


def settings_file(path: Path) -> Path:
    """The JSON beside a .safetensors file."""
    return path.with_suffix(".json")


def _as_fairseq(checkpoint: Checkpoint) -> Dict[str, Any]:
    settings = {"args": None, "cfg": checkpoint.cfg}
    if checkpoint.is_old:
        settings = {"args": checkpoint.cfg["model"], "cfg": None}
    start = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    return {
        **settings,
        "model": checkpoint.model,
        "criterion": None,
        "optimizer_history": [start],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}},
        "last_optimizer_state": None,
    }


def _write_safetensors(checkpoint: Checkpoint, path: Path) -> None:
    safetensors = _library()
    leaders = shared_storage(checkpoint.model)
    tensors = {name: checkpoint.model[name].contiguous() for name in leaders if leaders[name] == name}
    tied = {name: leader for name, leader in leaders.items() if name != leader}
    settings = {"cfg": _to_json(checkpoint.cfg), "old": checkpoint.is_old, "tied": tied}
    try:
        text = json.dumps(settings, indent=1, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise UserError(f"The settings of this checkpoint cannot be written as JSON ({error}).") from error
    with atomic_write(path, "wb") as stream:
        stream.write(safetensors.save(tensors, metadata={"format": "pt"}))
    with atomic_write(settings_file(path)) as stream:
        stream.write(text + "\n")


def _read_safetensors(path: Path) -> Dict[str, Any]:
    safetensors = _library()
    refuse_irregular(path)
    beside = settings_file(path)
    try:
        settings = read_json(beside, _REMEDY)
        model = safetensors.load_file(path)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename or path} does not exist. {_REMEDY}") from error
    except UserError:
        raise
    except Exception as error:  # the only class that all errors of the library share
        raise UserError(f"{path} cannot be read ({error}). {_REMEDY}") from error
    check_kinds(settings, {"cfg": MAPPING, "tied": MAPPING}, str(beside), _REMEDY, ("cfg", "tied"))
    for name, leader in settings["tied"].items():
        if leader not in model:
            raise UserError(f"{beside}: {name} shares the weights of {leader}, which {path} lacks. {_REMEDY}")
        model[name] = model[leader]
    cfg = _from_json(settings["cfg"])
    return {"model": model, "args": cfg.get("model")} if settings.get("old") else {"model": model, "cfg": cfg}


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise UserError("safetensors is not installed: pip install safetensors.") from error
    return safetensors.torch


def _to_json(value: Any) -> Any:
    if isinstance(value, argparse.Namespace):
        return {_NAMESPACE: _to_json(vars(value))}
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        inner = {key: _from_json(item) for key, item in value.items()}
        if list(inner) == [_NAMESPACE] and isinstance(inner[_NAMESPACE], dict):
            return argparse.Namespace(**inner[_NAMESPACE])
        return inner
    return [_from_json(item) for item in value] if isinstance(value, list) else value
