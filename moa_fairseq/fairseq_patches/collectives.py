"""Collectives have a time limit, so that no process waits for ever for one that hangs.

`--heartbeat-timeout SECONDS` sets it (fairseq: "kill the job if no progress is made in N seconds"); without
the flag it is DEFAULT_SECONDS. fairseq itself only watches for a forward pass and then interrupts Python,
which has no effect on a process that waits inside a collective.
"""

from __future__ import annotations

import functools
import threading
import types
from datetime import timedelta
from typing import Any, Callable, Dict, List

import torch.distributed as dist
from fairseq.distributed import utils as distributed_utils

from moa_fairseq.errors import UserError

DEFAULT_SECONDS = 1800  # one process writes a large checkpoint on a slow network disk, the others wait
ANSWER_SECONDS = 5.0  # how long the processes that still run have to answer
_fairseqs: Dict[str, Callable] = {}  # the functions that are replaced here, for `distributed_main`


def time_limit(cfg: Any) -> int:
    """Seconds that a process waits for the others in a collective."""
    chosen = cfg.distributed_training.heartbeat_timeout
    return chosen if chosen > 0 else DEFAULT_SECONDS


class _TimedDist(types.ModuleType):
    """Stands for torch.distributed in fairseq: every group of processes gets the time limit."""

    limit = timedelta(seconds=DEFAULT_SECONDS)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def init_process_group(self, *args: Any, **options: Any) -> Any:
        return dist.init_process_group(*args, **{"timeout": self.limit, **options})

    def new_group(self, *args: Any, **options: Any) -> Any:
        return dist.new_group(*args, **{"timeout": self.limit, **options})


def distributed_main(i: int, main: Callable, cfg: Any, kwargs: Dict[str, Any]) -> None:
    """fairseq's `distributed_main`, in a process of its own or in this one.

    Raises UserError that names the processes that did not answer within the limit.
    """
    distributed_utils.dist = _TimedDist("torch.distributed")
    limit = time_limit(cfg)
    distributed_utils.dist.limit = timedelta(seconds=limit)
    try:
        _fairseqs["distributed_main"](i, main, cfg, kwargs)
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        silent = _silent_ranks()
        if not any(sign in str(error).lower() for sign in ("timed out", "timeout")):
            raise
        who = " and ".join(map(str, silent)) or "another process"
        raise UserError(
            f"Rank {dist.get_rank()} (of {dist.get_world_size()}) waited {limit} seconds for rank {who}, "
            f"which did not answer: it hangs, was stopped, or its machine is gone. Look at its log, end what "
            f"is left of it, and start the same training again; it goes on from the last checkpoint. If it "
            f"was only slow, allow more with --heartbeat-timeout SECONDS."
        ) from error


def with_a_time_limit(fairseqs_distributed_main: Callable) -> Callable:
    """Replace fairseq's `distributed_main` with the one of this module.

    It is not a wrapper under fairseq's name: spawned processes import a function from the module that defines
    it, so they import this package before they connect.
    """
    _fairseqs["distributed_main"] = fairseqs_distributed_main
    return distributed_main


def watching_later(wrapper: Callable) -> Callable:
    """Wrap fairseq's `DistributedTimeoutWrapper`: the message that names a rank comes first."""

    @functools.wraps(wrapper)
    def wrapped(module: Any, timeout: int, **options: Any) -> Any:
        return wrapper(module, timeout=2 * (timeout + 4 * ANSWER_SECONDS), **options)

    return wrapped


def _silent_ranks() -> List[int]:
    """The ranks that do not report within ANSWER_SECONDS that their collective has failed, too.

    The processes report it in the store through which they connected. Process 0 holds it: if the store does
    not answer, process 0 is the silent one.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    silent = [0]

    def ask() -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"moa_fairseq/waited/{rank}", "1")
        missing = [other for other in range(size) if other != rank]
        waiting = threading.Event()
        for _ in range(10):
            missing = [other for other in missing if not store.check([f"moa_fairseq/waited/{other}"])]
            if not missing:
                break
            waiting.wait(ANSWER_SECONDS / 10)
        silent[:] = missing

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * ANSWER_SECONDS)
    return silent
