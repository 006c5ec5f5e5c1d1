"""Batches, their order, and the place in an epoch: none is lost, and a restart goes on where it stopped."""

from __future__ import annotations

import logging
import math
from typing import Any, Callable, Dict

import numpy
from fairseq.data import LRUCacheDataset

logger = logging.getLogger(__name__)


def keep_the_last_batch(batch_by_size: Callable, indices: Any, *args: Any, **options: Any) -> Any:
    """What fairseq dropped from the end of `indices` becomes the last batch."""
    if not hasattr(indices, "__len__"):
        indices = list(indices)
    batches = batch_by_size(indices, *args, **options)
    batched = sum(len(batch) for batch in batches)
    if options.get("fixed_shapes") is None and batched < len(indices):
        batches = [*batches, indices[batched:]]
    return batches


def group_as_in_the_first_epoch(
    get_batch_iterator: Callable,
    task: Any,
    dataset: Any,
    *args: Any,
    seed: int = 1,
    epoch: int = 1,
    **options: Any,
) -> Any:
    """Sentences are grouped with seed + 1, whichever epoch the process starts in."""
    fresh = options.get("update_epoch_batch_itr") or options.get("disable_iterator_cache")
    if fresh or not task.can_reuse_epoch_itr(dataset):
        return get_batch_iterator(task, dataset, *args, seed=seed, epoch=epoch, **options)
    # The task groups with seed + epoch; the iterator shuffles each epoch's batches with a seed of its own.
    iterator = get_batch_iterator(task, dataset, *args, seed=seed + 1 - epoch, epoch=epoch, **options)
    iterator.seed = seed
    return iterator


def bucket_sizes(get_buckets: Callable, sizes: Any, num_buckets: int) -> Any:
    """The sizes of buckets, without a keyword of old versions of NumPy."""
    percentages = numpy.linspace(0, 100, num_buckets + 1)[1:]
    return numpy.unique(numpy.percentile(sizes, percentages, method="lower"))


def save_the_place_of_all_processes(state_dict: Callable, iterator: Any) -> Dict[str, Any]:
    """What an epoch's iterator saves, with the numbers of processes and of batches."""
    numbers = {"num_shards": iterator.num_shards, "batches_in_epoch": len(iterator.frozen_batches)}
    return {**state_dict(iterator), **numbers}


def restore_the_place_of_all_processes(
    load_state_dict: Callable, iterator: Any, state: Dict[str, Any]
) -> None:
    """The place in an epoch, converted to this number of processes."""
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


def group_from_any_place(
    init: Callable, groups: Any, iterable: Any, chunk_size: int, *args: Any, **options: Any
) -> None:
    """Groups of --update-freq that begin inside a former group: fairseq finds one fewer than there are."""
    place = getattr(iterable, "n", 0)
    init(groups, iterable, chunk_size, *args, **options)
    if place % chunk_size:
        groups.total = groups.n + math.ceil((len(iterable) - place) / chunk_size)


def start_new_data_workers(
    next_epoch_itr: Callable,
    iterator: Any,
    shuffle: bool = True,
    fix_batches_to_gpus: bool = False,
    set_dataset_epoch: bool = True,
) -> Any:
    """Each training epoch starts its own workers, which hold the data set as `set_epoch` has left it.

    That costs about a tenth of a second of processor time per epoch; validation, whose data set never
    changes, keeps its workers. A new loader also follows the order that is asked for: the old one would keep
    the order of the first epoch, and --curriculum would never end.
    """
    if set_dataset_epoch:
        iterator.dataloader = None
    return next_epoch_itr(iterator, shuffle, fix_batches_to_gpus, set_dataset_epoch)


def forget_the_last_epoch(set_epoch: Callable, dataset: Any, epoch: int) -> None:
    """A caching data set drops its items, which belong to the epoch before."""
    set_epoch(dataset, epoch)
    LRUCacheDataset.__getitem__.cache_clear()  # one cache serves all of them
