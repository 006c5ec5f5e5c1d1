"""What to do with a file that is not UTF-8: a command that converts it, for the end of an error."""

import gzip
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moa_fairseq.experiments.data.encoding_guesses import plausible_texts

_SAMPLE_BYTES = 60_000  # enough to guess an encoding, and fast to read
_SHOWN = 20  # letters of the text that a message shows before and after a position
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


class _ForeignLines(NamedTuple):
    """What a file has besides UTF-8.

    Args:
        sample: the lines that are not UTF-8; in a file with a NUL byte, the beginning of the file.
        has_utf8: whether other lines are UTF-8 with non-ASCII letters.
        has_stray_nul: whether the file has NUL bytes, but too few for UTF-16 or UTF-32.
    """

    sample: bytes
    has_utf8: bool = False
    has_stray_nul: bool = False


def _foreign_lines(path: Path) -> _ForeignLines:
    """Read the lines of a file that are not UTF-8, up to _SAMPLE_BYTES."""
    sample = b""
    has_utf8 = False
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
        for line in iter(lambda: stream.readline(_SAMPLE_BYTES), b""):
            if b"\0" in line:  # UTF-16 and UTF-32 have other line ends, so a line means nothing
                stream.seek(0)
                beginning = stream.read(_SAMPLE_BYTES)
                share = beginning.count(b"\0") / len(beginning)
                return _ForeignLines(beginning, has_stray_nul=share < _LEAST_NULS)
            try:
                has_utf8 = has_utf8 or not line.decode("utf-8-sig").isascii()
            except UnicodeDecodeError:
                sample += line
            if len(sample) > _SAMPLE_BYTES:
                break
    return _ForeignLines(sample, has_utf8)


def encoding_remedy(path: Path) -> str:
    """How to convert a file that is not UTF-8, suggested by its bytes; for the end of an error."""
    foreign = _foreign_lines(path)
    if foreign.has_stray_nul:
        return "Remove it: " + pipe_command(path, "tr -d '\\000'")
    if foreign.has_utf8:
        remedy = "correct or remove the lines that are not; iconv would spoil the others."
        return f"Other lines are UTF-8: {remedy}"
    suffix = path.name.removesuffix(".gz").rpartition(".")[2]
    language = re.split("[-_]", suffix.lower())[0]  # train.zh_CN.gz → zh
    texts = plausible_texts(foreign.sample, language)
    if not texts:
        return "Its bytes do not show its encoding: find out how it was written, or fetch it again."
    position = _first_difference(list(texts.values()))
    suggestions = []
    for name, text in texts.items():
        command = pipe_command(path, f"iconv -f {name} -t utf-8")
        suggestions.append(f"{name}, which gives {_words_around(text, position)}: {command}")
    listed = "; or ".join(suggestions)
    if len(suggestions) == 1:
        return f"If that text is right, its encoding is {listed}"
    return f"Its bytes fit several encodings; take the one with the right text. {listed}"


def _first_difference(texts: Sequence[str]) -> int:
    """The first position at which texts differ, or one text's first non-ASCII letter; 0 without any."""
    for position, letters in enumerate(zip(*texts)):
        if len(set(letters)) > 1 or (len(texts) == 1 and not letters[0].isascii()):
            return position
    return 0


def _words_around(text: str, position: int) -> str:
    """The words around a position of the text that are on the same line, quoted."""
    start = max(0, position - 2 * _SHOWN)
    before = re.search(rf"\S{{0,{_SHOWN}}}[^\n]{{0,{_SHOWN}}}\Z", text[start:position])
    after = re.match(rf"[^\r\n]{{0,{_SHOWN}}}\S{{0,{_SHOWN}}}", text[position:])
    assert before and after  # both also match nothing
    return repr((before[0] + after[0]).strip())
