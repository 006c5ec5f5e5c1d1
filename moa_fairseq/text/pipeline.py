"""Whole files through a chain of line functions, on several processes."""

import multiprocessing
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Sequence, Tuple

from moa_fairseq.text.normalize import (
    lowercase,
    normalize_punctuation,
    remove_nonprinting,
    replace_unicode_punctuation,
    straight_apostrophe,
)
from moa_fairseq.text.tokenizer import tokenize

# A step is data, so that it can be written in a recipe and sent to another process.
Step = Tuple[str, Dict[str, Any]]

STEPS: Dict[str, Callable[..., str]] = {
    "lowercase": lowercase,
    "normalize_punctuation": normalize_punctuation,
    "remove_nonprinting": remove_nonprinting,
    "replace_unicode_punctuation": replace_unicode_punctuation,
    "straight_apostrophe": straight_apostrophe,
    "tokenize": tokenize,
}
_BATCH = 5000


def apply_steps(line: str, steps: Sequence[Step]) -> str:
    """Run one line through `steps`: names of STEPS, each with its keyword arguments."""
    for name, options in steps:
        line = STEPS[name](line, **options)
    return line


def process_lines(lines: Iterable[str], steps: Sequence[Step], workers: int = 1) -> Iterator[str]:
    """Yield every line of `lines` after `steps`, in order; a line has no line end.

    workers: processes; 1 stays in this one. Only a few batches are in memory at a time, so `lines`
    may be an open file of any size. Raises KeyError for an unknown step, and what a step raises.
    """
    unknown = [name for name, _ in steps if name not in STEPS]
    if unknown:
        raise KeyError(f"unknown text steps {unknown}: choose from {sorted(STEPS)}")
    if workers <= 1:
        return (apply_steps(line, steps) for line in lines)
    return _in_processes(iter(lines), list(steps), workers)


def _in_processes(lines: Iterator[str], steps: List[Step], workers: int) -> Iterator[str]:
    # Forked workers need not import torch again, which would take longer than most files.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    pending: Deque[Future] = deque()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context(method)) as pool:
        while True:
            while len(pending) < 2 * workers:
                batch = list(islice(lines, _BATCH))
                if not batch:
                    break
                pending.append(pool.submit(_process_batch, batch, steps))
            if not pending:
                return
            yield from pending.popleft().result()


def _process_batch(batch: List[str], steps: List[Step]) -> List[str]:
    return [apply_steps(line, steps) for line in batch]
