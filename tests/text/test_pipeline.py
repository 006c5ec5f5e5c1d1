"""Chains of line functions: in order; on several processes with the same result; errors named."""

import functools
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.text import workers
from moa_fairseq.text.steps import apply_steps
from moa_fairseq.text.workers import chunks, ordered_map

STEPS = [
    ("lowercase", {}),
    ("normalize_punctuation", {"lang": "de"}),
    ("tokenize", {"lang": "de"}),
]


def work(batch, steps=STEPS):
    return [apply_steps(line, steps) for line in batch]


def test_steps_run_in_order():
    assert apply_steps("„Ein MANN“, 5 %.", STEPS) == "&quot; ein mann &quot; , 5 % ."


@pytest.mark.parametrize(
    "count", [0, 1, 1_234]
)  # none, one batch, batches that do not divide evenly
def test_processes_keep_order(count):
    lines = [f"Zeile {i}, z.B. {i % 7}." for i in range(count)]
    found = [
        line for batch in ordered_map(work, chunks(lines, 50), 2, "text") for line in batch
    ]
    assert found == work(lines)


def test_unknown_step_is_named():
    with pytest.raises(KeyError, match="stem"):
        apply_steps("x", [("stem", {})])


def test_error_of_a_worker_reaches_the_caller():
    unknown = functools.partial(work, steps=[("tokenize", {"lang": "fi", "edition": "2015"})])
    with pytest.raises(UserError, match="2015"):
        list(ordered_map(unknown, chunks(["x"] * 10, 1), 2, "text"))


def test_workers_leave_an_interrupt_to_their_parent():
    """Ctrl-C reaches all processes of a terminal: a worker would print an error of its own."""
    before = signal.getsignal(signal.SIGINT)
    try:
        workers._end_with_the_parent()  # as a worker begins
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


SLOW = """
import os, time
from moa_fairseq.text.workers import ordered_map

def work(batch):
    os.write(1, f"{os.getpid()}\\n".encode())    # one write: print makes two when PYTHONUNBUFFERED is set
    time.sleep(60)
"""


def test_workers_of_a_killed_program_end(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    line = [
        sys.executable,
        "-c",
        "import slow; list(slow.ordered_map(slow.work, [[1]] * 9, 2, ''))",
    ]
    running = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    workers = [int(running.stdout.readline()) for _ in range(2)]
    running.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
