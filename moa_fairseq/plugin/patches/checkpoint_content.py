"""What a file may hold to be taken for a checkpoint of fairseq's."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moa_fairseq.errors import UserError

MAX_SETTINGS = 100_000  # values in a checkpoint's configuration: fairseq's have some hundreds
REMEDY = "Use another checkpoint, or the file that this one was copied from."
_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}


def check_checkpoint(state: Any, name: str, size: int) -> None:
    """Check that `state`, read from a file of `size` bytes, can be one of fairseq's checkpoints.

    Weights are dense tensors that the file holds, all finite; the configuration is made of mappings.

    Args:
        state: what the file holds.
        name: the file's name, for the message.
        size: the file's size in bytes.

    Raises:
        UserError: names the first part that cannot be fairseq's.
    """
    weights = state.get("model") if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise UserError(f"{name} is not a fairseq checkpoint: it contains no model. {REMEDY}")
    try:
        _check_tensors(state, size)
        _check_types(weights)
        _check_settings(state.get("cfg"), state.get("args"))
    except ValueError as error:  # from the three checks
        raise UserError(
            f"Checkpoint {name} cannot have been saved by fairseq: {error}. {REMEDY}"
        ) from error
    check_weights(
        weights,
        f"Checkpoint {name} holds",
        "Use an earlier checkpoint of it, if there is one.",
    )


def check_weights(weights: Mapping[str, Tensor], beginning: str, remedy: str) -> None:
    """Check that all weights are finite.

    Args:
        weights: the weights by name.
        beginning, remedy: how the message begins and ends; between them it names the first such weight.

    Raises:
        UserError: if a weight is NaN or infinite.
    """
    for name, weight in weights.items():
        if weight.is_floating_point() and weight.element_size() == 1:  # float8 lacks isfinite
            weight = weight.float()
        if not weight.isfinite().all():
            kind = "NaN" if weight.isnan().any() else "infinity"
            raise UserError(
                f"{beginning} {kind} in {name[:80]}: its training had diverged. {remedy}"
            )


def _check_tensors(state: dict[Any, Any], size: int) -> None:
    """Raise ValueError for tensors larger than the file, whose numbers are repeated or missing."""
    bytes_left = size
    counted = set()
    for tensor in _tensors_in(state):
        dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
        if not dense or tensor.device.type == "meta":
            raise ValueError(
                f"it holds a tensor that is not dense ({tensor.layout}, on {tensor.device})"
            )
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            bytes_left -= storage.nbytes()
        if tensor.numel() * tensor.element_size() > storage.nbytes() or bytes_left < 0:
            raise ValueError(
                f"a tensor of the shape {list(tensor.shape)} is larger than what the file holds"
            )


def _check_types(weights: dict[Any, Any]) -> None:
    """Raise ValueError for a weight that is not a tensor of numbers, or has no name."""
    for name, weight in weights.items():
        if not isinstance(name, str) or not isinstance(weight, Tensor):
            raise ValueError(f"the weight {str(name)[:80]} is of the type {type(weight).__name__}")
        # A single truth value is a flag that a module saves.
        if weight.dtype not in _DTYPES and (weight.dtype != torch.bool or weight.dim()):
            raise ValueError(f"the weight {name[:80]} is made of {weight.dtype}")


def _check_settings(cfg: Any, args: Any) -> None:
    """Raise ValueError for settings that are not of fairseq's types, or are too many."""
    pending = [cfg, args]
    # A list that stands in ten places counts ten times: OmegaConf copies it for each place.
    for _ in range(MAX_SETTINGS):
        if pending:
            pending += _items(pending.pop())
    if pending:
        raise ValueError(f"its settings have more than {MAX_SETTINGS:,} values, or hold themselves")
    if args is not None and not isinstance(args, argparse.Namespace):
        raise ValueError(f"its settings (args) are of the type {type(args).__name__}")
    if cfg is None:
        return
    if not isinstance(cfg, dict) or not all(isinstance(key, str) for key in cfg):
        raise ValueError(
            f"its settings (cfg) are of the type {type(cfg).__name__}, or a name in them is not text"
        )
    for group in ("model", "task"):
        if not isinstance(cfg.get(group, {}), (dict, argparse.Namespace)):
            raise ValueError(f"cfg.{group} is of the type {type(cfg[group]).__name__}")


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers; those of a container that stands in several places come once."""
    visited = set()
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
        elif id(value) not in visited:
            visited.add(id(value))
            pending += _items(value)


def _items(value: Any) -> list[Any]:
    """The items of a container, or the values of a mapping; no items for anything else."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        value = value.values()
    if not isinstance(value, (str, bytes, Tensor)) and hasattr(value, "__iter__"):
        return list(value)
    return []
