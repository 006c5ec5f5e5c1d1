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


class _Block:
    """A block, with its collector while it is open.

    A closed one stays in copies of its context, and in the context that opened it if another one closed it.
    """

    def __init__(self, collector: Any):
        self.collector = collector


class _Blocks:
    def __init__(self) -> None:
        self.opened: tuple[_Block, ...] = ()


def _open(blocks: tuple[_Block, ...]) -> tuple[_Block, ...]:
    return tuple([each for each in blocks if each.collector is not None])


class Collectors:
    """The objects that collect what a pass decides: those of the blocks around it.

    A block is that of its asyncio task, or of its thread where there are no tasks. A thread that runs in a
    copy of the block's context, as asyncio.to_thread's does, is in it, too. A graph of torch.compile, which
    can read no context, takes the blocks that its thread has opened. (`is_compiling` is no answer here: it is
    also true while another thread compiles or exports.) A block ends wherever it is closed.

    Args:
        name: of the context variable.
    """

    def __init__(self, name: str):
        self._of_task: ContextVar[tuple[_Block, ...]] = ContextVar(name, default=())
        self._of_thread = PerThread(_Blocks)

    def around(self) -> tuple[Any, ...]:
        """The collectors of the blocks around the caller, the outermost first."""
        if is_dynamo_compiling():
            blocks = self._of_thread.value.opened
        else:
            blocks = self._of_task.get()
        collectors = [each.collector for each in blocks]
        return tuple([each for each in collectors if each is not None])

    @contextlib.contextmanager
    def block(self, collector: Any) -> Iterator[None]:
        """Inside the block the collector is one of those around.

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
        finally:  # other blocks may have begun or ended since, and the thread and the task be others
            block.collector = None
            thread = self._of_thread.value
            thread.opened = _open(thread.opened)
            if not compiles:
                self._of_task.set(_open(self._of_task.get()))
