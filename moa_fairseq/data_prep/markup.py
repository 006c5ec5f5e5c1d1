"""Taking lines of text out of the files that the evaluation campaigns publish."""

from __future__ import annotations

import re
from typing import Callable, Dict, Iterable, Iterator

Lines = Iterable[str]

_SEGMENT = "<seg id"
_SEGMENT_START = re.compile(r'<seg id="[0-9]*">\s*')
_SEGMENT_END = re.compile(r"\s*</seg>\s*")
_TED_HEADERS = ("<url>", "<talkid>", "<keywords>")
_TED_TAGS = re.compile("</?(?:title|description)>")


def _plain(lines: Lines) -> Iterator[str]:
    return iter(lines)


def _segments(lines: Lines) -> Iterator[str]:
    """The text of `<seg id="1"> … </seg>` lines; everything else is header. Entities stay as they are."""
    for line in lines:
        if _SEGMENT in line:
            yield _SEGMENT_END.sub("", _SEGMENT_START.sub("", line))


def _ted_talks(lines: Lines) -> Iterator[str]:
    """WIT3's training files: headers of a talk go, its title and description lose their tags."""
    for line in lines:
        if not any(tag in line for tag in _TED_HEADERS):
            yield _TED_TAGS.sub("", line)


MARKUP: Dict[str, Callable[[Lines], Iterator[str]]] = {
    "plain": _plain,
    "sgm": _segments,
    "wit3": _ted_talks,
}


def markup_of(name: str, stated: str) -> str:
    """Key of MARKUP for a file: by its ending, else what the table states."""
    return "sgm" if name.endswith((".sgm", ".xml")) else stated
