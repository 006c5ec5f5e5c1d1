"""The table of all changes to fairseq and torch: `@patch` above a function or a class adds a row."""

from __future__ import annotations

import builtins
import fnmatch
import functools
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """A change to fairseq or torch.

    Args:
        target: "module:name" or "module:Class.name", modules separated by commas. A module with a * stands
            for all loaded modules that have the name, or use Python's own function of that name.
        test: the test, as "file::name" under tests/.
        change: the new function or class. The first paragraph of its docstring says what it does, the second
            why it is needed.
        way: called with the original and `change`, it returns the object that takes the original's place. If
            it is None, `change` is called without arguments, and does everything itself.
    """

    target: str
    test: str
    change: Callable
    way: Callable[[Any, Callable], Any] | None

    @property
    def reason(self) -> str:
        """Why the change is needed."""
        return " ".join((self.change.__doc__ or "").split("\n\n")[1].split())

    def places(self) -> Iterator[tuple[Any, str]]:
        """(owner, name) of every function, class and module that this changes in this process."""
        modules, _, path = self.target.partition(":")
        *classes, name = path.split(".")
        for pattern in modules.split(", "):
            if "*" not in pattern:
                yield pkgutil.resolve_name(":".join([pattern, *classes])), name
                continue
            for module in _loaded(pattern):
                # The module defines the name, or means Python's own function and defines nothing.
                if hasattr(module, name) != hasattr(builtins, name):
                    yield module, name

    def install(self) -> None:
        """Put the change in the original's place, everywhere in this process."""
        if self.way is None:
            self.change()
            return
        for owner, name in self.places():
            original = getattr(owner, name, None)
            changed = self.way(original, self.change)
            static = isinstance(vars(owner).get(name), staticmethod)
            setattr(owner, name, staticmethod(changed) if static else changed)
            # The main module of a spawned process is a copy, whose functions look names up in the original.
            names = getattr(original, "__globals__", {})
            if names.get(name) is original:
                names[name] = changed


def _loaded(pattern: str) -> Iterator[types.ModuleType]:
    for name, module in list(sys.modules.items()):
        if name == "__main__":  # the command that runs, with python -m
            name = getattr(getattr(module, "__spec__", None), "name", None) or name
        if fnmatch.fnmatch(name, pattern) and isinstance(module, types.ModuleType):
            yield module


ROWS: list[Patch] = []


def wrapped_by(original: Callable, change: Callable) -> Callable:
    """A function that calls change(original, …) with its own arguments.

    Args:
        original: fairseq's or torch's function; the new function keeps its name, and has it as `__wrapped__`.
        change: takes the original, and then the original's arguments.
    """

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return change(original, *args, **options)

    return wrapped


def replaced(original: Any, change: Callable) -> Any:
    """The change itself, which takes the original's place."""
    return change


def made_of(original: Any, change: Callable) -> Any:
    """The result of `change` for the original, usually a module or a class."""
    return change(original)


def patch(
    target: str, test: str, way: Callable[[Any, Callable], Any] | None = wrapped_by
) -> Callable:
    """A decorator that adds a row to the table.

    Args:
        target, test, way: as in `Patch`; `change` is the decorated function or class, which is not altered.
    """

    def add(change: Any) -> Any:
        ROWS.append(Patch(target, test, change, way))
        return change

    return add


class Proxy(types.ModuleType):
    """Stands for a module: names that a subclass does not define are the module's own.

    Args:
        original: the module for which it stands.
    """

    def __init__(self, original: types.ModuleType) -> None:
        super().__init__(original.__name__)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
