"""Several processes train one model together, and no process waits for ever for one that hangs.

`--heartbeat-timeout SECONDS` sets the time limit (fairseq: "kill the job if no progress is made in N
seconds"); without the flag it is DEFAULT_SECONDS. fairseq itself only watches for a forward pass and then
interrupts Python, which has no effect on a process that waits inside a collective.
"""

from __future__ import annotations

import io
import os
import threading
import types
from datetime import timedelta
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist
from fairseq.distributed import utils as distributed_utils
from fairseq.distributed.utils import distributed_main as fairseqs_distributed_main

from moa_fairseq.errors import UserError

DEFAULT_SECONDS = 1800  # one process writes a large checkpoint on a slow network disk, the others wait
ANSWER_SECONDS = 5.0  # how long the processes that still run have to answer
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class PeerTorch(types.ModuleType):
    """Stands for torch in fairseq's communication: `load` reads only what another process sent.

    Process 0 reads a checkpoint by the allow-list and sends it to the others together with its config, whose
    type torch's own default refuses. What the processes of one training send each other is no file of unknown
    origin; fairseq exchanges it by pickle elsewhere, too.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def load(buffer: io.BytesIO, map_location: Any = None) -> Any:
        if not isinstance(buffer, io.BytesIO):
            raise TypeError("only what was received from another process is loaded here")
        return torch.load(buffer, map_location=map_location, weights_only=False)


class TimedDist(types.ModuleType):
    """Stands for torch.distributed in fairseq: every group of processes gets the time limit."""

    limit = timedelta(seconds=DEFAULT_SECONDS)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def init_process_group(self, *args: Any, **options: Any) -> Any:
        return dist.init_process_group(*args, **{"timeout": self.limit, **options})

    def new_group(self, *args: Any, **options: Any) -> Any:
        return dist.new_group(*args, **{"timeout": self.limit, **options})


def time_limit(cfg: Any) -> int:
    """Seconds that a process waits for the others in a collective."""
    chosen = cfg.distributed_training.heartbeat_timeout
    return chosen if chosen > 0 else DEFAULT_SECONDS


def distributed_main(i: int, main: Callable, cfg: Any, kwargs: Dict[str, Any]) -> None:
    """fairseq's `distributed_main`, in a process of its own or in this one.

    Raises UserError that names the processes that did not answer within the limit. It is not a wrapper under
    fairseq's name: spawned processes import a function from the module that defines it, so they import this
    package before they connect.
    """
    limit = time_limit(cfg)
    distributed_utils.dist.limit = timedelta(seconds=limit)
    try:
        fairseqs_distributed_main(i, main, cfg, kwargs)
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


def watch_later(wrapper: Callable, module: Any, timeout: int, **options: Any) -> Any:
    """fairseq's own watch over a forward pass: the message that names a rank comes first."""
    return wrapper(module, timeout=2 * (timeout + 4 * ANSWER_SECONDS), **options)


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


def refuse_separate_trainings(infer_init_method: Callable, cfg: Any, force_distributed: bool = False) -> None:
    """torchrun's processes train one model together, on CPUs too; else they are refused."""
    size = int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _TORCHRUN) else 1
    if cfg.distributed_init_method is not None or cfg.tpu or size == 1:
        return infer_init_method(cfg, force_distributed)
    on_cpu = not torch.cuda.is_available()
    if cfg.distributed_world_size == 1:
        raise UserError(
            f"torchrun started {size} processes, but fairseq would train {size} independent models that "
            f"overwrite each other's checkpoints: it takes the number of processes from the GPUs it sees "
            f"({torch.cuda.device_count()}). Add --distributed-world-size {size}"
            + (" --distributed-backend gloo --ddp-backend legacy_ddp." if on_cpu else ".")
        )
    if not on_cpu:
        return infer_init_method(cfg, force_distributed)
    if cfg.distributed_backend == "nccl" or cfg.ddp_backend == "pytorch_ddp":
        raise UserError(
            "Several processes on CPUs need --distributed-backend gloo --ddp-backend legacy_ddp: nccl "
            "and fairseq's pytorch_ddp work on GPUs only."
        )
    cfg.distributed_init_method = "env://"
    cfg.distributed_world_size = size
    cfg.distributed_rank = int(os.environ["RANK"])
    cfg.distributed_no_spawn = True
    return None
