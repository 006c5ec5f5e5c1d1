"""State that passes in other threads or asyncio tasks do not see."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch.compiler import is_dynamo_compiling


class PerThread(threading.local):
    """An object for each thread.

    torch.compile (2.13) loses writes to a thread-local, but not writes to an object in it.

    Args:
        make: makes the object of a thread, when the thread first reads `value`.
    """

    def __init__(self, make: Callable[[], Any]):
        self.value = make()


class _Block:
    """A block; its collector is None once it is closed.

    A closed block stays in copies of its context, and in its own context if it was closed in another one.
    """

    def __init__(self, collector: Any):
        self.collector = collector


class _Blocks:
    def __init__(self) -> None:
        self.opened: tuple[_Block, ...] = ()


def _open(blocks: tuple[_Block, ...]) -> tuple[_Block, ...]:
    return tuple([each for each in blocks if each.collector is not None])


class Collectors:
    """The objects that collect the routings of a pass: those of the open blocks around it.

    A block belongs to its asyncio task, or to its thread if there are no tasks, and to threads that run in a
    copy of its context, as with asyncio.to_thread. A graph of torch.compile cannot read contexts; it uses the
    blocks that its thread has opened. (`is_compiling` cannot replace `is_dynamo_compiling` here: it is also
    true while another thread compiles or exports.) A block may be closed in any thread.

    Args:
        name: the name of the context variable.
    """

    def __init__(self, name: str):
        self._of_task: ContextVar[tuple[_Block, ...]] = ContextVar(name, default=())
        self._of_thread = PerThread(_Blocks)

    def around(self) -> tuple[Any, ...]:
        """The collectors of the open blocks around the caller, the outermost first."""
        if is_dynamo_compiling():
            blocks = self._of_thread.value.opened
        else:
            blocks = self._of_task.get()
        collectors = [each.collector for each in blocks]
        return tuple([each for each in collectors if each is not None])

    @contextlib.contextmanager
    def block(self, collector: Any) -> Iterator[None]:
        """A block inside which `around` returns the collector.

        Args:
            collector: any object.
        """
        block = _Block(collector)
        compiles = is_dynamo_compiling()
        thread = self._of_thread.value
        thread.opened = (*_open(thread.opened), block)
        if not compiles:
            self._of_task.set((*_open(self._of_task.get()), block))
        try:
            yield
        finally:  # other blocks may have been opened or closed since, and this may be another thread or task
            block.collector = None
            thread = self._of_thread.value
            thread.opened = _open(thread.opened)
            if not compiles:
                self._of_task.set(_open(self._of_task.get()))
