"""The check of the Triton kernels that a training begins with on a GPU that nobody checked yet."""

import json
import threading
from types import SimpleNamespace

import portalocker
import pytest
import torch
from fairseq import options
from fairseq.distributed import utils

from moa_fairseq.layers.experts import triton, validation
from moa_fairseq.plugin.patches import kernel_check, save_on_sigterm

pytest.importorskip("triton", reason="Triton is not installed")
MOA = ("--arch", "moa_transformer_tiny")


def config(*flags):
    args = options.parse_args_and_arch(options.get_training_parser(), ["data", *flags])
    return SimpleNamespace(model=args, common=args)


@pytest.fixture
def train(monkeypatch, tmp_path):
    """train() → "trained": a training of float32 on a new GPU; its cache is `tmp_path`.

    The verdict's key is that of a machine without a GPU, where the check is a small one.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_check, "takes_kernels", lambda cfg: True)
    common = SimpleNamespace(bf16=False, fp16=False, amp=False)
    cfg = SimpleNamespace(common=common)
    return lambda: kernel_check.check_before(lambda cfg, main: "trained", cfg, None)


@pytest.fixture
def run(monkeypatch):
    """Checks that do nothing: the dtypes of those that were begun, and the status with which they end."""
    run = SimpleNamespace(begun=[], status=0)
    monkeypatch.setattr(
        kernel_check, "_run", lambda dtype, log: run.begun.append(dtype) or run.status
    )
    return run


@pytest.mark.thorough
def test_the_first_training_on_a_gpu_checks_its_kernels(train, tmp_path, monkeypatch, caplog):
    assert utils.call_main.__wrapped__
    with caplog.at_level("INFO"):
        assert train() == "trained"
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"], caplog.text
    (written,) = (tmp_path / "moa_fairseq").glob("*.json")
    found = json.loads(written.read_text())
    assert (
        sum(found["groups"].values()) >= 10
        and found["failed"] == {}
        and "interpreted" in found["gpu"]
    )
    assert found["dtypes"] == ["float32"] and validation.verdict()[0] == ("float32",)
    monkeypatch.setattr(kernel_check, "_run", lambda *_: pytest.fail("checked twice"))
    assert train() == "trained"


def test_who_has_a_check(monkeypatch):
    """A mixture with the backend `auto` that is trained on a GPU, unless it is declined."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton, "why_not", lambda: "")
    checked = [
        kernel_check.takes_kernels(config(*flags))
        for flags in (
            MOA,
            ("--arch", "switchhead_lm_tiny", "--task", "language_modeling"),
            ("--arch", "dense_transformer_tiny", "--sigma-moe-num-experts", "4"),
            (*MOA, "--no-kernel-check"),
            (*MOA, "--expert-backend", "grouped"),
            (*MOA, "--cpu"),
            ("--arch", "dense_transformer_tiny"),
            ("--arch", "transformer_tiny"),
        )
    ]
    assert checked == [True] * 3 + [False] * 5
    evaluation = SimpleNamespace(model=None, common=SimpleNamespace(cpu=False))
    assert not kernel_check.takes_kernels(evaluation)
    monkeypatch.setattr(triton, "why_not", lambda: "no Triton")
    assert not kernel_check.takes_kernels(config(*MOA))


def test_the_dtype_is_that_of_the_products():
    settings = ({}, {"fp16": True}, {"bf16": True}, {"amp": True})
    off = dict(bf16=False, fp16=False, amp=False)
    configs = [
        SimpleNamespace(common=SimpleNamespace(**{**off, **flags})) for flags in settings
    ]
    found = [kernel_check.multiplied_dtype(cfg) for cfg in configs]
    assert found == ["float32", "float16", "bfloat16", "float16"]


@pytest.mark.parametrize(
    ("status", "checks"),
    [(-15, 2), (-9, 2), (1, 2), (-11, 1)],
    ids=["terminated", "killed", "the GPU was full", "a fault of memory"],
)
def test_a_check_without_an_outcome(status, checks, train, run, caplog):
    """What was stopped is begun again by the next training; a crash is an outcome."""
    run.status = status
    assert (train(), train()) == ("trained", "trained")
    assert len(run.begun) == checks and validation.verdict()[0] == ()
    assert [record.levelname for record in caplog.records].count("WARNING") == checks


def test_one_process_checks_and_the_others_wait(train, run, tmp_path):
    ends = []
    lock = validation.path().parent / ".lock"
    lock.parent.mkdir()
    with portalocker.Lock(lock, "w"):
        thread = threading.Thread(target=lambda: ends.append(train()))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not ends
        validation.write(validation.CheckResult({"routing": 3}, {}, ["float32"]))
    thread.join(20)
    assert ends == ["trained"] and run.begun == []


def test_no_training_fails_for_a_cache_that_cannot_be_written(train, run, tmp_path, caplog):
    (tmp_path / "moa_fairseq").write_text("no folder")
    assert train() == "trained" and run.begun == []
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def test_a_terminated_training_ends_its_check(train, tmp_path, monkeypatch):
    monkeypatch.setattr(
        save_on_sigterm, "was_told", lambda: list(tmp_path.rglob("*.log")) != []
    )
    with pytest.raises(SystemExit, match="143"):
        train()
    assert not list(tmp_path.rglob("*.json"))


def test_an_interrupt_while_a_check_starts_ends_the_check(tmp_path, interrupted_start):
    with pytest.raises(KeyboardInterrupt):
        kernel_check._run("float32", tmp_path / "x.log")
    assert interrupted_start[0].poll() is not None
