"""Several processes train one model together, and no process waits for ever for one that hangs.

`--heartbeat-timeout SECONDS` sets the time limit (fairseq: "kill the job if no progress is made in N
seconds"); without the flag it is DEFAULT_SECONDS. fairseq itself only waits for a forward pass to end, and
then interrupts Python, which has no effect on a process that waits inside a collective.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fairseq.distributed import utils as distributed_utils
from fairseq.distributed.utils import distributed_main as fairseqs_distributed_main

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches.table import Proxy, made_of, patch, replaced

# While one process writes a large checkpoint on a slow network disk, the others wait.
DEFAULT_SECONDS = 1800
ANSWER_SECONDS = 5.0  # in which the processes that still run must answer
_STOPPED = "plugin/patches/test_collectives.py::test_a_stopped_process_is_named"
# Parts of the messages of torch's collectives when a process is gone.
_CUT_OFF = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
)
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@patch(
    "fairseq.distributed.utils:torch",
    "plugin/test_fairseq_compat.py::test_workers_send_each_other_configs_but_load_no_file",
    made_of,
)
class PeerTorch(Proxy):
    """torch, whose `load` unpickles what another process of the training sent.

    A training of several processes cannot be resumed with torch >= 2.6: process 0 sends the others a config,
    whose type torch refuses.

    What the processes of one training send each other is not a file of unknown origin, and `load` takes
    nothing else; elsewhere, too, fairseq exchanges such objects by pickle.
    """

    @staticmethod
    def load(buffer: io.BytesIO, map_location: Any = None) -> Any:
        """torch.load of any object.

        Args:
            buffer: the bytes from another process.
            map_location: the device of the tensors, as torch.load takes it.

        Raises:
            TypeError: if `buffer` is anything but bytes in memory.
        """
        if not isinstance(buffer, io.BytesIO):
            raise TypeError("only what was received from another process is loaded here")
        return torch.load(buffer, map_location=map_location, weights_only=False)


@patch("fairseq.distributed.utils:dist", _STOPPED, made_of)
class TimedDist(Proxy):
    """torch.distributed, whose groups of processes have the time limit `limit`.

    No group of processes has a time limit of the user's choice (--heartbeat-timeout).
    """

    limit = timedelta(seconds=DEFAULT_SECONDS)

    def init_process_group(self, *args: Any, **options: Any) -> Any:
        """torch's function, with the time limit.

        Raises:
            UserError: if another program has taken the port.
        """
        try:
            return dist.init_process_group(*args, **({"timeout": self.limit} | options))
        # torch raises a RuntimeError for every fault; the text tells them apart.
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error):
                raise
            place = options.get("init_method")
            flag = "--distributed-init-method"
            if place in (None, "env://"):
                place = ":".join(os.environ.get(name, "?") for name in _TORCHRUN[2:])
                flag = "MASTER_PORT"
            raise UserError(
                f"{place}: its port is taken by another program, perhaps another training on this machine. "
                f"Give every process of this training another port ({flag})."
            ) from error

    def new_group(self, *args: Any, **options: Any) -> Any:
        return dist.new_group(*args, **({"timeout": self.limit} | options))


def time_limit(cfg: Any) -> int:
    """The seconds that a process waits for the others in a collective."""
    seconds = cfg.distributed_training.heartbeat_timeout
    return seconds if seconds > 0 else DEFAULT_SECONDS


@patch("fairseq.distributed.utils:distributed_main", _STOPPED, replaced)
def distributed_main(i: int, main: Callable, cfg: Any, kwargs: dict[str, Any]) -> None:
    """fairseq's function of this name, with the time limit and an error that names silent processes.

    When a process hangs, the others wait for half an hour without naming it; when a process is killed, they
    end in a traceback without its name.

    This replaces fairseq's function instead of wrapping it: a spawned process imports the function from the
    module that defines it, and so imports this package before it connects.

    Raises:
        UserError: names the processes that did not answer within the limit, or that lost their connection.
    """
    limit = time_limit(cfg)
    distributed_utils.dist.limit = timedelta(seconds=limit)
    try:
        fairseqs_distributed_main(i, main, cfg, kwargs)
    except RuntimeError as error:  # torch's type for every fault; the text tells them apart
        if not dist.is_initialized():
            raise
        silent = _silent_ranks()
        text = str(error).lower()
        is_cut_off = any(sign in text for sign in _CUT_OFF)
        if not is_cut_off and "timed out" not in text and "timeout" not in text:
            raise
        this = f"Rank {dist.get_rank()} (of {dist.get_world_size()})"
        others = " and ".join(map(str, silent)) or "another process"
        if is_cut_off:
            raise UserError(
                f"{this} lost rank {others}, which failed or was killed: look at its log, and at the memory "
                "of its machine. Start the same training again; it resumes from the last checkpoint."
            ) from error
        raise UserError(
            f"{this} waited {limit} seconds for rank {others}, which did not answer: it hangs, was stopped, "
            "or its machine is down. Look at its log, end its remaining processes, and start the same "
            "training again; it resumes from the last checkpoint. If the rank was only slow, raise "
            "--heartbeat-timeout SECONDS."
        ) from error


@patch("fairseq.models.distributed_fairseq_model:DistributedTimeoutWrapper", _STOPPED)
def watch_later(wrapper: Callable, module: Any, timeout: int, **options: Any) -> Any:
    """Give fairseq's watch of a forward pass a longer timeout than the collectives have.

    Its timeout would interrupt the process just before the message that names the rank.
    """
    return wrapper(module, timeout=2 * (timeout + 4 * ANSWER_SECONDS), **options)


def _silent_ranks() -> list[int]:
    """The ranks that do not report within ANSWER_SECONDS that their collective has failed, too.

    The processes report this in the store through which they connected. Process 0 holds the store: if it does
    not answer, process 0 is the silent one.
    """
    size = dist.get_world_size()
    rank = dist.get_rank()
    silent = [0]  # unless the store answers

    def ask() -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"moa_fairseq/waited/{rank}", "1")
        missing = [peer for peer in range(size) if peer != rank]
        for _ in range(10):
            missing = [peer for peer in missing if not store.check([f"moa_fairseq/waited/{peer}"])]
            if not missing:
                break
            time.sleep(ANSWER_SECONDS / 10)
        silent[:] = missing

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * ANSWER_SECONDS)
    return silent


@patch(
    "fairseq.distributed.utils:infer_init_method",
    "plugin/patches/test_epochs.py::test_independent_copies_are_refused",
)
def refuse_separate_trainings(
    infer_init_method: Callable, cfg: Any, force_distributed: bool = False
) -> None:
    """Let torchrun's processes train one model, or refuse to start.

    If fairseq sets the number of processes to 1 (on a CPU, or with one GPU per machine), torchrun's processes
    train independent models that overwrite each other's files. Now this is an error; on CPUs they train
    together.

    Raises:
        UserError: if the processes would train apart, or a backend does not work on CPUs.
    """
    size = int(os.environ["WORLD_SIZE"]) if os.environ.keys() >= set(_TORCHRUN) else 1
    if cfg.distributed_init_method is not None or cfg.tpu or size == 1:
        return infer_init_method(cfg, force_distributed)
    on_cpu = not torch.cuda.is_available()
    if cfg.distributed_world_size == 1:
        raise UserError(
            f"torchrun started {size} processes, but fairseq would train {size} independent models that "
            f"overwrite each other's checkpoints: fairseq takes the number of processes from the visible "
            f"GPUs ({torch.cuda.device_count()}). Add --distributed-world-size {size}"
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
