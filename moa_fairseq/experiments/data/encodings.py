"""What to do with a file that is not UTF-8: a command that converts it, for the end of an error."""

import codecs
import gzip
import re
import shlex
from pathlib import Path

from charset_normalizer import from_bytes

_SAMPLE_BYTES = 60_000  # enough to guess an encoding, and fast to read
# Of ASCII text, UTF-16 has one NUL in two bytes, and UTF-32 has three in four. A file with a smaller share of
# NUL bytes than this is text with some stray ones.
_LEAST_NULS = 0.1


def pipe_command(path: Path, *programs: str) -> str:
    """A shell command that pipes a file, plain or .gz, through filters into a new file of the same kind.

    Args:
        path: the file.
        programs: the filters, quoted for a shell.
    """
    file = shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))
    if path.suffix == ".gz":
        return " | ".join([f"zcat {file}", *programs, "gzip > NEW.gz"])
    return " | ".join([f"{programs[0]} < {file}", *programs[1:]]) + " > NEW"


def encoding_remedy(path: Path) -> str:
    """How to convert a file that is not UTF-8, guessed from its bytes; for the end of an error."""
    foreign = b""  # the lines that are not UTF-8
    has_utf8 = False  # whether another line has UTF-8 letters
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
        for line in iter(lambda: stream.readline(_SAMPLE_BYTES), b""):
            if b"\0" in line:  # UTF-16 and UTF-32 have other line ends, so a line means nothing
                stream.seek(0)
                head = stream.read(_SAMPLE_BYTES)
                if head.count(b"\0") < _LEAST_NULS * len(head):
                    return "Remove it: " + pipe_command(path, "tr -d '\\000'")
                return _conversion(path, head)
            try:
                has_utf8 = has_utf8 or not line.decode("utf-8-sig").isascii()
            except UnicodeDecodeError:
                foreign += line
            if len(foreign) > _SAMPLE_BYTES:
                break
    if has_utf8:
        return (
            "Other lines are UTF-8: correct or remove the lines that are not; "
            "iconv would spoil the others."
        )
    return _conversion(path, foreign)


def _conversion(path: Path, sample: bytes) -> str:
    """The remedy that converts a file from the encoding of its sample."""
    guesses = {guess.encoding: guess for guess in from_bytes(sample)}
    if not guesses:
        return "Its bytes do not show its encoding: find out how it was written, or fetch it again."
    # charset-normalizer often prefers CP1250, which is rarer than CP1252
    guess = guesses.get("cp1252") or next(iter(guesses.values()))
    # iconv's spelling: ISO8859-1, not latin_1; UTF-16LE, not UTF-16-LE
    name = codecs.lookup(guess.encoding).name.upper().replace("_", "-")
    name = name.replace("-LE", "LE").replace("-BE", "BE")
    text = str(guess)
    letter = re.search(r"[^\r\n]{0,20}[^\x00-\x7f][^\r\n]{0,20}", text) or re.search(
        ".{1,20}", text
    )
    excerpt = letter[0] if letter else ""
    command = pipe_command(path, f"iconv -f {name} -t utf-8")
    return (
        f"Its encoding may be {name}, which gives {excerpt!r}. If that text is wrong, write "
        f"another encoding in this command (iconv -l lists them): {command}"
    )
