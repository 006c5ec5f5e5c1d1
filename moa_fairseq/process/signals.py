"""Signals of this program and of its children."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def die_with_parent() -> Callable[[], None] | None:
    """For a child, on Linux: be killed when this program is killed outright and cannot end it."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def arrange() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before the line above
            os._exit(1)

    return arrange


def terminate_as_interrupt() -> contextlib.AbstractContextManager[None]:
    """SIGTERM (a scheduler's, say) ends a run the way Ctrl-C does."""
    return handled_by(signal.default_int_handler, signal.SIGTERM)


@contextlib.contextmanager
def handled_by(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Inside the block, `handler` gets these signals; outside of the main thread nothing changes.

    Args:
        handler: as `signal.signal` takes it.
        numbers: of the signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def signals_held() -> Iterator[list[int]]:
    """Around the start of a child: gives the signals that came meanwhile, to be raised again.

    Python runs functions of its own before and after a fork, and an exception of a handler in one of them, as
    of Ctrl-C, is printed and forgotten. Ignored signals stay so, because a child inherits that.
    """
    received: list[int] = []
    numbers = [
        n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN
    ]
    with handled_by(lambda number, _: received.append(number), *numbers):
        yield received
