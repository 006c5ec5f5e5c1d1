"""Compile kernels in many processes at once, instead of one after the other."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def run(build: Callable[..., None], cases: Sequence[tuple[Any, ...]], processes: int = 0) -> None:
    """Call `build(*case)` for each case, in many processes at once, to fill Triton's cache on disk.

    A case that fails is printed; its kernels are compiled when they are first used.

    Args:
        build: a function of a module (it is pickled), which runs kernels under `triton.table.compiling`.
        cases: the arguments of each call, which are pickled.
        processes: the largest number of processes; 0: the number of cores.
    """
    start = time.perf_counter()
    processes = min(processes or os.cpu_count() or 1, len(cases))
    if not cases:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _end_with_the_parent) as pool:
        for case, future in [(case, pool.submit(build, *case)) for case in cases]:
            if error := future.exception():
                print(f"not compiled ahead: {case}: {type(error).__name__}: {error}", flush=True)
    seconds = time.perf_counter() - start
    print(f"compiled {len(cases)} cases in {seconds:.0f} s, {processes} processes", flush=True)


def _end_with_the_parent() -> None:
    """Let a worker end when its parent is killed: it would wait for its next case for ever, on the GPU."""

    def follow() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
