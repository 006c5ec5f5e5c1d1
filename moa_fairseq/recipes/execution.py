"""Flags of fairseq-train that say how a training is carried out and not what it computes.

A run may change them between two starts, and with them it still stands for its row of the paper.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping

EXECUTION_FLAGS = (
    # how processes talk and what each of them holds
    *("ddp-backend", "ddp-comm-hook", "bucket-cap-mb", "gradient-as-bucket-view", "find-unused-parameters"),
    *("heartbeat-timeout", "zero-sharding", "cpu-offload", "no-reshard-after-forward", "fp32-reduce-scatter"),
    "min-params-to-wrap",
    # memory against time
    *("checkpoint-activations", "memory-efficient-fp16", "memory-efficient-bf16", "fp16-no-flatten-grads"),
    *("fp16-init-scale", "fp16-scale-window"),
    # data loading and logs
    *("num-workers", "data-buffer-size", "tensorboard-logdir", "wandb-project"),
)
# How often a checkpoint is written; part of the experiment where these are the ones that are averaged.
INTERVAL_FLAGS = frozenset({"save-interval-updates", "keep-interval-updates"})


def is_execution_flag(key: str, averages_updates: bool) -> bool:
    """True for a dotted key such as `train.flags.ddp-backend` that leaves the experiment the same."""
    section, _, name = key.rpartition(".flags.")
    if section not in ("train", "model"):
        return False
    return name in EXECUTION_FLAGS or (name in INTERVAL_FLAGS and not averages_updates)


def experiment_flags(section: str, flags: Mapping[str, Any], averages_updates: bool) -> Dict[str, Any]:
    """The flags of a section without those that only say how it is carried out."""
    return {
        name: value
        for name, value in flags.items()
        if not is_execution_flag(f"{section}.flags.{name}", averages_updates)
    }
