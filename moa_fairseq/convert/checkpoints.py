"""Checkpoints as conversions read and write them."""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict

from torch import Tensor

from moa_fairseq.errors import UserError
from moa_fairseq.fairseq_patches.checkpoint_files import load_checkpoint, save_checkpoint

State = Dict[str, Tensor]


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
    state = load_checkpoint(path)
    if "fsdp_metadata" in state:
        raise UserError(
            f"{path} is one of several shards that --ddp-backend fully_sharded wrote: save the whole model "
            "first (without --use-sharded-state)."
        )
    cfg, args = state.get("cfg"), state.get("args")
    if args is not None:
        return Checkpoint(state["model"], {"model": args}, is_old=True)
    if cfg is None or cfg.get("model") is None:
        raise UserError(f"{path} does not say which model it holds (cfg.model): it is not fairseq's.")
    return Checkpoint(state["model"], cfg)


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint as fairseq does before its first update: without optimizer state.

    Raises UserError where it cannot be written; nothing half-written is left.
    """
    start = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    state = {
        "args": checkpoint.cfg["model"] if checkpoint.is_old else None,
        "cfg": None if checkpoint.is_old else checkpoint.cfg,
        "model": checkpoint.model,
        "criterion": None,
        "optimizer_history": [start],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}},
        "last_optimizer_state": None,
    }
    save_checkpoint(state, path)
