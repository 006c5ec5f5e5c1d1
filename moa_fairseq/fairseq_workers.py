"""Changes to fairseq for training with several processes; `fairseq_compat.install()` makes them.

1. torchrun's processes train one model together. Where fairseq takes the number of processes to be 1 (on a
   CPU, or with one GPU per machine) it ignores torchrun and trains as many *independent* models as
   there are processes, all writing the same files. That is refused here; with --distributed-world-size
   torchrun works on CPUs too, where fairseq divides by the number of GPUs.
2. A training may go on with another number of processes. fairseq keeps the place in an epoch as a number
   of batches *of one process*, so that a restart on half as many GPUs would see part of the epoch
   twice, and one on more GPUs would skip part of it. Here the place is kept for all processes together.
3. A training of several processes can be resumed with torch >= 2.6. Process 0 reads the checkpoint (by
   `fairseq_compat`'s allow-list) and sends it to the others together with its config, whose type
   torch's own default refuses. What the processes of one training send each other is no file of unknown
   origin; fairseq exchanges it by pickle elsewhere, too.
4. Data workers (--num-workers, 1 by default) load the epoch that is being trained. fairseq keeps the worker
   processes for the whole training, with the data set as it was when they were started: what depends on the
   epoch (the masks of a masked LM, noise, crops) stays as in the first epoch until a restart. Here each
   training epoch starts its own workers, which hold the data set as `set_epoch` has left it. That costs about
   a tenth of a second of processor time per epoch, for a thousand tokens or a hundred million; on a CPU,
   whose process holds gigabytes of freed memory, copying what it writes to beside the worker costs seconds;
   recipes have no worker there. Validation, whose data set never changes, keeps its workers.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import os
import types
from typing import Any, Callable, Dict

import torch

from moa_fairseq.errors import UserError

logger = logging.getLogger(__name__)

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class _PeerTorch(types.ModuleType):
    """Stands for torch in fairseq's communication: `load` reads only what another process sent."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def load(buffer: io.BytesIO, map_location: Any = None) -> Any:
        if not isinstance(buffer, io.BytesIO):
            raise TypeError("only what was received from another process is loaded here")
        return torch.load(buffer, map_location=map_location, weights_only=False)


def torchrun_size() -> int:
    """Number of processes that torchrun started together with this one; 1 when it started none."""
    if not all(name in os.environ for name in _TORCHRUN):
        return 1
    return int(os.environ["WORLD_SIZE"])


def _refusing_separate_trainings(infer_init_method: Callable) -> Callable:
    """Wrap the step that finds out how processes connect.

    Refuses to start when torchrun started several processes that would each train a model of their own.
    """

    @functools.wraps(infer_init_method)
    def wrapped(cfg: Any, force_distributed: bool = False) -> None:
        size = torchrun_size()
        if cfg.distributed_init_method is not None or cfg.tpu or size == 1:
            return infer_init_method(cfg, force_distributed)
        if cfg.distributed_world_size == 1:
            raise UserError(
                f"torchrun started {size} processes, but fairseq would train {size} independent models that "
                f"overwrite each other's checkpoints: it takes the number of processes from the GPUs it sees "
                f"({torch.cuda.device_count()}). Add --distributed-world-size {size}"
                + (" --distributed-backend gloo --ddp-backend legacy_ddp." if _on_cpu() else ".")
            )
        if not _on_cpu():
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

    return wrapped


def _on_cpu() -> bool:
    return not torch.cuda.is_available()


def _saving_the_place_of_all_processes(state_dict: Callable) -> Callable:
    """Wrap the state that an epoch's iterator saves: add the numbers of processes and of batches."""

    @functools.wraps(state_dict)
    def wrapped(iterator: Any) -> Dict[str, Any]:
        return {
            **state_dict(iterator),
            "num_shards": iterator.num_shards,
            "batches_in_epoch": len(iterator.frozen_batches),
        }

    return wrapped


def _restoring_the_place_of_all_processes(load_state_dict: Callable) -> Callable:
    """Wrap the restoring of an epoch's iterator: convert the place to this number of processes."""

    @functools.wraps(load_state_dict)
    def wrapped(iterator: Any, state: Dict[str, Any]) -> None:
        place, shards = state.get("iterations_in_epoch", 0), state.get("num_shards")
        if place and shards:
            batches = len(iterator.frozen_batches)
            now = converted_place(place, shards, state["batches_in_epoch"], iterator.num_shards, batches)
            if now * iterator.num_shards != place * shards:
                logger.warning(
                    f"going on in the middle of epoch {state['epoch']} with other processes or batches: "
                    f"{place * shards:,} of {state['batches_in_epoch']:,} batches were seen, training goes "
                    f"on behind {now * iterator.num_shards:,} of {batches:,}; some sentences of this one "
                    "epoch are seen twice, or not at all where the batches were cut anew"
                )
            state = {**state, "iterations_in_epoch": now}
        load_state_dict(iterator, state)

    return wrapped


def converted_place(place: int, shards: int, batches: int, new_shards: int, new_batches: int) -> int:
    """Batches of each of `new_shards` processes that come before the place in an epoch.

    place: batches that each of `shards` processes has seen, of `batches` in all. The same batches keep
    their order, so the place is exact when the new number of processes divides the seen batches, else
    a few batches earlier; batches cut anew (other --max-tokens) keep the place as a fraction.
    """
    seen = min(place * shards, batches)
    if new_batches != batches:
        seen = seen * new_batches // batches
    return seen // new_shards


def _from_any_place(init: Callable) -> Callable:
    """Wrap the grouping of batches for --update-freq: an epoch may go on inside a former group.

    fairseq counts the groups from the epoch's beginning and then finds one fewer than there are.
    """

    @functools.wraps(init)
    def wrapped(grouped: Any, iterable: Any, chunk_size: int, *args: Any, **options: Any) -> None:
        place = getattr(iterable, "n", 0)
        init(grouped, iterable, chunk_size, *args, **options)
        if place % chunk_size:
            grouped.total = grouped.n + math.ceil((len(iterable) - place) / chunk_size)

    return wrapped


def _starting_new_data_workers(next_epoch_itr: Callable) -> Callable:
    """Wrap the step to the next epoch: if the data set is told of it, its workers are started anew.

    A new loader also follows the order that is asked for. The old one would keep the order of the first
    epoch, and --curriculum would never end.
    """

    @functools.wraps(next_epoch_itr)
    def wrapped(
        iterator: Any, shuffle: bool = True, fix_batches_to_gpus: bool = False, set_dataset_epoch: bool = True
    ) -> Any:
        if set_dataset_epoch:
            iterator.dataloader = None
        return next_epoch_itr(iterator, shuffle, fix_batches_to_gpus, set_dataset_epoch)

    return wrapped


def _forgetting_the_last_epoch(set_epoch: Callable) -> Callable:
    """Wrap `set_epoch` of a caching data set: drop its items, which belong to the epoch before."""
    from fairseq.data import LRUCacheDataset

    @functools.wraps(set_epoch)
    def wrapped(dataset: Any, epoch: int) -> None:
        set_epoch(dataset, epoch)
        LRUCacheDataset.__getitem__.cache_clear()  # one cache serves all of them

    return wrapped


def install() -> None:
    """Wrap fairseq's functions, once per process."""
    from fairseq.data import LRUCacheDataset, iterators
    from fairseq.distributed import utils as distributed_utils

    if not isinstance(distributed_utils.torch, _PeerTorch):
        distributed_utils.torch = _PeerTorch("torch")
    for owner, name, wrap in (
        (distributed_utils, "infer_init_method", _refusing_separate_trainings),
        (iterators.EpochBatchIterator, "state_dict", _saving_the_place_of_all_processes),
        (iterators.EpochBatchIterator, "load_state_dict", _restoring_the_place_of_all_processes),
        (iterators.EpochBatchIterator, "next_epoch_itr", _starting_new_data_workers),
        (iterators.GroupedIterator, "__init__", _from_any_place),
        (LRUCacheDataset, "set_epoch", _forgetting_the_last_epoch),
    ):
        original = getattr(owner, name)
        if not hasattr(original, "__wrapped__"):
            setattr(owner, name, wrap(original))
