"""`map` over several processes: results in order, a bounded number of batches in memory, a progress bar."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import forkserver
from typing import Any

from tqdm import tqdm

# Fewer batches than this are finished in this process before new processes have started.
FEW = 3


def ordered_map(
    work: Callable[[list], Any], batches: Iterable[list], workers: int, label: str
) -> Iterator[Any]:
    """Yield `work(batch)` for each batch, in order, computed by several processes.

    Args:
        work: called with a batch, which is a list. The function and the batches must be picklable.
        batches: an iterable that is read during the work: at most three batches per process wait in memory.
        workers: the number of processes; with 1, or with fewer than FEW batches, this process does all work.
        label: the label of the progress bar, which counts the items of the batches.
    """
    batches = iter(batches)
    first = list(itertools.islice(batches, FEW))
    batches = itertools.chain(first, batches)
    results: Iterator[tuple[int, Any]] = ((len(batch), work(batch)) for batch in batches)
    if workers > 1 and len(first) >= FEW:
        results = _in_processes(work, batches, workers)
    with tqdm(unit=" lines", desc=label, disable=None, leave=False) as bar:
        for size, result in results:
            yield result
            bar.update(size)


def _in_processes(
    work: Callable, batches: Iterator[list], workers: int
) -> Iterator[tuple[int, Any]]:
    pending: deque[tuple[int, Future]] = deque()
    context = _context(getattr(work, "func", work).__module__)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(workers, context, _end_with_the_parent))
        stack.callback(pool.shutdown, cancel_futures=True)
        while True:
            for batch in itertools.islice(batches, 3 * workers - len(pending)):
                with _interrupt_later():
                    pending.append((len(batch), pool.submit(work, batch)))
            if not pending:
                return
            size, future = pending.popleft()
            yield size, future.result()


def _end_with_the_parent() -> None:
    """Prepare a worker: the parent handles Ctrl-C, and a worker ends when its parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _context(module: str) -> multiprocessing.context.BaseContext:
    """A way to start workers without forking this process: a fork of a process with threads can hang for
    ever.

    A fork server is started once and loads the module of the work once; then it starts workers quickly.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    with _interrupt_later(signal.SIG_IGN):  # the server inherits how Ctrl-C is handled
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _interrupt_later(meanwhile: Any = None) -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: a half-started worker would outlive its pool, and print an error.

    Args:
        meanwhile: a handler for the block, in place of the delay.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not (
        callable(before) or meanwhile
    ):
        yield
        return
    received: list[Any] = []
    signal.signal(signal.SIGINT, meanwhile or (lambda *event: received.append(event)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received and callable(before):
        before(*received[0])


def chunks(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` items; the last list may be shorter."""
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
