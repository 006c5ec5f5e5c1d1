"""Tables and the text around them, for a terminal as wide as it is or as Markdown."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TextIO

from moa_fairseq.errors import printable

_BAR = re.compile(r"(?<!\\)\|")  # ends a cell in Markdown
_BREAKABLE = 12  # a word that is longer may be broken where nothing else makes a table fit


class Column(NamedTuple):
    """A column of a table.

    Args:
        key: of the rows' values.
        head: its heading.
        form: the format of values that are no texts, such as ",", ".1%" or ".2f". A column that has one
            stands on the right; ">" is for texts that shall.
        once: on a terminal, what stands in the line above already is left out.
    """

    key: str
    head: str
    form: str = ""
    once: bool = False


class Table(NamedTuple):
    """A table of plain values.

    Args:
        columns: in order.
        rows: map a column's key to its value; what a row lacks, or None, is empty.
    """

    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]

    def text(self, markdown: bool = False, width: int | None = None) -> str:
        """The table, or "" without rows; a column without any value is left out.

        Args:
            markdown: for Markdown, where nothing is wrapped, instead of a terminal.
            width: on a terminal cells are wrapped until a line has at most so many characters (None: the
                terminal's), if words and numbers allow it.
        """
        columns = []
        cells = []
        for column in self.columns:
            texts = []
            for row in self.rows:
                texts.append(_written(row.get(column.key), column.form))
            if any(texts):
                columns.append(column)
                cells.append([column.head, *texts])
        if not cells:
            return ""
        lines = list(map(list, zip(*cells)))
        if markdown:
            lines.insert(1, ["--:" if column.form else "---" for column in columns])
            rows = []
            for line in lines:
                escaped = [_BAR.sub(r"\|", text) for text in line]
                rows.append(f"| {' | '.join(escaped)} |")
            return "\n".join(rows)
        lines = [list(map(plain, line)) for line in lines]
        for line, above in zip(lines[:1:-1], lines[-2:0:-1]):
            for index, column in enumerate(columns):
                if column.once and line[index] == above[index]:
                    line[index] = ""
        widths, gap = _widths(columns, lines, width or shutil.get_terminal_size().columns)
        out = _wrapped(lines[0], columns, widths, gap, is_head=True)
        out.append(gap.join("-" * size for size in widths))
        for line in lines[1:]:
            out += _wrapped(line, columns, widths, gap)
        return "\n".join(out)


def _wrapped(
    line: Sequence[str],
    columns: Sequence[Column],
    widths: Sequence[int],
    gap: str,
    is_head: bool = False,
) -> list[str]:
    """A row of a table in as many lines as its longest cell needs."""
    wrapped = []
    for text, size in zip(line, widths):
        wrapped.append(textwrap.wrap(text, size, break_on_hyphens=is_head))
    lines = []
    for parts in zip_longest(*wrapped, fillvalue=""):
        padded = []
        for text, size, column in zip(parts, widths, columns):
            padded.append(text.rjust(size) if column.form else text.ljust(size))
        lines.append(gap.join(padded).rstrip())
    return lines


def page(blocks: Iterable[str | Table], markdown: bool = False, width: int | None = None) -> str:
    """Tables and Markdown's paragraphs, headings and lists with an empty line between; "" is left out.

    Args:
        blocks: a text is one paragraph, one heading (it begins with #), or one list.
        markdown: for Markdown; for a terminal headings are underlined and lines wrapped.
        width: of a line on a terminal, in characters (None: the terminal's).
    """
    room = width or shutil.get_terminal_size().columns
    parts = []
    for block in blocks:
        if isinstance(block, Table):
            parts.append(block.text(markdown, width))
        elif markdown:
            parts.append(block)
        elif block.startswith("#"):
            heading = textwrap.fill(plain(block.lstrip("# ")), room)
            parts.append(f"{heading}\n{'=' * len(heading.splitlines()[-1])}")
        else:
            lines = []
            for line in map(plain, block.splitlines()):
                indent = "  " if line.startswith("- ") else ""
                lines.append(
                    textwrap.fill(line, room, subsequent_indent=indent, break_on_hyphens=False)
                )
            parts.append("\n".join(lines))
    return "\n\n".join(filter(None, parts)) + "\n"


def values_of(rows: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """A column as a list.

    Args:
        rows: of a table.
        key: of the value that each has.
    """
    return [row[key] for row in rows]


def plain(text: str) -> str:
    """Markdown without its marks for code and bold type."""
    return text.replace("`", "").replace("**", "")


def _written(value: Any, form: str) -> str:
    if value is None or isinstance(value, str):
        return printable(" ".join((value or "").splitlines()))
    return format(value, form)


class Terminal:
    """A terminal that is shown no control character of foreign text.

    Args:
        stream: what is written to.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text as `printable` has it."""
        return self.stream.write(printable(text, coloured=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _widths(
    columns: Sequence[Column], lines: Sequence[Sequence[str]], width: int
) -> tuple[list[int], str]:
    """The columns' widths, and what stands between them: the widest column gives way until a line fits."""
    widths = [max(map(len, texts)) for texts in zip(*lines)]
    heads = [text.replace("-", "- ") for text in lines[0]]  # where they may be broken
    texts_of = list(zip(heads, *lines[1:]))
    words = [max(map(len, " ".join(texts).split()), default=1) for texts in texts_of]
    # Numbers stay on one line as long as wrapping headings and texts is enough.
    unbroken = list(words)
    broken = list(words)
    for index, column in enumerate(columns):
        if column.form:
            unbroken[index] = max(words[index], *map(len, texts_of[index][1:]))
        else:
            broken[index] = min(words[index], _BREAKABLE)
    for gap, least in (("  ", unbroken), (" ", unbroken), (" ", words), (" ", broken)):
        room = width - len(gap) * (len(widths) - 1)
        while sum(widths) > room and (
            wide := [n for n, size in enumerate(widths) if size > least[n]]
        ):
            widths[max(wide, key=widths.__getitem__)] -= 1
        if sum(widths) <= room:
            break
    return widths, gap
