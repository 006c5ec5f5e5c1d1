"""Several processes: torchrun on a CPU is refused or works; a place in an epoch fits other processes."""

from types import SimpleNamespace

import pytest
from fairseq.data.iterators import CountingIterator, GroupedIterator
from fairseq.distributed import utils as distributed_utils

from moa_fairseq.errors import UserError
from moa_fairseq.fairseq_workers import converted_place


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def distributed(**values):
    standard = {"distributed_init_method": None, "tpu": False, "distributed_world_size": 1}
    standard.update(distributed_backend="nccl", ddp_backend="pytorch_ddp", distributed_no_spawn=False)
    standard["pipeline_model_parallel"] = False
    return SimpleNamespace(**{**standard, **values})


def test_independent_copies_are_refused(torchrun):
    with pytest.raises(UserError, match=r"2 independent models.*--distributed-world-size 2 .*gloo"):
        distributed_utils.infer_init_method(distributed())


def test_torchrun_works_on_cpus_with_the_right_flags(torchrun):
    with pytest.raises(UserError, match="need --distributed-backend gloo --ddp-backend legacy_ddp"):
        distributed_utils.infer_init_method(distributed(distributed_world_size=2))
    cfg = distributed(distributed_world_size=4, distributed_backend="gloo", ddp_backend="legacy_ddp")
    distributed_utils.infer_init_method(cfg)
    assert (cfg.distributed_init_method, cfg.distributed_world_size, cfg.distributed_rank) == ("env://", 2, 1)
    assert cfg.distributed_no_spawn


def test_one_process_alone_is_no_world(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    cfg = distributed()
    distributed_utils.infer_init_method(cfg)
    assert cfg.distributed_init_method is None


@pytest.mark.parametrize(
    ("place", "shards", "batches", "new_shards", "new_batches", "expected"),
    [
        (10, 8, 1000, 4, 1000, 20),  # half the GPUs: each has twice as many batches behind it
        (10, 4, 1000, 8, 1000, 5),
        (5, 2, 1000, 3, 1000, 3),  # 10 batches seen, 9 kept: one is seen again rather than two skipped
        (125, 8, 999, 4, 999, 249),  # the last round had one batch too few
        (10, 4, 100, 2, 200, 40),  # batches cut anew, half as large: the same fraction of the epoch
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
