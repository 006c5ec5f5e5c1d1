"""Attention modules by what they attend to: encoder self-, decoder self- and decoder cross-attention."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

# (first and last part of a module's path, label)
GROUPS: Tuple[Tuple[str, str], ...] = (
    ("encoder.self_attn", "encoder self-attention"),
    ("decoder.self_attn", "decoder self-attention"),
    ("decoder.encoder_attn", "decoder cross-attention"),
)


def group_of(name: str) -> str:
    """The label of a module's group: "decoder.layers.3.encoder_attn" → "decoder cross-attention"."""
    path = name.split(".")
    return dict(GROUPS).get(f"{path[0]}.{path[-1]}", "other")


def grouped(measured: Sequence[Any]) -> Dict[str, List[Any]]:
    """What was measured of each module (it has a `name`), by group, layers in order; no empty groups."""
    groups: Dict[str, List[Any]] = {}
    for item in measured:
        groups.setdefault(group_of(item.name), []).append(item)
    order = [label for _, label in GROUPS] + ["other"]
    return {label: groups[label] for label in order if label in groups}
