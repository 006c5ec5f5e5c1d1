"""Launches by a table of the tuned configurations.

Triton's autotuner asks itself at every launch which configuration it chose, which costs the host several
times what a plain launch does, and a layer is a row of short kernels. So it is asked once for each kind of
launch, and from then on its choice is passed to the kernel itself.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import Tensor

# how many programs: numbers, or a function of the launch's constants
Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]

# the autotuner times, and says which one it took, in two steps
_tuning = threading.RLock()
_chosen: dict[Hashable, dict[str, Any]] = {}
# kernel → a configuration to take instead of the tuned one; for checks of all of them
forced: dict[Any, Any] = {}
# (kernel, arguments) → the configurations to compile before a launch, which then takes the first of them
_ahead: Callable[[Any, dict[str, Any]], list[Any]] | None = None


def timed(kernel: Any, arguments: dict[str, Any]) -> list[Any]:
    """The configurations that the autotuner would time for a launch."""
    found: list[Any] = kernel.early_config_prune(kernel.configs, arguments)
    return found


@contextlib.contextmanager
def compiling(configurations: Callable[[Any, dict[str, Any]], list[Any]] = timed) -> Iterator[None]:
    """Inside, a launch of a tuned kernel compiles all of `configurations` for it, times none, and runs one.

    Triton's cache on disk keeps them for other processes: `compile_ahead` has many do this side by side.

    Args:
        configurations: a kernel and a launch's arguments → what to compile for it; the first one runs.
    """
    global _ahead
    _ahead = configurations
    try:
        yield
    finally:
        _ahead = None


def options(config: Any) -> dict[str, Any]:
    """A triton.Config as arguments of a plain launch."""
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _kind(kernel: Any, arguments: dict[str, Any]) -> Hashable:
    """What the choice may depend on: sizes known to the compiler, classes of sizes, dtypes, the device."""
    device = None
    parts: list[Hashable] = [id(kernel)]
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            device = value.device
            parts.append(value.dtype)
        elif value is None or name.isupper() or name.startswith("rows_per_"):
            parts.append(value)
    return (*parts, device)


def start(kernel: Any, grid: Grid, **arguments: Any) -> None:
    """Run a kernel; a tuned one is timed at the first launch of its kind.

    Args:
        kernel: of Triton, tuned (`tuning.autotune`) or not.
        grid: how many programs.
        arguments: of the kernel, by name. Dtypes, the device, capitals and `rows_per_…` make the kind of a
            launch.
    """
    if not hasattr(kernel, "configs"):
        kernel[grid](**arguments)
        return
    if _ahead is not None:
        configs = _ahead(kernel, arguments)
        for config in configs:
            kernel.fn.warmup(grid=grid, **arguments, **options(config))
        kernel.fn[grid](**arguments, **options(configs[0]))
        return
    if kernel in forced:
        kernel.fn[grid](**arguments, **options(forced[kernel]))
        return
    kind = _kind(kernel, arguments)
    chosen = _chosen.get(kind)
    if chosen is not None:
        kernel.fn[grid](**arguments, **chosen)
        return
    with _tuning:
        kernel[grid](**arguments)
        _chosen[kind] = options(kernel.best_config)
