"""A process that hangs does not make the others wait for ever, and they say for whom they waited."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import moa_fairseq
from moa_fairseq.fairseq_patches import collectives

USER_DIR = Path(moa_fairseq.__file__).parent
LIMIT = 6  # seconds


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_named(stopped, toy_data, tmp_path):
    """Two processes train; one is stopped after an update. The other one ends and names it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start(rank, port, toy_data, tmp_path) for rank in range(2)]
    try:
        for line in processes[0].stdout:  # rank 0 alone writes the log
            if '"num_updates": "3"' in line:
                break
        processes[stopped].send_signal(signal.SIGSTOP)
        other = processes[1 - stopped]
        output, _ = other.communicate(timeout=LIMIT + 30)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert other.returncode
    assert f"waited {LIMIT} seconds for rank {stopped}, which did not answer" in output, output[-3000:]
    assert "--heartbeat-timeout" in output
    assert "Traceback" not in output


def start(rank, port, data, folder):
    line = ("--arch", "moa_transformer_tiny", "--share-all-embeddings", "--optimizer", "adam", "--lr", 0.001)
    line += ("--encoder-layers", 1, "--decoder-layers", 1, "--max-tokens", 60, "--num-workers", 0)
    line += (
        "--log-format",
        "json",
        "--log-interval",
        1,
        "--save-dir",
        folder,
        "--no-save",
        "--max-update",
        10**6,
    )
    world = ("--distributed-world-size", 2, "--distributed-rank", rank, "--distributed-no-spawn")
    world += ("--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp")
    world += ("--distributed-init-method", f"tcp://127.0.0.1:{port}", "--heartbeat-timeout", LIMIT)
    command = [
        sys.executable,
        "-m",
        "fairseq_cli.train",
        data,
        "--user-dir",
        USER_DIR,
        "--cpu",
        *line,
        *world,
    ]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize(("flag", "seconds"), [(-1, collectives.DEFAULT_SECONDS), (90, 90)])
def test_the_flag_sets_the_limit(flag, seconds):
    cfg = SimpleNamespace(distributed_training=SimpleNamespace(heartbeat_timeout=flag))
    assert collectives.time_limit(cfg) == seconds
