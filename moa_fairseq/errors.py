"""The one exception that a user is meant to read."""

import difflib
import re
from collections.abc import Collection


class UserError(Exception):
    """Something the user can put right: bad flag, file or data.

    The message is one paragraph: it names the flag, file or line at fault and the remedy. The
    command line prints it without a traceback and exits with `status`.
    """

    status = 2

    def __init__(self, message: str) -> None:
        # of a quoted reason that ends in a full stop of its own
        super().__init__(re.sub(r"(?<=[^\s./])\.\.(?=\s|$)", ".", message))


class Diverged(UserError):
    """A training ended because its losses, gradients or weights are no numbers any more."""

    status = 3


# Control characters, which a terminal obeys, beside those sequences that this package itself writes: colours,
# and the end of a line that is written anew.
_CONTROL = re.compile(r"(\x1b\[[0-9;]*[mK]|\r)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str, coloured: bool = False) -> str:
    r"""Foreign text for a terminal.

    Args:
        text: what may hold control characters or halves of a character.
        coloured: whether colours, and returns to the beginning of a line, stay.

    Returns:
        The text with each of them written out, such as \x1b.
    """
    if text.isprintable():
        return text
    return _CONTROL.sub(
        lambda sign: sign[0] if coloured and sign[1] else sign[0].encode("unicode_escape").decode(),
        text,
    )


def did_you_mean(name: str, known: Collection[str]) -> str:
    """' (did you mean x or y?)' for the names nearest to one that is not known; '' where none is near.

    Args:
        name: as the user wrote it.
        known: all that there are.
    """
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f" (did you mean {' or '.join(near)}?)"
    return ""


def check_choice(flag: str, value: object, known: Collection[str]) -> None:
    """Refuse a value that is not one of those that are known.

    Args:
        flag: what it was given after, for the message.
        value: the one to look for.
        known: all that there are, named in the message.

    Raises:
        UserError: for another value.
    """
    if value not in known:
        raise UserError(f"{flag} {value} is unknown: choose one of {', '.join(known)}.")
