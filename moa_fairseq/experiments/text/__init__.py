"""Text processing faithful to Moses' Perl scripts: functions of a line, and chains of them by name."""

from collections.abc import Callable, Sequence
from typing import Any

from moa_fairseq.experiments.text.normalize import (
    lowercase,
    normalize_punctuation,
    remove_nonprinting,
    replace_unicode_punctuation,
    straight_apostrophe,
)
from moa_fairseq.experiments.text.tokenizer import detokenize, tokenize

__all__ = [
    "STEPS",
    "Step",
    "apply_steps",
    "detokenize",
    "normalize_punctuation",
    "remove_nonprinting",
    "replace_unicode_punctuation",
    "tokenize",
]
# A step is data, so that it can be stored in a table and sent to another process.
Step = tuple[str, dict[str, Any]]
STEPS: dict[str, Callable[..., str]] = {
    step.__name__: step
    for step in (
        *(lowercase, normalize_punctuation, remove_nonprinting, replace_unicode_punctuation),
        *(straight_apostrophe, tokenize),
    )
}


def apply_steps(line: str, steps: Sequence[Step]) -> str:
    """Run one line through steps.

    Args:
        line: without its line end.
        steps: names of STEPS, each with its keyword arguments, in order.
    """
    for name, options in steps:
        line = STEPS[name](line, **options)
    return line
