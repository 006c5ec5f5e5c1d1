"""Whole files through a chain of line functions, on several processes."""

import functools
import itertools
from typing import Any, Callable, Dict, Iterable, Iterator, List, Sequence, Tuple

from moa_fairseq.text.normalize import (
    lowercase,
    normalize_punctuation,
    remove_nonprinting,
    replace_unicode_punctuation,
    straight_apostrophe,
)
from moa_fairseq.text.tokenizer import tokenize
from moa_fairseq.text.workers import chunks, ordered_map

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
    batches = ordered_map(
        functools.partial(_process_batch, steps=list(steps)), chunks(lines, _BATCH), workers, "text"
    )
    return itertools.chain.from_iterable(batches)


def _process_batch(batch: List[str], steps: List[Step]) -> List[str]:
    return [apply_steps(line, steps) for line in batch]
