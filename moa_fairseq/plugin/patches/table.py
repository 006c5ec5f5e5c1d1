"""The table of what is changed in fairseq and torch: `@patch` above a function or a class adds a row."""

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
    """One thing that is changed.

    Args:
        what: "module:name" or "module:Class.name", modules separated by commas. A module with a * stands for
            all that are loaded and have the name, or use Python's own function of that name.
        test: file::name under tests/.
        change: the first paragraph of its docstring is the reason.
        way: how it takes the original's place: called with the original and `change`, it returns what gets
            the name; None: `change` does all by itself.
    """

    what: str
    test: str
    change: Callable
    way: Callable[[Any, Callable], Any] | None

    @property
    def reason(self) -> str:
        return " ".join((self.change.__doc__ or "").partition("\n\n")[0].split())

    def places(self) -> Iterator[tuple[Any, str]]:
        """(owner, name) of everything that this changes in this process."""
        modules, _, path = self.what.partition(":")
        *classes, name = path.split(".")
        for pattern in modules.split(", "):
            if "*" not in pattern:
                yield pkgutil.resolve_name(":".join([pattern, *classes])), name
                continue
            for module, owner in list(sys.modules.items()):
                if module == "__main__":  # the command that runs, with python -m
                    module = getattr(getattr(owner, "__spec__", None), "name", None) or module
                is_defined = hasattr(owner, name) != hasattr(builtins, name)
                if (
                    fnmatch.fnmatch(module, pattern)
                    and isinstance(owner, types.ModuleType)
                    and is_defined
                ):
                    yield owner, name

    def install(self) -> None:
        """Make the change."""
        if self.way is None:
            self.change()
            return
        for owner, name in self.places():
            original = getattr(owner, name, None)
            changed = self.way(original, self.change)
            static = isinstance(vars(owner).get(name), staticmethod)
            setattr(owner, name, staticmethod(changed) if static else changed)
            # the module that a spawned process began with is a copy, and its functions look into the original
            names = getattr(original, "__globals__", {})
            if names.get(name) is original:
                names[name] = changed


ROWS: list[Patch] = []


def wrapped_by(original: Callable, change: Callable) -> Callable:
    """A function that calls change(original, …) with what it is given.

    Args:
        original: fairseq's or torch's function; the new one keeps its name and has it as `__wrapped__`.
        change: takes the original before the original's own arguments.
    """

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return change(original, *args, **options)

    return wrapped


def replaced(original: Any, change: Callable) -> Any:
    """The change itself."""
    return change


def made_of(original: Any, change: Callable) -> Any:
    """What `change` makes of the original, a module or a class for the most part."""
    return change(original)


def patch(
    what: str, test: str, way: Callable[[Any, Callable], Any] | None = wrapped_by
) -> Callable:
    """Decorator: a row of the table.

    Args:
        what, test, way: as in `Patch`; `change` is what is decorated, and stays as it is.
    """

    def add(change: Any) -> Any:
        ROWS.append(Patch(what, test, change, way))
        return change

    return add


class Proxy(types.ModuleType):
    """Stands for a module in fairseq's: what a subclass does not define is the module's own.

    Args:
        original: the module.
    """

    def __init__(self, original: types.ModuleType) -> None:
        super().__init__(original.__name__)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
