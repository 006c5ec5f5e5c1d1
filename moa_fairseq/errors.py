"""Errors that a user is meant to read, and the parts of their messages."""

import difflib
import re
from collections.abc import Collection


class UserError(Exception):
    """An error that the user can put right: a wrong flag, file or line of data.

    The message is one paragraph, which names the flag, file or line at fault and the remedy. The command line
    prints it without a traceback and exits with `status`.
    """

    status = 2

    def __init__(self, message: str) -> None:
        # A quoted reason may end in a full stop of its own, which the message then has twice.
        super().__init__(re.sub(r"(?<=[^\s./])\.\.(?=\s|$)", ".", message))


class Diverged(UserError):
    """A training ended because its losses, gradients or weights are NaN or infinite."""

    status = 3


# The first group matches the sequences that this package itself writes: colours, and the return to the
# beginning of a line. The rest are control characters, which a terminal would obey, and halves of surrogate
# pairs.
_CONTROL = re.compile(r"(\x1b\[[0-9;]*[mK]|\r)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str, coloured: bool = False) -> str:
    r"""Make text of unknown origin safe for a terminal.

    Args:
        text: text that may hold control characters or halves of surrogate pairs.
        coloured: keep colours, and returns to the beginning of a line.

    Returns:
        The text in which each such character is written as an escape sequence, such as \x1b.
    """
    if text.isprintable():
        return text
    return _CONTROL.sub(
        lambda sign: sign[0] if coloured and sign[1] else sign[0].encode("unicode_escape").decode(),
        text,
    )


def did_you_mean(name: str, known: Collection[str]) -> str:
    """' (did you mean x or y?)' with the known names nearest to an unknown one; '' if none is near.

    Args:
        name: the unknown name, as the user wrote it.
        known: all names that exist.
    """
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f" (did you mean {' or '.join(near)}?)"
    return ""


def check_choice(flag: str, value: object, known: Collection[str]) -> None:
    """Refuse a value that is not one of the known choices.

    Args:
        flag: the flag that has the value, for the message.
        value: the value.
        known: all choices, which the message lists.

    Raises:
        UserError: if the value is no choice.
    """
    if value not in known:
        raise UserError(f"{flag} {value} is unknown: choose one of {', '.join(known)}.")
