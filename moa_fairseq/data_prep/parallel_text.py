"""Reading line-aligned text, plain or gzip: checked as it streams, before hours are spent on it."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import zlib
from pathlib import Path
from typing import Iterable, Iterator, List, NamedTuple, Sequence, Tuple

from moa_fairseq.data_prep.markup import MARKUP
from moa_fairseq.errors import UserError

# Longer lines are no sentences; they come from broken files and make tokenizers crawl.
MAX_LINE_BYTES = 1_000_000
# Begins what read_lines gives for a line that cannot be used; no good line holds a NUL.
BAD = "\0"


def read_lines(path: Path, mark_bad: bool = False) -> Iterator[str]:
    """The lines of a UTF-8 file (gzip when named .gz) without line ends.

    A leading BOM and the carriage returns of DOS files are taken away. Only a line feed ends a line:
    other Unicode separators stay inside the text. Raises UserError with the line number for undecodable
    bytes, NULs and absurdly long lines, and for a truncated gzip. mark_bad: a line of the first three
    kinds is given as BAD and its reason instead, to be dropped and counted.
    """
    with damaged_gzip(path), gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                yield _decode(raw, number)
            except _BadLine as bad:
                if not mark_bad:
                    raise UserError(f"{path}, line {number}: {bad.story}") from None
                yield BAD + bad.reason


@contextlib.contextmanager
def damaged_gzip(path: Path) -> Iterator[None]:
    """Turn what Python raises for a cut off or foreign gzip file into a UserError."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is a damaged gzip file ({error}): fetch it again.") from error


class _BadLine(Exception):
    """A line that is no text. reason: in two words, for counting; story: with the remedy."""

    def __init__(self, reason: str, story: str) -> None:
        super().__init__(reason, story)
        self.reason, self.story = reason, story


def _decode(raw: bytes, number: int) -> str:
    if len(raw) > MAX_LINE_BYTES:
        story = f"{len(raw):,} bytes long; that is no sentence. Check the file."
        raise _BadLine("line of a million bytes", story)
    if b"\0" in raw:
        raise _BadLine("NUL byte", "holds a NUL byte; this is no UTF-8 text file.")
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        story = (
            f"byte {error.start + 1} of the line (0x{raw[error.start]:02x}) is not UTF-8. Convert the "
            "file, for example with iconv -f latin1 -t utf-8."
        )
        raise _BadLine("not UTF-8", story) from error
    return text.rstrip("\r\n")


class Piece(NamedTuple):
    """One file of text and how its lines are taken out of it (a key of markup.MARKUP)."""

    path: Path
    markup: str = "plain"

    def lines(self, mark_bad: bool = False) -> Iterator[str]:
        """The lines of text; see read_lines."""
        return MARKUP[self.markup](read_lines(self.path, mark_bad))


PiecePair = Tuple[Piece, Piece]


def read_pairs(files: Sequence[PiecePair], mark_bad: bool = False) -> Iterator[Tuple[str, str]]:
    """The aligned lines of pairs of files, one pair of files after the other.

    Raises UserError when a pair of files is empty or differs in length.
    """
    for source, target in files:
        yield from _read_pair(source, target, mark_bad)


def _read_pair(one: Piece, other: Piece, mark_bad: bool) -> Iterator[Tuple[str, str]]:
    missing = object()
    lines = (one.lines(mark_bad), other.lines(mark_bad))
    count = 0
    for source, target in itertools.zip_longest(*lines, fillvalue=missing):
        if source is missing or target is missing:
            rest = 1 + sum(1 for _ in itertools.chain(*lines))
            longer, shorter = (one, other) if target is missing else (other, one)
            raise UserError(unequal(longer.path, count + rest, shorter.path, count))
        count += 1
        yield source, target
    if not count:
        raise UserError(f"{one.path} and {other.path} hold no line of text.")


def unequal(longer: Path, more: int, shorter: Path, fewer: int) -> str:
    """What to say of two files that should be aligned and are not."""
    return (
        f"{longer} has {more:,} lines and {shorter} has {fewer:,}: parallel files must have one translation "
        "per line. One of them is cut off or belongs to another edition."
    )


def chunks(items: Iterable, size: int) -> Iterator[List]:
    """Lists of `size` items, the last one shorter."""
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
