"""Batches, their order, and the place in an epoch: no batch is lost, and a restart continues at its place.

The second argument of a change is the object whose method it changes, such as an iterator or a data set.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import queue
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
from fairseq.data import LRUCacheDataset

from moa_fairseq.plugin.patches.table import made_of, patch

logger = logging.getLogger(__name__)

_COMPAT = "plugin/test_fairseq_compat.py::"
_EPOCHS = "plugin/patches/test_epochs.py::"
_ITERATOR = "fairseq.data.iterators:EpochBatchIterator"
_readers: weakref.WeakSet = weakref.WeakSet()  # the threads that read batches
_SECONDS_TO_END = 10  # for all threads together: a data set that hangs must not hold the process


@patch("fairseq.data.data_utils:batch_by_size", f"{_COMPAT}test_the_last_batch_is_kept")
def keep_the_last_batch(batch_by_size: Callable, indices: Any, *args: Any, **options: Any) -> Any:
    """Append the sentences that are in no batch as a last batch.

    fairseq's main branch drops the last batch of a data set if its size is not a multiple of
    --required-batch-size-multiple (8), also in validation and generation.
    """
    if not hasattr(indices, "__len__"):
        indices = list(indices)
    batches = batch_by_size(indices, *args, **options)
    batched = sum(map(len, batches))
    if options.get("fixed_shapes") is None and batched < len(indices):
        batches = [*batches, indices[batched:]]
    return batches


@patch(
    "fairseq.tasks.fairseq_task:FairseqTask.get_batch_iterator",
    "test_resume.py::test_killed_and_resumed_equals_uninterrupted",
)
def group_as_in_the_first_epoch(
    get_batch_iterator: Callable,
    task: Any,
    dataset: Any,
    *args: Any,
    seed: int = 1,
    epoch: int = 1,
    **options: Any,
) -> Any:
    """Group sentences into the same batches in every epoch, whichever epoch a process begins with.

    fairseq groups sentences into batches once, with the seed of the first epoch that a process runs: a
    restart in a later epoch groups them differently, repeats some and skips others.
    """
    rebuilds = options.get("update_epoch_batch_itr") or options.get("disable_iterator_cache")
    if rebuilds or not task.can_reuse_epoch_itr(dataset):
        return get_batch_iterator(task, dataset, *args, seed=seed, epoch=epoch, **options)
    # fairseq groups with the sum of seed and epoch, which is here that of the first epoch, and shuffles with
    # the iterator's seed.
    iterator = get_batch_iterator(
        task, dataset, *args, seed=seed + 1 - epoch, epoch=epoch, **options
    )
    iterator.seed = seed
    return iterator


@patch(
    "fairseq.trainer:Trainer.get_valid_iterator",
    f"{_EPOCHS}test_a_training_set_is_validated_on_apart",
)
def validate_on_a_copy_of_the_training_set(
    get_valid_iterator: Callable, trainer: Any, subset: str, *args: Any, **options: Any
) -> Any:
    """Validate on the training set through a second data set of the same files.

    With --valid-subset valid,train, training and validation share an iterator: a validation takes an epoch
    from the training, in silence.

    The second data set also keeps its own masks.
    """
    task = trainer.task
    trained = trainer.cfg.dataset.train_subset
    if subset == trained:
        subset = f"{trained} (validation)"
        if subset not in task.datasets:
            training = task.dataset(trained)
            task.load_dataset(trained, combine=False, epoch=1)
            task.datasets.update({subset: task.datasets[trained], trained: training})
    return get_valid_iterator(trainer, subset, *args, **options)


@patch("fairseq.data.bucket_pad_length_dataset:get_buckets", f"{_COMPAT}test_batches_in_buckets")
def bucket_sizes(get_buckets: Callable, sizes: Any, num_buckets: int) -> Any:
    """The sizes of `num_buckets` buckets: percentiles of the sizes of the sentences.

    --num-batch-buckets calls NumPy with a keyword, `interpolation`, that it no longer has.
    """
    percentages = numpy.linspace(0, 100, num_buckets + 1)[1:]
    return numpy.unique(numpy.percentile(sizes, percentages, method="lower"))


@patch("numpy:compat", f"{_COMPAT}test_a_sentence_is_a_block_of_a_language_model", made_of)
def old_names_of_numpy(compat: Any) -> Any:
    """A module with the name `long` where NumPy has no `compat`.

    --sample-break-mode eos needs numpy.compat.long, which NumPy 2 no longer has.
    """
    return compat or types.SimpleNamespace(long=int)


@patch(f"{_ITERATOR}.state_dict", f"{_EPOCHS}test_converted_place")
def save_the_place_of_all_processes(state_dict: Callable, iterator: Any) -> dict[str, Any]:
    """Save the number of processes and of batches beside the place in an epoch.

    The place in an epoch is a number of batches of one process: a restart on half as many GPUs would see part
    of the epoch twice, and one on more GPUs would skip part of it.
    """
    totals = {"num_shards": iterator.num_shards, "batches_in_epoch": len(iterator.frozen_batches)}
    return state_dict(iterator) | totals


@patch(f"{_ITERATOR}.load_state_dict", f"{_EPOCHS}test_converted_place")
def restore_the_place_of_all_processes(
    load_state_dict: Callable, iterator: Any, state: dict[str, Any]
) -> None:
    """Convert the saved place in an epoch to the present number of processes and batches (`converted_place`).

    fairseq takes the saved place as a number of batches of one of the present processes.
    """
    place = state.get("iterations_in_epoch", 0)
    shards = state.get("num_shards")
    if place and shards:
        seen = place * shards
        batches = state["batches_in_epoch"]
        new_batches = len(iterator.frozen_batches)
        new_place = converted_place(place, shards, batches, iterator.num_shards, new_batches)
        resumes_after = new_place * iterator.num_shards
        if resumes_after != seen:
            logger.warning(
                f"resuming in the middle of epoch {state['epoch']} with other processes or batches: "
                f"{seen:,} of {batches:,} batches were seen, training resumes after {resumes_after:,} of "
                f"{new_batches:,}; in this epoch some sentences are seen twice, or not at all if the batches "
                "were rebuilt"
            )
        state = state | {"iterations_in_epoch": new_place}
    load_state_dict(iterator, state)


def converted_place(
    place: int, shards: int, batches: int, new_shards: int, new_batches: int
) -> int:
    """How many batches each of `new_shards` processes skips to resume at a place in an epoch.

    If the batches are the same, they keep their order: the place is exact if the new number of processes
    divides the number of batches seen, and a few batches earlier otherwise. If the batches were rebuilt
    (other --max-tokens), the place is the same fraction of the epoch.

    Args:
        place: how many batches each of the `shards` processes had seen.
        shards: how many processes there were.
        batches: how many batches the epoch had, of all processes together.
        new_shards, new_batches: the present numbers of processes and of batches.
    """
    seen = min(place * shards, batches)
    if new_batches != batches:
        seen = seen * new_batches // batches
    return seen // new_shards


@patch(
    "fairseq.data.iterators:GroupedIterator.__init__", f"{_EPOCHS}test_groups_go_on_from_any_place"
)
def group_from_any_place(
    init: Callable, groups: Any, iterable: Any, chunk_size: int, *args: Any, **options: Any
) -> None:
    """Count the groups of --update-freq from the place where an epoch resumes.

    fairseq counts the groups of --update-freq from the epoch's beginning, and finds one too few in an epoch
    that resumes inside a former group.
    """
    place = getattr(iterable, "n", 0)
    init(groups, iterable, chunk_size, *args, **options)
    if place % chunk_size:
        groups.total = groups.n + math.ceil((len(iterable) - place) / chunk_size)


@patch(f"{_ITERATOR}.next_epoch_itr", f"{_EPOCHS}test_workers_load_the_epoch_that_is_trained")
def start_new_data_workers(
    next_epoch_itr: Callable,
    iterator: Any,
    shuffle: bool = True,
    fix_batches_to_gpus: bool = False,
    set_dataset_epoch: bool = True,
) -> Any:
    """Build a new data loader, with new workers, for each epoch of a training.

    Data workers keep the data set of the epoch in which they were started: masks, noise and crops stay as in
    the first epoch.

    New workers cost about a tenth of a second of processor time per epoch; validation, whose data set never
    changes, keeps its workers. A new loader also follows the order that is asked for: the old one would keep
    the order of the first epoch, and --curriculum would never end.
    """
    if set_dataset_epoch:
        iterator.dataloader = None
    return next_epoch_itr(iterator, shuffle, fix_batches_to_gpus, set_dataset_epoch)


@patch(
    "fairseq.data.iterators:BufferedIterator._create_consumer",
    f"{_EPOCHS}test_a_reader_ends_with_the_process",
)
def end_readers_with_the_process(create_consumer: Callable, iterator: Any) -> None:
    """Remember the thread that reads batches, so that it is ended before Python ends.

    A training that ends inside an epoch leaves a thread that reads batches. If that is inside torch when
    Python ends, C++ aborts: a finished training has failed, by its exit status.
    """
    create_consumer(iterator)
    _readers.add(iterator._consumer)


@atexit.register
def _end_readers() -> None:
    deadline = time.monotonic() + _SECONDS_TO_END
    for reader in _readers:
        reader._max_len = 0  # the thread ends after the batch that it is reading
        while reader.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                reader._queue.get(timeout=0.05)


@patch(
    "fairseq.data:LRUCacheDataset.set_epoch",
    f"{_EPOCHS}test_no_masks_of_the_last_epoch_are_remembered",
)
def forget_the_last_epoch(set_epoch: Callable, dataset: Any, epoch: int) -> None:
    """Empty the cache of a data set when the epoch changes.

    A caching data set returns items of the previous epoch.
    """
    set_epoch(dataset, epoch)
    LRUCacheDataset.__getitem__.cache_clear()  # all data sets share one cache
