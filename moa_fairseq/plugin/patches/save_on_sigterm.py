"""SIGTERM, which a scheduler sends before it ends a job, saves a checkpoint and then ends the training.

The update that runs is finished and checkpoint_last.pt written, in the middle of an epoch too, and with
--no-last-checkpoints; a validation that is due follows. The process ends with status 143. Any process of a
training may be told: with the next update the others learn it, because fairseq adds up their training times
then, and all stop after the same update. Before the processes have found each other there is nothing to save,
and the one that is told ends at once.
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
_asked = threading.Event()


@patch("fairseq.trainer:Trainer._local_cumulative_training_time", _TEST)
def tell_the_others(local_time: Callable, trainer: Any) -> float:
    """SIGTERM kills a training and loses its work since the last checkpoint; now it saves a checkpoint first.
    This sum carries the signal to the other processes.

    It is infinite once a process was told.
    """
    if was_asked() and trainer._sync_stats():
        return math.inf
    return local_time(trainer)


def saving_when_told(validate_and_save: Callable) -> Callable:
    """Wrap what fairseq-train calls after each update.

    Args:
        validate_and_save: fairseq's; it returns the losses of a validation, and whether training should stop.

    Returns:
        The same function, but where the process was told to end it saves a checkpoint (not with --no-save)
        and ends the process with status 143.
    """

    @functools.wraps(validate_and_save)
    def wrapped(
        cfg: Any, trainer: Any, task: Any, epoch_itr: Any, subsets: Any, end_of_epoch: bool
    ) -> Any:
        stops = was_asked()
        if trainer._sync_stats():
            stops = trainer._cumulative_training_time == math.inf
            if stops:  # it is saved with a checkpoint
                local_time = type(trainer)._local_cumulative_training_time.__wrapped__
                trainer._cumulative_training_time = local_time(trainer)
        last = end_of_epoch or trainer.get_num_updates() >= (
            cfg.optimization.max_update or math.inf
        )
        if not stops or last:  # at the end of an epoch fairseq saves; the next update is the last
            return validate_and_save(cfg, trainer, task, epoch_itr, subsets, end_of_epoch)
        from fairseq import checkpoint_utils

        place = f"at update {trainer.get_num_updates()}"
        if cfg.checkpoint.no_save:
            logger.info(f"SIGTERM: ending {place}; nothing is saved, because of --no-save")
        else:
            logger.info(f"SIGTERM: saving a checkpoint {place} and ending")
            settings = copy.deepcopy(cfg.checkpoint)
            settings.no_last_checkpoints = False  # without one, the same command would begin anew
            settings.save_interval_updates = 0  # validate_and_save writes that one
            checkpoint_utils.save_checkpoint(settings, trainer, epoch_itr, None)
            # only then what is due at this update: who sent the signal may not wait for a validation
            result = validate_and_save(cfg, trainer, task, epoch_itr, subsets, end_of_epoch)
            if result[1]:  # --patience is over, or the time
                return result
            if result[0] != [None]:  # with the best value and the count of --patience
                checkpoint_utils.save_checkpoint(settings, trainer, epoch_itr, None)
        if dist.is_initialized():
            dist.barrier()  # nobody leaves before it is written
        sys.exit(128 + signal.SIGTERM)

    return wrapped


@patch(
    "fairseq.distributed.utils:distributed_init",
    "plugin/patches/test_save_on_sigterm.py::test_a_process_that_waits_for_the_others_ends_at_once",
)
def end_while_alone(distributed_init: Callable, cfg: Any) -> int:
    """SIGTERM to a process that waits for the other processes would take effect only when they arrive, and
    they may have been terminated as well.
    """
    waits = signal.getsignal(signal.SIGTERM) is _remember
    if waits:  # torch waits outside of Python, where no handler of ours runs
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if was_asked():
        sys.exit(128 + signal.SIGTERM)
    rank = distributed_init(cfg)
    if waits:
        signal.signal(signal.SIGTERM, _remember)
    return rank


def was_asked() -> bool:
    """Whether this process was told to end."""
    return _asked.is_set()


def _remember(*_: Any) -> None:
    if not _asked.is_set():  # a log's lock may be held by what the signal interrupts
        os.write(2, b"SIGTERM: the training ends after this update\n")
    _asked.set()
    for child in multiprocessing.active_children():
        # A process per GPU, not a data worker
        if isinstance(child, multiprocessing.context.SpawnProcess):
            child.terminate()


@patch("fairseq_cli.train:validate_and_save", _TEST, None)
def install() -> None:
    """The same, after each update; fairseq-train has its own handler of SIGTERM.

    It may have been called as a program or as a module.
    """
    if not sys.argv[0].endswith(PROGRAMS):
        return
    for name in ("__main__", "fairseq_cli.train"):
        function = getattr(sys.modules.get(name), "validate_and_save", None)
        # The name in fairseq's own module, also where a spawned process has a copy
        if function is not None:
            function.__globals__["validate_and_save"] = saving_when_told(function)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _remember)
