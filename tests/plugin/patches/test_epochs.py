"""Several processes: torchrun on a CPU is refused or works; a place in an epoch fits other processes; data
workers load the epoch that is being trained."""

import multiprocessing
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
from fairseq.data import Dictionary, FairseqDataset, ListDataset, MaskTokensDataset
from fairseq.data.iterators import CountingIterator, EpochBatchIterator, GroupedIterator
from fairseq.distributed import utils as distributed_utils

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches.batches import converted_place


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def distributed(**values):
    standard = {"distributed_init_method": None, "tpu": False, "distributed_world_size": 1}
    standard.update(
        distributed_backend="nccl", ddp_backend="pytorch_ddp", distributed_no_spawn=False
    )
    standard["pipeline_model_parallel"] = False
    return SimpleNamespace(**{**standard, **values})


def test_independent_copies_are_refused(torchrun, monkeypatch):
    """torchrun works on CPUs with the right flags; one process alone is not a world."""
    with pytest.raises(
        UserError, match=r"2 independent models.*--distributed-world-size 2 .*gloo"
    ):
        distributed_utils.infer_init_method(distributed())
    with pytest.raises(
        UserError, match="need --distributed-backend gloo --ddp-backend legacy_ddp"
    ):
        distributed_utils.infer_init_method(distributed(distributed_world_size=2))
    cfg = distributed(
        distributed_world_size=4, distributed_backend="gloo", ddp_backend="legacy_ddp"
    )
    distributed_utils.infer_init_method(cfg)
    assert (cfg.distributed_init_method, cfg.distributed_world_size, cfg.distributed_rank) == (
        "env://",
        2,
        1,
    )
    assert cfg.distributed_no_spawn
    monkeypatch.delenv("WORLD_SIZE")
    cfg = distributed()
    distributed_utils.infer_init_method(cfg)
    assert cfg.distributed_init_method is None


@pytest.mark.parametrize(
    ("place", "shards", "batches", "new_shards", "new_batches", "expected"),
    [
        (10, 8, 1000, 4, 1000, 20),  # half the GPUs: each has twice as many batches behind it
        (10, 4, 1000, 8, 1000, 5),
        (
            5,
            2,
            1000,
            3,
            1000,
            3,
        ),  # 10 batches seen, 9 kept: one is seen again rather than two skipped
        (125, 8, 999, 4, 999, 249),  # the last round had one batch too few
        (
            10,
            4,
            100,
            2,
            200,
            40,
        ),  # batches cut anew, half as large: the same fraction of the epoch
        (1, 1, 50, 8, 50, 0),
    ],
)
def test_converted_place(place, shards, batches, new_shards, new_batches, expected):
    assert converted_place(place, shards, batches, new_shards, new_batches) == expected
    assert expected * new_shards < new_batches


@pytest.mark.parametrize("place", range(10))
def test_groups_go_on_from_any_place(place):
    rest = CountingIterator(range(place, 10), start=place, total=10)
    groups = GroupedIterator(rest, 4)
    seen = [number for group in groups for number in group]
    assert seen == list(range(place, 10))
    assert not groups.has_next()


class Noisy(FairseqDataset):
    """Items depend on the epoch, as masks and noise do: (epoch, index, the process that loaded it)."""

    epoch = 0

    def __getitem__(self, index):
        return torch.tensor([self.epoch, index, os.getpid()])

    def __len__(self):
        return 12

    def set_epoch(self, epoch):
        self.epoch = epoch

    def collater(self, samples):
        return torch.stack(samples)


@pytest.fixture
def epochs_over():
    """epochs_over(dataset, batches, workers, buffer_size=10) → fairseq's iterator, whose workers end in time.

    The iterator and its loader hold each other, and workers of a loader that only the garbage collector
    finds are out of its reach by then: it would wait five seconds for each.
    """
    before = set(multiprocessing.active_children())
    made = []

    def make(dataset, batches, workers, buffer_size=10):
        options = {"num_workers": workers, "buffer_size": buffer_size, "reuse_dataloader": True}
        made.append(EpochBatchIterator(dataset, dataset.collater, batches, **options))
        return made[-1]

    yield make
    for epochs in made:
        epochs.dataloader = epochs._cur_epoch_itr = epochs._next_epoch_itr = None
    end = time.monotonic() + 4  # threads that filled a buffer may be at their last line
    while set(multiprocessing.active_children()) - before and time.monotonic() < end:
        time.sleep(0.02)
    assert not set(multiprocessing.active_children()) - before


def epochs_of(epochs_over, workers, buffer_size, restart_at=None, count=3):
    """What `count` epochs of 6 batches load, [72 / count, 3] each; the second may go on at a batch."""
    batches = [[2 * number, 2 * number + 1] for number in range(6)]
    found = []
    epochs = epochs_over(Noisy(), batches, workers, buffer_size)
    for epoch in range(1, count + 1):
        if epoch == 2 and restart_at is not None:
            epochs = epochs_over(Noisy(), batches, workers, buffer_size)
            epochs.dataset.set_epoch(epoch)
            epochs.load_state_dict(
                {"version": 2, "epoch": 2, "iterations_in_epoch": restart_at, "shuffle": True}
            )
        found.append(torch.cat(list(epochs.next_epoch_itr(shuffle=True))))
        assert epochs.epoch == epoch
    return found


@pytest.mark.thorough(keep=("[1-0]", "[2-10]"))
@pytest.mark.parametrize("buffer_size", [0, 10])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_load_the_epoch_that_is_trained(epochs_over, workers, buffer_size):
    expected = [rows[:, :2] for rows in epochs_of(epochs_over, 0, 0)]
    assert [rows[:, 0].unique().tolist() for rows in expected] == [[1], [2], [3]]
    whole = epochs_of(epochs_over, workers, buffer_size)
    assert all(torch.equal(ours[:, :2], rows) for ours, rows in zip(whole, expected))
    assert all(len(rows[:, 2].unique()) == max(workers, 1) for rows in whole)
    restarted = epochs_of(epochs_over, workers, buffer_size, restart_at=2)
    expected[1] = expected[1][4:]
    assert all(torch.equal(ours[:, :2], rows) for ours, rows in zip(restarted, expected))


def test_workers_of_past_epochs_are_gone(epochs_over):
    before = set(multiprocessing.active_children())
    epochs = epochs_over(Noisy(), [[0], [1], [2], [3]], workers=2)
    for _ in range(4):
        assert len(list(epochs.next_epoch_itr())) == 4
        assert len(set(multiprocessing.active_children()) - before) <= 2


def test_validation_keeps_its_epoch_and_its_workers(epochs_over):
    dataset = Noisy()
    dataset.set_epoch(1)
    valid = epochs_over(dataset, [[0], [1]], workers=1)
    first, *later = [
        torch.cat(list(valid.next_epoch_itr(shuffle=False, set_dataset_epoch=False)))
        for _ in range(3)
    ]
    assert first[:, 0].tolist() == [1, 1]
    # The same process, too: none is started anew
    assert all(torch.equal(first, rows) for rows in later)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_curriculum_ends(epochs_over, workers):
    """--curriculum 1: the first epoch in the data's order, the others shuffled."""
    epochs = epochs_over(Noisy(), [[number] for number in range(12)], workers)
    orders = [
        torch.cat(list(epochs.next_epoch_itr(shuffle=n > 1)))[:, 1].tolist() for n in (1, 2, 3)
    ]
    assert orders[0] == sorted(orders[0])
    assert orders[1] != orders[0] and orders[2] != orders[1]
    assert sorted(orders[1]) == orders[0]


def test_a_training_set_is_validated_on_apart(build_trainer):
    """--valid-subset valid,train, in the middle of epoch 2."""
    trainer, batches = build_trainer()
    training = trainer.get_train_iterator(2, load_dataset=False)
    assert len(list(training.next_epoch_itr())) == len(batches)
    rest = training.next_epoch_itr()
    next(rest)
    place = training.state_dict()
    for _ in range(2):
        valid = trainer.get_valid_iterator("train").next_epoch_itr(
            shuffle=False, set_dataset_epoch=False
        )
        assert sum(len(batch["id"]) for batch in valid) == 120
        assert training.state_dict() == place
    assert trainer.get_train_iterator(3, load_dataset=False) is training
    assert trainer.get_valid_iterator("train") is trainer.get_valid_iterator("train")
    assert len(list(rest)) == len(batches) - 1


def test_no_masks_of_the_last_epoch_are_remembered():
    """fairseq keeps the last eight items that it made, and forgets to ask of which epoch they are."""
    dictionary = Dictionary()
    for number in range(40):
        dictionary.add_symbol(f"w{number}")
    mask = dictionary.add_symbol("<mask>")
    items = ListDataset([torch.arange(4, 44)], [40])
    source, target = MaskTokensDataset.apply_mask(
        items, dictionary, dictionary.pad(), mask, mask_prob=0.5
    )
    seen = []
    for epoch in (1, 2, 1):
        for part in (source, target):
            part.set_epoch(epoch)
        seen.append((source[0].clone(), target[0].clone()))
    assert not torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[0][1], seen[1][1])
    assert torch.equal(seen[0][0], seen[2][0]) and torch.equal(seen[0][1], seen[2][1])


def test_a_process_that_begins_in_a_later_epoch_groups_sentences_alike(build_trainer):
    """Those of one length stand in a random order, which decides who shares a batch."""
    trainer, _ = build_trainer()
    groups = []
    for epoch in (1, 3):
        trainer.task.dataset_to_epoch_iter.clear()  # as in a new process
        iterator = trainer.get_train_iterator(epoch)
        groups.append([batch.tolist() for batch in map(numpy.array, iterator.frozen_batches)])
        assert iterator.seed == 7  # by which the batches of an epoch are shuffled
    assert groups[0] == groups[1] and len(groups[0]) > 5


READING = """
import time
import torch
from fairseq.data.iterators import BufferedIterator
import moa_fairseq
moa_fairseq.register()

class Endless:
    def __len__(self):
        return 10**9

    def __iter__(self):
        while True:  # inside torch for nearly all of its time
            yield torch.ones(4, 200000).index_select(0, torch.tensor([0, 1])).sum()

next(BufferedIterator(10**8, Endless()))
time.sleep(0.2)
print("done training", flush=True)
"""


@pytest.mark.thorough
def test_a_reader_ends_with_the_process():
    line = [sys.executable, "-c", READING]
    found = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout) == (0, "done training\n"), found.stderr
