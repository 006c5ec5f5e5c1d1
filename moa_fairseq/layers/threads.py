"""What passes that run at the same time, in threads or asyncio tasks, keep apart."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch.compiler import is_dynamo_compiling


class PerThread(threading.local):
    """An object for each thread.

    torch.compile (2.13) loses what is written to a thread-local, but not what is written to an object in it.

    Args:
        make: makes a thread's object, when the thread first asks for it.
    """

    def __init__(self, make: Callable[[], Any]):
        self.value = make()


class _Blocks:
    def __init__(self) -> None:
        self.collectors: tuple[Any, ...] = ()


class Collectors:
    """The objects that collect what a pass decides: those of the blocks around it.

    A block is that of its asyncio task, or of its thread where there are no tasks. A thread that runs in a
    copy of the block's context, as asyncio.to_thread's does, is in it, too. A graph of torch.compile, which
    can read no context, takes the blocks that its thread has opened. (`is_compiling` is no answer here: it is
    also true while another thread compiles or exports.)

    Args:
        name: of the context variable.
    """

    def __init__(self, name: str):
        self._of_task: ContextVar[tuple[Any, ...]] = ContextVar(name, default=())
        self._of_thread = PerThread(_Blocks)

    def around(self) -> tuple[Any, ...]:
        """The collectors of the blocks around the caller, the outermost first."""
        if is_dynamo_compiling():
            collectors: tuple[Any, ...] = self._of_thread.value.collectors
            return collectors
        return self._of_task.get()

    @contextlib.contextmanager
    def block(self, collector: Any) -> Iterator[None]:
        """Inside the block the collector is one of those around.

        Args:
            collector: any object.
        """
        thread = self._of_thread.value
        compiles = is_dynamo_compiling()
        thread.collectors += (collector,)
        if not compiles:
            self._of_task.set((*self._of_task.get(), collector))
        try:
            yield
        finally:  # other blocks may have begun or ended since
            thread.collectors = _without(thread.collectors, collector)
            if not compiles:
                self._of_task.set(_without(self._of_task.get(), collector))


def _without(collectors: tuple[Any, ...], collector: Any) -> tuple[Any, ...]:
    return tuple([each for each in collectors if each is not collector])
