"""State that passes in other threads or asyncio tasks do not see."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch.compiler import is_dynamo_compiling


class PerThread(threading.local):
    """An object for each thread, in `value`.

    torch.compile (2.13) loses writes to a thread-local, but not writes to an object in it.

    Args:
        make: makes the object of a thread, when the thread first reads `value`.
    """

    def __init__(self, make: Callable[[], Any]):
        self.value = make()


class _Entry:
    """The collector of a block; None once the block is closed.

    The entry of a closed block stays in copies of its context, and in its own context if it was closed in
    another one.
    """

    def __init__(self, collector: Any):
        self.collector = collector


class _ThreadEntries:
    """The entries of the blocks that a thread has opened, the outermost first."""

    def __init__(self) -> None:
        self.entries: tuple[_Entry, ...] = ()


def _still_open(entries: tuple[_Entry, ...]) -> tuple[_Entry, ...]:
    return tuple([entry for entry in entries if entry.collector is not None])


class Collectors:
    """The objects that collect the routings of a pass: those of the open blocks around it.

    A block belongs to its asyncio task, or to its thread if there are no tasks, and to threads that run in a
    copy of its context, as with asyncio.to_thread. It may be closed in any thread.

    A graph of torch.compile cannot read contexts, and uses the blocks that its thread has opened.

    Args:
        name: the name of the context variable.
    """

    def __init__(self, name: str):
        self._of_task: ContextVar[tuple[_Entry, ...]] = ContextVar(name, default=())
        self._of_thread = PerThread(_ThreadEntries)

    def around(self) -> tuple[Any, ...]:
        """The collectors of the open blocks around the caller, the outermost first."""
        # Not `is_compiling`, which is also true while another thread compiles or exports
        if is_dynamo_compiling():
            entries = self._of_thread.value.entries
        else:
            entries = self._of_task.get()
        # Each collector is read once: another thread may close its block at any time
        collectors = [entry.collector for entry in entries]
        return tuple([collector for collector in collectors if collector is not None])

    @contextlib.contextmanager
    def block(self, collector: Any) -> Iterator[None]:
        """A block inside which `around` returns the collector.

        Args:
            collector: any object.
        """
        entry = _Entry(collector)
        is_compiling = is_dynamo_compiling()
        self._update(entry, is_compiling=is_compiling)
        try:
            yield
        finally:  # other blocks may have been opened or closed since, and this may be another thread or task
            entry.collector = None
            self._update(is_compiling=is_compiling)

    def _update(self, *new: _Entry, is_compiling: bool) -> None:
        """Append new entries to those of the thread and, outside graphs, of the task; drop closed ones."""
        thread = self._of_thread.value
        thread.entries = (*_still_open(thread.entries), *new)
        if not is_compiling:
            self._of_task.set((*_still_open(self._of_task.get()), *new))
