"""Workers of a study on one machine: their GPUs, and how they end."""

import contextlib
import multiprocessing
import signal
import sys
import time
from pathlib import Path

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.hardware import Hardware, choose_devices
from moa_fairseq.experiments.study import command
from moa_fairseq.process import environment_of_a_child

CARDS = Hardware(4, "NVIDIA H100", (9, 0), ("4", "5", "6", "7"))


@pytest.mark.parametrize(
    ("present", "gpus", "jobs", "given"),
    [
        (CARDS, 1, 4, ["4", "5", "6", "7"]),
        (CARDS, 2, 2, ["4,5", "6,7"]),
        (CARDS, 3, 2, ["4,5,6", "7,4,5"]),
        (CARDS, 1, 6, ["4", "5", "6", "7", "4", "5"]),
        (Hardware(1, "NVIDIA H100", (9, 0), ("0",)), 1, 3, ["0"] * 3),
        (CARDS, 0, 2, ["as it was"] * 2),
    ],
)
def test_workers_have_gpus_of_their_own(monkeypatch, present, gpus, jobs, given):
    found = []

    class Worker:
        returncode = 0

        def __init__(self, command, env, preexec_fn):
            assert command[-6:] == [*words, "--jobs", "1"]
            found.append(env)

        def poll(self):
            return 0

        terminate = wait = poll

    words = f"study toy.yaml --jobs {jobs}".split()
    monkeypatch.setattr(sys, "argv", ["moa-fairseq", *words])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as it was")
    monkeypatch.setattr(command.subprocess, "Popen", Worker)
    command._work_together(jobs, choose_devices(present, gpus, dry_run=False))
    assert [env.pop("CUDA_VISIBLE_DEVICES") for env in found] == given
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    # So a worker also finds this package if it is not installed
    assert all(env == environment_of_a_child() for env in found)


@pytest.mark.parametrize("status", [0, 1])
def test_only_a_failing_worker_ends_the_others(monkeypatch, status):
    workers = []

    class Worker:
        returncode = None

        def __init__(self, command, env, preexec_fn):
            self.polls = 1 + 2 * len(workers)
            workers.append(self)

        def poll(self):
            self.polls -= 1
            if not self.polls:
                self.returncode = status
            return self.returncode

        def terminate(self):
            self.is_ended = self.returncode is None

        def wait(self):
            pass

    monkeypatch.setattr(command.subprocess, "Popen", Worker)
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    with pytest.raises(UserError) if status else contextlib.nullcontext():
        command._work_together(2, Hardware())
    assert [worker.is_ended for worker in workers] == [False, bool(status)]


def test_a_second_signal_waits_for_workers_that_save(monkeypatch):
    """The workers are killed when this program, their parent, ends."""
    waited = []

    class Worker:
        returncode = None

        def __init__(self, command, env, preexec_fn):
            pass

        def poll(self):
            signal.raise_signal(signal.SIGTERM)

        def terminate(self):
            pass

        def wait(self):
            signal.raise_signal(signal.SIGTERM)
            waited.append(self)

    monkeypatch.setattr(command.subprocess, "Popen", Worker)
    with pytest.raises(KeyboardInterrupt):
        command._work_together(2, Hardware())
    assert len(waited) == 2


def test_an_interrupt_while_a_worker_starts_ends_the_worker(interrupted_start):
    with pytest.raises(KeyboardInterrupt):
        command._work_together(2, Hardware())
    assert [worker.poll() is None for worker in interrupted_start] == [False]


def test_too_many_gpus_for_a_run_are_refused_before_a_worker_starts(study, capsys):
    assert study("--jobs", "2", "--gpus", "1000")[0] == 2
    assert "--gpus 1000" in capsys.readouterr().err


def test_workers_end_with_a_killed_study(tmp_path, monkeypatch):
    """Otherwise they would go on training, and a rerun would start as many again."""
    work = f"import os, time; open(f'{tmp_path}/{{os.getpid()}}', 'w'); time.sleep(60)"
    monkeypatch.setattr(command, "to_argv", lambda words: [sys.executable, "-c", work])
    fork = multiprocessing.get_context("fork")
    running = fork.Process(target=command._work_together, args=(2, Hardware()))
    running.start()
    workers = []
    while len(workers) < 2:
        assert running.is_alive()
        workers = [int(path.name) for path in tmp_path.iterdir()]
        time.sleep(0.05)
    running.kill()
    running.join()
    for _ in range(600):
        states = [Path(f"/proc/{worker}/stat") for worker in workers]
        if all(not state.exists() or ") Z " in state.read_text() for state in states):
            break
        time.sleep(0.05)
    else:
        raise AssertionError(f"still at work: {workers}")
