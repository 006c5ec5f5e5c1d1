"""A process that hangs does not make the others wait for ever, and they say for whom they waited."""

import signal
from types import SimpleNamespace

import pytest

from moa_fairseq.fairseq_patches import collectives

LIMIT = 6  # seconds


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_named(fairseq, toy_data, tmp_path, stopped):
    """Two processes train; one is stopped after an update. The other one ends and names it."""
    flags = ("--max-tokens", 60, "--no-save", "--max-update", 10**6, "--heartbeat-timeout", LIMIT)
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


@pytest.mark.parametrize(("flag", "seconds"), [(-1, collectives.DEFAULT_SECONDS), (90, 90)])
def test_the_flag_sets_the_limit(flag, seconds):
    cfg = SimpleNamespace(distributed_training=SimpleNamespace(heartbeat_timeout=flag))
    assert collectives.time_limit(cfg) == seconds
