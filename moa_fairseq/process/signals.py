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
    """A function for the child, on Linux: the kernel kills the child if this program is killed."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def arrange() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent was killed before the line above
            os._exit(1)

    return arrange


def terminate_as_interrupt() -> contextlib.AbstractContextManager[None]:
    """A context in which SIGTERM, from a scheduler for example, ends a run as Ctrl-C does."""
    return handled_by(signal.default_int_handler, signal.SIGTERM)


@contextlib.contextmanager
def handled_by(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Inside the block, `handler` gets these signals; in other threads than the main one nothing changes.

    Args:
        handler: a handler, as `signal.signal` takes it.
        numbers: the signals.
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
    """A context for the start of a child, with a list of the signals that came meanwhile, to be raised again.

    Python runs functions of its own before and after a fork. An exception of a handler in one of them, such
    as that of Ctrl-C, is printed and forgotten. Ignored signals stay ignored, because a child inherits that.
    """
    received: list[int] = []
    numbers = [
        n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN
    ]
    with handled_by(lambda number, _: received.append(number), *numbers):
        yield received
