"""What a run's result takes from zero_shot.json, the file of `moa-fairseq zero-shot`."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.records.json_files import is_number, saved_json, selected
from moa_fairseq.files import checksum

OUTPUT = "zero_shot.json"
# Metric of a result, in per cent → lm_eval's task or group, and its metric.
RESULT_TASKS = {
    "lambada_acc": ("lambada_openai", "acc"),
    "blimp_acc": ("blimp", "acc"),
    "cbt_acc": ("cbt", "acc"),
}


def require_lm_eval(key: str, otherwise: str = "") -> None:
    """Raise an error where lm_eval is not installed, without importing it: it starts threads.

    Args:
        key: the flag or the recipe's key that asks for it.
        otherwise: what to do without it.

    Raises:
        UserError: with the commands that install it.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"{key} needs lm-evaluation-harness (lm_eval), which is not installed. Set up an environment "
            "that has it and start this again: bash scripts/setup.sh --zero-shot && source "
            f".venv-zero-shot/bin/activate (or pip install '.[zero-shot]'){otherwise}."
        )


def result_of(record: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """What a run's result takes from an evaluation.

    Args:
        record: the content of zero_shot.json.

    Returns:
        The accuracies of whole tasks, in per cent, and how they came about; both empty where only the first
        documents were read, or the file is damaged.
    """
    scores = {}
    for metric, (task, key) in RESULT_TASKS.items():
        # A task that was not asked for; a damaged file
        with contextlib.suppress(KeyError, TypeError):
            if record["limit"] is None and is_number(
                value := record["tasks"][task]["metrics"][key]
            ):
                scores[metric] = round(100 * value, 4)
    if not scores:
        return {}, {}
    return scores, selected(record, ("lm_eval", "tokens_per_sample", "carried_chunks"))


def result_in(folder: Path, checkpoint: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """`result_of` the zero_shot.json in a run folder, if it is of this checkpoint."""
    record = saved_json(folder / OUTPUT)
    if not record or record.get("checkpoint_sha256") != checksum(checkpoint):
        return {}, {}
    return result_of(record)
