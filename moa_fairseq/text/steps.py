"""Text processing faithful to Moses' Perl scripts: functions of a line, and sequences of them by name."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from moa_fairseq.text.normalize import (
    lowercase,
    normalize_punctuation,
    remove_nonprinting,
    replace_unicode_punctuation,
    straight_apostrophe,
)
from moa_fairseq.text.tokenizer import detokenize, tokenize

__all__ = [
    "STEPS",
    "Step",
    "apply_steps",
    "detokenize",
    "normalize_punctuation",
    "remove_nonprinting",
    "replace_unicode_punctuation",
    "tokenize",
    "words_of",
]
# fairseq splits tokens at any white space, BPE at blanks only. The number of blanks stays as Moses prints it.
_NOT_BLANK = re.compile(r"[^\S ]")
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
    """Apply steps to a line.

    Args:
        line: a line without its line end.
        steps: names of STEPS, each with keyword arguments, in order.
    """
    for name, options in steps:
        line = STEPS[name](line, **options)
    return line


def words_of(line: str, steps: Sequence[Step]) -> str:
    """Apply steps to a line, and separate words by blanks only, as merges and dictionaries require.

    Args:
        line, steps: as in `apply_steps`.
    """
    return _NOT_BLANK.sub(" ", apply_steps(line, steps))
