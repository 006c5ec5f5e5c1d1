"""A process that hangs does not make the others wait for ever, and they say for whom they waited."""

import signal
import socket
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches import collectives
from moa_fairseq.plugin.patches.user_errors import print_user_errors

LIMIT = 6  # seconds


@pytest.mark.thorough
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_named(fairseq, toy_data, tmp_path, stopped):
    """Two processes train; one is stopped after an update. The other one ends and names it."""
    flags = (
        "--max-tokens",
        60,
        "--no-save",
        "--max-update",
        10**6,
        "--heartbeat-timeout",
        LIMIT,
    )
    pair = fairseq.pair(*fairseq.words(toy_data, tmp_path, *flags))
    pair[0].said_until('"num_updates": "3"')  # rank 0 alone writes the log
    pair[stopped].send_signal(signal.SIGSTOP)
    try:
        other = pair[1 - stopped].end(timeout=LIMIT + 30)
    finally:
        pair[stopped].send_signal(signal.SIGKILL)
    assert other.returncode
    assert f"waited {LIMIT} seconds for rank {stopped}, which did not answer" in other.stderr
    assert "--heartbeat-timeout" in other.stderr and "Traceback" not in other.stderr


@pytest.mark.thorough
def test_a_killed_process_is_named(fairseq, toy_data, tmp_path):
    flags = ("--max-tokens", 60, "--no-save", "--max-update", 10**6)
    pair = fairseq.pair(*fairseq.words(toy_data, tmp_path, *flags))
    pair[0].said_until('"num_updates": "3"')
    pair[1].send_signal(signal.SIGKILL)
    other = pair[0].end(timeout=60)
    assert other.returncode and "Traceback" not in other.stderr
    assert "Rank 0 (of 2) lost rank 1" in other.stderr


def test_a_process_of_many_gpus_that_was_killed_is_named(capsys):
    error = ProcessExitedException(
        "gone", error_index=3, error_pid=7, exit_code=-9, signal_name="SIGKILL"
    )
    print_user_errors(ProcessExitedException, error, None)
    said = capsys.readouterr().err
    assert "Process 3 of this machine was killed (SIGKILL)" in said and "Traceback" not in said


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_a_port_that_is_taken_is_named(monkeypatch, way):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        place = f"tcp://127.0.0.1:{port}" if way == "flag" else "env://"
        flag = "--distributed-init-method" if way == "flag" else "MASTER_PORT"
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: its port is taken.*{flag}"):
            collectives.TimedDist(dist).init_process_group(
                "gloo", init_method=place, world_size=1, rank=0
            )


@pytest.mark.parametrize(("flag", "seconds"), [(-1, collectives.DEFAULT_SECONDS), (90, 90)])
def test_the_flag_sets_the_limit(flag, seconds):
    cfg = SimpleNamespace(distributed_training=SimpleNamespace(heartbeat_timeout=flag))
    assert collectives.time_limit(cfg) == seconds
