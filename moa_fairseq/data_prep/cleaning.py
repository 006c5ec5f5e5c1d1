"""Which sentence pairs are kept: the rules of Moses' `clean-corpus-n.perl`."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional, Tuple, Union

# Perl's \s for Unicode text; Python's own also takes the separators U+001C to U+001F.
_SPACES = re.compile("[\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")


class Cleaning(NamedTuple):
    """Limits for both sides of a pair, in tokens between spaces.

    min, max: fewest and most tokens. ratio: a side may have at most this many times the other's
    tokens. word: longest token in characters. Without `max` only pairs with an empty side are
    dropped and the text stays untouched.
    """

    min: int = 1
    max: Optional[int] = None
    ratio: float = 9.0
    word: int = 1000


Kept = Tuple[str, str]


def clean(source: str, target: str, rules: Cleaning) -> Union[Kept, str]:
    """The pair as it is kept, or the reason why it is dropped.

    As `clean-corpus-n.perl -ratio R corpus l1 l2 out MIN MAX`: vertical bars vanish (Moses keeps them
    when the very first line of a corpus has one; tokenised text holds none), white space becomes
    single spaces, then the limits of `rules` count.
    """
    if rules.max is None:
        return (source, target) if source.strip() and target.strip() else "empty side"
    source, target = _tidy(source), _tidy(target)
    if not source or not target:
        return "empty side"
    one, other = source.count(" ") + 1, target.count(" ") + 1
    if max(one, other) > rules.max:
        return f"longer than {rules.max} tokens"
    if min(one, other) < rules.min:
        return f"shorter than {rules.min} tokens"
    if one / other > rules.ratio or other / one > rules.ratio:
        return f"length ratio above {rules.ratio:g}"
    long = [text for text in (source, target) if len(text) > rules.word]
    if any(len(word) > rules.word for text in long for word in text.split(" ")):
        return f"token of more than {rules.word} characters"
    return source, target


def _tidy(text: str) -> str:
    return _SPACES.sub(" ", text.replace("|", "")).strip(" ")
