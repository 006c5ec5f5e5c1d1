"""Tables and the text around them, for a terminal as wide as it is or as Markdown."""

import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple, TextIO

from moa_fairseq.errors import printable

_BAR = re.compile(r"(?<!\\)\|")  # a bar would end a cell in Markdown
_BREAKABLE = 12  # the least width of a column whose words are broken


class Column(NamedTuple):
    """A column of a table.

    Args:
        key: the key of its values in the rows.
        head: the heading.
        form: the format of numbers, such as ",", ".1%" or ".2f". A column with a format is aligned to the
            right; ">" does this for a column of texts.
        once: True to leave out, on a terminal, a value that equals the value in the line above.
    """

    key: str
    head: str
    form: str = ""
    once: bool = False

    @property
    def is_right_aligned(self) -> bool:
        """Whether the cells are aligned to the right."""
        return bool(self.form)


class Table(NamedTuple):
    """A table of plain values.

    Args:
        columns: the columns, in order.
        rows: the rows, each a mapping of the columns' keys to values; a missing value and None are empty.
    """

    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]

    def markdown(self) -> str:
        """The table in Markdown, or "" without rows. A column without any value is left out."""
        columns, lines = self._cells()
        if not columns:
            return ""
        lines.insert(1, tuple("--:" if column.is_right_aligned else "---" for column in columns))
        rows = []
        for line in lines:
            escaped = [_BAR.sub(r"\|", text) for text in line]
            rows.append(f"| {' | '.join(escaped)} |")
        return "\n".join(rows)

    def text(self, width: int) -> str:
        """The table for a terminal, or "" without rows. A column without any value is left out.

        Args:
            width: the number of characters of a line. Cells are wrapped to fit, if words and numbers allow
                it.
        """
        columns, lines = self._cells()
        if not columns:
            return ""
        head, *rows = [list(map(plain, line)) for line in lines]
        printed = _without_repeats(columns, rows)
        widths, gap = _fit_columns(columns, [head, *printed], width)
        out = _wrapped(head, columns, widths, gap, is_head=True)
        out.append(gap.join("-" * size for size in widths))
        for row in printed:
            out += _wrapped(row, columns, widths, gap)
        return "\n".join(out)

    def _cells(self) -> tuple[list[Column], list[tuple[str, ...]]]:
        """The columns with values, and the texts of the cells line by line, the headings first."""
        columns = []
        cells_by_column = []
        for column in self.columns:
            texts = [_cell_text(row.get(column.key), column.form) for row in self.rows]
            if any(texts):
                columns.append(column)
                cells_by_column.append([column.head, *texts])
        lines = list(zip(*cells_by_column))
        return columns, lines


def terminal_width() -> int:
    """The number of characters of a line on the terminal; 80 if there is none."""
    return shutil.get_terminal_size().columns


def page(blocks: Iterable[str | Table], markdown: bool = False, width: int | None = None) -> str:
    """Blocks of a page with an empty line between two of them; empty blocks are left out.

    Args:
        blocks: tables, and texts in Markdown, each of which is a paragraph, a heading or a list.
        markdown: True for Markdown; False for a terminal, where headings are underlined and lines wrapped.
        width: the number of characters of a line on a terminal (None: the terminal's width).
    """
    width = width or terminal_width()
    parts = []
    for block in blocks:
        if isinstance(block, Table):
            parts.append(block.markdown() if markdown else block.text(width))
        elif markdown:
            parts.append(block)
        elif block.startswith("#"):
            heading = textwrap.fill(plain(block.lstrip("# ")), width)
            parts.append(f"{heading}\n{'=' * len(heading.splitlines()[-1])}")
        else:
            lines = []
            for line in map(plain, block.splitlines()):
                indent = "  " if line.startswith("- ") else ""
                lines.append(
                    textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
                )
            parts.append("\n".join(lines))
    return "\n\n".join(filter(None, parts)) + "\n"


def values_of(rows: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """The values of one column.

    Args:
        rows: the rows of a table.
        key: the column's key, which each row has.
    """
    return [row[key] for row in rows]


def plain(text: str) -> str:
    """Markdown without its marks for code and bold type."""
    return text.replace("`", "").replace("**", "")


class Terminal:
    """A stream to a terminal that escapes control characters of foreign text.

    Args:
        stream: the stream to write to.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text after `printable` has escaped it. Returns what the stream returns."""
        return self.stream.write(printable(text, coloured=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _cell_text(value: Any, form: str) -> str:
    """A value in one line: a number in its column's format, a text without control characters."""
    if value is None:
        return ""
    if isinstance(value, str):
        return printable(" ".join(value.splitlines()))
    return format(value, form)


def _without_repeats(columns: Sequence[Column], rows: Sequence[list[str]]) -> list[list[str]]:
    """The rows; in columns with `once`, a cell that equals the one above it is empty."""
    shown = [rows[0]]
    for above, row in pairwise(rows):
        cells = zip(columns, above, row)
        shown.append(["" if column.once and text == last else text for column, last, text in cells])
    return shown


class _Layout(NamedTuple):
    """How a table is made narrower, apart from wrapping texts between words.

    Args:
        gap: the spaces between two columns.
        wraps_numbers: whether cells that are aligned to the right are wrapped at their spaces.
        breaks_words: whether long words of other cells are broken.
    """

    gap: str
    wraps_numbers: bool = False
    breaks_words: bool = False


# The gentlest first
_LAYOUTS = (
    _Layout("  "),
    _Layout(" "),
    _Layout(" ", wraps_numbers=True),
    _Layout(" ", wraps_numbers=True, breaks_words=True),
)


def _fit_columns(
    columns: Sequence[Column], lines: Sequence[Sequence[str]], width: int
) -> tuple[list[int], str]:
    """The columns' widths, and the gap between two columns.

    The widest column shrinks until a line fits. If this is not enough, the gap is narrowed, then numbers are
    wrapped, then long words are broken; a line that does not fit even so is longer than the width.
    """
    cells_by_column = list(zip(*lines))
    widths = [max(map(len, cells)) for cells in cells_by_column]
    for layout in _LAYOUTS:
        room = width - len(layout.gap) * (len(columns) - 1)
        least = [_least_width(*column, layout) for column in zip(columns, cells_by_column)]
        _shrink(widths, least, room)
        if sum(widths) <= room:
            return widths, layout.gap
    return widths, _LAYOUTS[-1].gap


def _least_width(column: Column, cells: Sequence[str], layout: _Layout) -> int:
    """The least width of a column, whose heading is its first cell."""
    head, *texts = cells
    head_parts = head.replace("-", "- ")  # a heading may be broken after a hyphen
    longest_word = max(map(len, " ".join([head_parts, *texts]).split()), default=1)
    if column.is_right_aligned:
        return longest_word if layout.wraps_numbers else max(longest_word, *map(len, texts))
    return min(longest_word, _BREAKABLE) if layout.breaks_words else longest_word


def _shrink(widths: list[int], least: Sequence[int], room: int) -> None:
    """Make the widest columns narrower until they fit, or until all have their least width."""
    while sum(widths) > room:
        wide = [index for index, size in enumerate(widths) if size > least[index]]
        if not wide:
            return
        widths[max(wide, key=widths.__getitem__)] -= 1


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
            padded.append(text.rjust(size) if column.is_right_aligned else text.ljust(size))
        lines.append(gap.join(padded).rstrip())
    return lines
