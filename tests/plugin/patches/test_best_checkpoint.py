"""The best checkpoint is that of the best number, whatever NaN comes between."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig
from fairseq_cli import train

from moa_fairseq.plugin.fairseq_compat import PATCHES, load_checkpoint
from moa_fairseq.plugin.patches.best_value import nan_is_the_worst
from moa_fairseq.plugin.patches.table import wrapped_by

NAN = math.nan
INF = math.inf


def forget_best():
    """fairseq keeps the best value and the count of --patience at its functions."""
    for function in (checkpoint_utils.save_checkpoint, train.should_stop_early):
        for name in ("best", "num_runs"):
            vars(function).pop(name, None)


@pytest.fixture(autouse=True)
def _anew():
    forget_best()
    yield
    forget_best()


def settings(folder, **values):
    return CheckpointConfig(save_dir=str(folder), no_epoch_checkpoints=True, **values)


class Run:
    """A trainer and an iterator at the end of an epoch, as `save_checkpoint` asks them."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.epoch = 0
        self.extra = None
        self.data_parallel_rank = 0
        self.should_save_checkpoint_on_current_rank = True
        self.checkpoint_suffix, self.task = "", SimpleNamespace()

    def validated(self, value):
        self.epoch += 1
        checkpoint_utils.save_checkpoint(self.cfg, self, self, value)

    def save_checkpoint(self, path, extra):
        checkpoint_utils.torch_persistent_save(
            {"model": {"w": torch.full((1,), float(self.epoch))}, "extra_state": extra}, path
        )
        return path

    def load_checkpoint(self, path, *_, **options):
        return load_checkpoint(path)["extra_state"]

    def consolidate_optimizer(self):
        pass

    def end_of_epoch(self):
        return True

    def get_num_updates(self):
        return self.epoch

    def state_dict(self):
        return {"epoch": self.epoch}

    def get_train_iterator(self, *_, **options):
        return self

    def load_state_dict(self, state):
        self.epoch = state["epoch"]

    def lr_step(self, epoch):
        pass


def best(folder):
    """The epoch of the best checkpoint and its value; None without one."""
    path = folder / "checkpoint_best.pt"
    if not path.exists():
        return None
    state = load_checkpoint(path)
    return state["model"]["w"].item(), state["extra_state"]["best"]


@pytest.mark.parametrize(
    "values, maximize, expected",
    [
        ((3.0, NAN, 9.0, 8.0), False, (1, 3.0)),
        ((3.0, NAN, 9.0, 2.0), False, (4, 2.0)),
        ((NAN, 9.0, 8.0, 8.5), False, (3, 8.0)),
        ((3.0, -INF, 2.0), False, (3, 2.0)),
        ((INF, 3.0, INF), False, (2, 3.0)),
        ((NAN, NAN), False, None),
        ((30.0, NAN, 9.0, 8.0), True, (1, 30.0)),
        ((NAN, 9.0, INF, 10.0), True, (4, 10.0)),
    ],
)
def test_nan_is_no_best(tmp_path, values, maximize, expected):
    run = Run(
        settings(tmp_path, maximize_best_checkpoint_metric=maximize, keep_best_checkpoints=2)
    )
    for value in values:
        run.validated(value)
    assert best(tmp_path) == expected
    assert not list(tmp_path.glob("*nan*"))  # fairseq would not find it again to remove it
    assert load_checkpoint(tmp_path / "checkpoint_last.pt")["model"]["w"] == len(values)


@pytest.mark.parametrize("known", [True, False])
def test_a_best_value_of_nan_is_not_restored(tmp_path, known):
    """A training that was saved by an older version after a validation of NaN."""
    run = Run(settings(tmp_path))
    if known:
        run.validated(3.0)
    run.validated(NAN)
    state = load_checkpoint(tmp_path / "checkpoint_last.pt")
    state["extra_state"]["best"] = NAN
    torch.save(state, tmp_path / "checkpoint_last.pt")
    forget_best()
    checkpoint_utils.load_checkpoint(run.cfg, run)
    for value in (9.0, 8.0):
        run.validated(value)
    assert best(tmp_path) == ((1, 3.0) if known else (3, 8.0))


@pytest.mark.parametrize("maximize", [False, True])
def test_nan_does_not_end_a_training_early(maximize):
    cfg = SimpleNamespace(
        checkpoint=settings("", maximize_best_checkpoint_metric=maximize, patience=2)
    )
    stop = wrapped_by(train.should_stop_early, nan_is_the_worst)
    sign = 1.0 if maximize else -1.0
    assert [stop(cfg, value) for value in (NAN, sign, 2 * sign, NAN, 3 * sign)] == [False] * 5
    assert [stop(cfg, value) for value in (NAN, NAN)] == [False, True]
    assert stop(cfg, None) is False


def test_a_function_of_a_copied_module_is_replaced_where_its_neighbours_look(monkeypatch):
    """A process that Python's multiprocessing spawns has fairseq_cli.train as a copy."""
    names = {"__name__": "fairseq_cli.train"}
    exec(
        "def should_stop_early(cfg, loss): return loss\ndef caller(*a): return should_stop_early(*a)",
        names,
    )
    main = ModuleType("__main__")
    vars(main).update(names, __spec__=SimpleNamespace(name="fairseq_cli.train"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(train, "should_stop_early", train.should_stop_early)
    next(row for row in PATCHES if row.change is nan_is_the_worst).install()
    assert main.caller(SimpleNamespace(checkpoint=settings("")), NAN) == INF
