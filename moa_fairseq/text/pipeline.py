"""A line through a chain of functions, which a recipe names."""

from typing import Any, Callable, Dict, Sequence, Tuple

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


def apply_steps(line: str, steps: Sequence[Step]) -> str:
    """Run one line through `steps`: names of STEPS, each with its keyword arguments."""
    for name, options in steps:
        line = STEPS[name](line, **options)
    return line
