"""The part of zero_shot.json, the file of `moa-fairseq zero-shot`, that goes into a run's result."""

import contextlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.records.json_files import is_number, saved_json, selected
from moa_fairseq.files import checksum

OUTPUT = "zero_shot.json"
# Metric of a result, in per cent → lm_eval's task or group, and the metric of that task
RESULT_TASKS = {
    "lambada_acc": ("lambada_openai", "acc"),
    "blimp_acc": ("blimp", "acc"),
    "cbt_acc": ("cbt", "acc"),
}


def require_lm_eval(key: str, otherwise: str = "") -> None:
    """Check that lm_eval is installed, without importing it, because it starts threads.

    Args:
        key: the flag or the key of a recipe that needs it.
        otherwise: the end of the message: what to do without lm_eval.

    Raises:
        UserError: if it is not installed; the message has the commands that install it.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"{key} needs lm-evaluation-harness (lm_eval), which is not installed. Set up an environment "
            "that has it and start this again: bash scripts/setup.sh --zero-shot && source "
            f".venv-zero-shot/bin/activate (or pip install '.[zero-shot]'){otherwise}."
        )


def result_of(record: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """The part of an evaluation that goes into a run's result.

    Args:
        record: the content of zero_shot.json.

    Returns:
        Metric → accuracy of a whole task in per cent, and the settings of the evaluation. Both are empty if
        only the first documents were read, or if the file is damaged.
    """
    scores = {}
    for metric, (task, key) in RESULT_TASKS.items():
        # The task was not evaluated, or the file is damaged
        with contextlib.suppress(KeyError, TypeError):
            value = record["tasks"][task]["metrics"][key]
            if record["limit"] is None and is_number(value):
                scores[metric] = round(100 * value, 4)
    if not scores:
        return {}, {}
    return scores, selected(record, ("lm_eval", "tokens_per_sample", "carried_chunks"))


def result_in(folder: Path, checkpoint: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """What `result_of` returns for the zero_shot.json of a run, if that evaluated this checkpoint.

    Args:
        folder: the run folder.
        checkpoint: the checkpoint that the result is about.
    """
    record = saved_json(folder / OUTPUT)
    if not record or record.get("checkpoint_sha256") != checksum(checkpoint):
        return {}, {}
    return result_of(record)
