"""The best value of the validations, which NaN must not become."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils

from moa_fairseq.plugin.patches.checkpoint_reading import load_checkpoint
from moa_fairseq.plugin.patches.table import patch

logger = logging.getLogger(__name__)
_TESTS = "plugin/patches/test_best_checkpoint.py::"


@patch("fairseq.checkpoint_utils:save_checkpoint", f"{_TESTS}test_nan_is_no_best")
def nan_is_no_best(
    save: Callable,
    cfg: Any,
    trainer: Any,
    epoch_itr: Any,
    val_loss: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Save a checkpoint whose validation is NaN, or infinitely good, without that value.

    A validation of NaN becomes fairseq's best value, and then any other value is better: a worse model
    replaces checkpoint_best.pt.
    """
    if val_loss is not None and not _can_be_best(val_loss, cfg):
        logger.warning(
            f"the validation's {cfg.best_checkpoint_metric} is {val_loss}: this checkpoint is never the best"
        )
        val_loss = None
    return save(cfg, trainer, epoch_itr, val_loss, *args, **options)


@patch(
    "fairseq.checkpoint_utils:load_checkpoint", f"{_TESTS}test_a_best_value_of_nan_is_not_restored"
)
def restore_a_finite_best(load: Callable, cfg: Any, trainer: Any, **options: Any) -> Any:
    """Replace a best value of NaN that was loaded by the value in checkpoint_best.pt.

    Older checkpoints have NaN as the best value.
    """
    result = load(cfg, trainer, **options)
    save = checkpoint_utils.save_checkpoint  # fairseq keeps the best value at this function
    if not _can_be_best(getattr(save, "best", 0.0), cfg):
        path = os.path.join(cfg.save_dir, f"checkpoint_best{trainer.checkpoint_suffix}.pt")
        state = load_checkpoint(path) if os.path.exists(path) else {}
        del save.best
        best = state.get("extra_state", {}).get("val_loss")
        if best is not None and _can_be_best(best, cfg):
            save.best = best
    return result


@patch("fairseq_cli.*:should_stop_early", f"{_TESTS}test_nan_does_not_end_a_training_early")
def nan_is_the_worst(should_stop_early: Callable, cfg: Any, valid_loss: Any) -> bool:
    """Count a validation of NaN as the worst value.

    If the first validation is NaN, no later one is better: --patience ends the training.
    """
    if valid_loss is not None and not _can_be_best(valid_loss, cfg.checkpoint):
        valid_loss = -math.inf if cfg.checkpoint.maximize_best_checkpoint_metric else math.inf
    return should_stop_early(cfg, valid_loss)


def _can_be_best(value: float, cfg: Any) -> bool:
    """Whether another value could be better than this one: none is better than NaN or the best infinity."""
    # A caller may have fewer settings than fairseq's commands.
    if getattr(cfg, "maximize_best_checkpoint_metric", False):
        return value < math.inf
    return value > -math.inf
