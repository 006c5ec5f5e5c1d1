"""The one exception that a user is meant to read."""

import unicodedata
from typing import Sequence


class UserError(Exception):
    """Something the user can put right: bad flag, file or data.

    The message is one paragraph: it names the flag, file or line at fault and the remedy. The
    command line prints it without a traceback and exits with status 2.
    """


def printable(text: str) -> str:
    """Foreign text for a terminal: a control character, which could give it orders, as `\\x1b`."""
    if text.isprintable():
        return text
    kept = "\n\t"
    return "".join(
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in ("Cc", "Cs") and letter not in kept
        else letter
        for letter in text
    )


def check_choice(flag: str, value: object, known: Sequence[str]) -> None:
    """Raises UserError unless `value`, given after `flag`, is one of those that are known."""
    if value not in known:
        raise UserError(f"{flag} {value} is unknown: choose one of {', '.join(known)}.")
