"""Lets a task of several processes save what each of them keeps, and give it back to each."""

import functools
from typing import Any, Callable


def announcing_saves(save_checkpoint: Callable) -> Callable:
    """Wrap `checkpoint_utils.save_checkpoint`: `task.before_save(trainer, epoch_itr)` runs in every process.

    fairseq asks the first process alone for the state that a task saves (`get_checkpoint_dict`).
    """

    @functools.wraps(save_checkpoint)
    def wrapped(cfg: Any, trainer: Any, epoch_itr: Any, *args: Any, **options: Any) -> Any:
        before_save = getattr(trainer.task, "before_save", None)
        if before_save is not None and not cfg.no_save:
            before_save(trainer, epoch_itr)
        return save_checkpoint(cfg, trainer, epoch_itr, *args, **options)

    return wrapped


def announcing_restarts(load_checkpoint: Callable) -> Callable:
    """Wrap `checkpoint_utils.load_checkpoint`: `task.after_load(trainer, epoch_itr, extra_state)` follows it.

    fairseq's `set_checkpoint_dict` knows neither the model nor the place in the epoch.
    """

    @functools.wraps(load_checkpoint)
    def wrapped(cfg: Any, trainer: Any, **options: Any) -> Any:
        extra_state, epoch_itr = load_checkpoint(cfg, trainer, **options)
        after_load = getattr(trainer.task, "after_load", None)
        if extra_state is not None and after_load is not None:
            after_load(trainer, epoch_itr, extra_state)
        return extra_state, epoch_itr

    return wrapped
