"""SIGTERM, which a scheduler sends before it ends a job, saves a checkpoint and then ends the training.

The update that runs is finished and checkpoint_last.pt is written, in the middle of an epoch too, and with
--no-last-checkpoints; a validation that is due follows. The process ends with status 143. Any process of a
training may receive the signal: at the next update the others learn of it, because fairseq adds up their
training times then, and all stop after the same update. Before the processes are connected there is nothing
to save, and a process that receives the signal ends at once.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from moa_fairseq.plugin.patches.table import patch

logger = logging.getLogger("fairseq_cli.train")
PROGRAMS = (
    "fairseq-train",
    "fairseq-hydra-train",
    "fairseq_cli/train.py",
    "fairseq_cli/hydra_train.py",
)
_TEST = "test_resume.py::test_a_terminated_training_saves_a_checkpoint"
_TOLD = math.inf  # what a process that was told to end gives as its training time
_STATUS = 128 + signal.SIGTERM
_told = threading.Event()


@patch("fairseq.trainer:Trainer._local_cumulative_training_time", _TEST)
def time_or_told(local_time: Callable, trainer: Any) -> float:
    """The training time of this process, or `_TOLD` once this process has received SIGTERM.

    SIGTERM kills a training and loses its work since the last checkpoint; now it saves a checkpoint first.
    This sum carries the signal to the other processes.
    """
    if was_told() and trainer._sync_stats():
        return _TOLD
    return local_time(trainer)


def saving_when_told(validate_and_save: Callable) -> Callable:
    """Wrap the function that fairseq-train calls after each update.

    Args:
        validate_and_save: fairseq's function; it returns the losses of a validation, and whether the training
            should stop.

    Returns:
        A function that, in addition, saves a checkpoint (not with --no-save) and ends the process with status
        143 if a process of the training has received SIGTERM.
    """

    @functools.wraps(validate_and_save)
    def wrapped(
        cfg: Any, trainer: Any, task: Any, epoch_itr: Any, subsets: Any, end_of_epoch: bool
    ) -> Any:
        ends_anyway = end_of_epoch or trainer.get_num_updates() >= (
            cfg.optimization.max_update or math.inf
        )
        # At the end of an epoch fairseq itself saves, and the training stops after the next update.
        if not _one_was_told(trainer) or ends_anyway:
            return validate_and_save(cfg, trainer, task, epoch_itr, subsets, end_of_epoch)
        from fairseq import checkpoint_utils

        place = f"at update {trainer.get_num_updates()}"
        if cfg.checkpoint.no_save:
            logger.info(f"SIGTERM: ending {place}; nothing is saved, because of --no-save")
        else:
            logger.info(f"SIGTERM: saving a checkpoint {place} and ending")
            settings = copy.deepcopy(cfg.checkpoint)
            # Without checkpoint_last.pt the same command would begin anew.
            settings.no_last_checkpoints = False
            # A numbered checkpoint that is due is written by validate_and_save.
            settings.save_interval_updates = 0
            checkpoint_utils.save_checkpoint(settings, trainer, epoch_itr, None)
            # A validation that is due comes afterwards: the sender of the signal may not wait for it.
            result = validate_and_save(cfg, trainer, task, epoch_itr, subsets, end_of_epoch)
            if result[1]:  # --patience is over, or the time
                return result
            # The validation changed the best value and the count of --patience, which are saved, too.
            if result[0] != [None]:
                checkpoint_utils.save_checkpoint(settings, trainer, epoch_itr, None)
        if dist.is_initialized():
            dist.barrier()  # no process ends before the checkpoint is written
        sys.exit(_STATUS)

    return wrapped


def _one_was_told(trainer: Any) -> bool:
    """Whether a process of the training has received SIGTERM."""
    if not trainer._sync_stats():
        return was_told()
    if trainer._cumulative_training_time != _TOLD:
        return False
    # The sum of the times is saved with a checkpoint, and must be finite.
    local_time = type(trainer)._local_cumulative_training_time.__wrapped__
    trainer._cumulative_training_time = local_time(trainer)
    return True


@patch(
    "fairseq.distributed.utils:distributed_init",
    "plugin/patches/test_save_on_sigterm.py::test_a_process_that_waits_for_the_others_ends_at_once",
)
def end_while_alone(distributed_init: Callable, cfg: Any) -> int:
    """Let SIGTERM end a process at once while it waits for the other processes to connect.

    SIGTERM to a process that waits for the other processes would take effect only when they arrive, and they
    may have been terminated as well.
    """
    is_handled = signal.getsignal(signal.SIGTERM) is _on_sigterm
    if is_handled:  # torch waits outside of Python, where Python's handlers do not run
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exit_if_told()
    rank = distributed_init(cfg)
    if is_handled:
        signal.signal(signal.SIGTERM, _on_sigterm)
    return rank


def was_told() -> bool:
    """Whether this process has received SIGTERM."""
    return _told.is_set()


def exit_if_told() -> None:
    """End this process with status 143 if it has received SIGTERM."""
    if was_told():
        sys.exit(_STATUS)


def _on_sigterm(*_: Any) -> None:
    if not _told.is_set():  # not logged: the signal may have interrupted what holds a log's lock
        os.write(2, b"SIGTERM: the training ends after this update\n")
    _told.set()
    for child in multiprocessing.active_children():
        # A process per GPU, not a data worker
        if isinstance(child, multiprocessing.context.SpawnProcess):
            child.terminate()


@patch("fairseq_cli.train:validate_and_save", _TEST, None)
def install() -> None:
    """Wrap `validate_and_save` of fairseq-train by `saving_when_told`, and handle SIGTERM.

    fairseq-train has no handler of SIGTERM, and does nothing after an update for a process that was told to
    end.
    """
    if not sys.argv[0].endswith(PROGRAMS):
        return
    for name in ("__main__", "fairseq_cli.train"):  # fairseq-train as a program or as a module
        function = getattr(sys.modules.get(name), "validate_and_save", None)
        # __globals__ is fairseq's own module, of which a spawned process has a copy.
        if function is not None:
            function.__globals__["validate_and_save"] = saving_when_told(function)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)
