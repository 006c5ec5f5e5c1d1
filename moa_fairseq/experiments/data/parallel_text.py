"""Lines of text, of one language or two, plain or packed; they are checked before hours are spent on them."""

import gzip
import importlib
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.encodings import encoding_remedy, pipe_command

# Longer lines are not sentences; they come from broken files and make tokenizers crawl.
MAX_LINE_BYTES = 1_000_000
MAX_DOCUMENT_BYTES = 100_000_000
# SwitchHead's authors write this after each document, instead of the line ends that their text lacks.
DOCUMENT_END = "<STORY_SEP>"
_JSON_KINDS: dict[Any, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
}
# The beginning of a line from read_lines that cannot be used; no good line has a NUL.
BAD = "\0"
LONG = "line of a million bytes"
NUL = "NUL byte"
FOREIGN = "not UTF-8"
BAD_LINES = (LONG, NUL, FOREIGN)
# Words that fairseq's dictionary takes for its own symbols: padding, unknown words, sentence ends.
SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
# C1 control characters, except U+0085, the line end of some old computers. A text has them only if Windows'
# quotes and € were read as Latin-1.
_CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")
# A text is refused if, of its first _LOOKED_AT lines, more than _ACCIDENTS and more than the share _MOST_ODD
# have control characters. Fewer are accidents, which any text may have.
_LOOKED_AT = 1000
_ACCIDENTS = 2
_MOST_ODD = 0.02


def read_lines(path: Path, mark_bad: bool = False, most: int = MAX_LINE_BYTES) -> Iterator[str]:
    """The lines of a UTF-8 file (gzip when named .gz, zstandard when named .zst) without line ends.

    A leading BOM and the carriage returns of DOS files are removed. Only a line feed ends a line: other
    Unicode separators stay inside the text.

    Args:
        path: the file.
        mark_bad: True to return a line of undecodable bytes, with a NUL or of absurd length as BAD and the
            reason (one of BAD_LINES), so that it can be dropped and counted. False to raise an error.
        most: the largest number of bytes of a line.

    Raises:
        UserError: for such a line, with its number; for a truncated gzip file; for .zst without the package
            that reads it; and if many of the first lines have control characters, because text in Windows'
            encoding was read as Latin-1.
    """
    number = odd = 0
    try:
        with _opened(path) as stream:
            for number, raw in enumerate(_raw_lines(stream, most), start=1):
                try:
                    line = _decoded(raw, "utf-8-sig" if number == 1 else "utf-8", most)
                except _BadLine as error:
                    if not mark_bad:
                        raise _line_error(path, number, *error.args) from None
                    line = BAD + error.args[0]
                if number <= _LOOKED_AT:
                    odd += bool(_CONTROLS.search(line))
                if number == _LOOKED_AT:
                    _check_controls(path, number, odd)
                yield line
        if number < _LOOKED_AT:
            _check_controls(path, number, odd)
    except Exception as error:
        # zstandard's error cannot be named: the package may be missing
        is_gzip = isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile))
        if not is_gzip and type(error).__name__ != "ZstdError":
            raise
        kind = "gzip" if is_gzip else "zstandard"
        position = f" after line {number:,}" if number else ""
        problem = f"{path} is a damaged {kind} file{position} ({error})"
        raise UserError(f"{problem}. Copy or fetch it again.") from error


def _raw_lines(stream: Any, most: int) -> Iterator[bytes]:
    """The lines of a stream, each cut off after `most` + 1 bytes.

    A packed file of some kilobytes may have a line that would fill the memory.
    """
    while raw := stream.readline(most + 1):
        yield raw
        while len(raw) > most and not raw.endswith(b"\n"):
            raw = stream.readline(most + 1)


class _BadLine(Exception):
    """A line that cannot be used: the reason, one of BAD_LINES, and the problem as a sentence."""


def _decoded(raw: bytes, encoding: str, most: int) -> str:
    """A line without its end. Raises _BadLine."""
    if len(raw) > most:
        raise _BadLine(LONG, f"the line has more than {most:,} bytes, so it is not a sentence.")
    if b"\0" in raw:
        raise _BadLine(NUL, "the line has a NUL byte, so this is not a UTF-8 text file.")
    try:
        return raw.decode(encoding).rstrip("\r\n")
    except UnicodeDecodeError as error:
        position = f"byte {error.start + 1} of the line (0x{raw[error.start]:02x})"
        raise _BadLine(FOREIGN, f"{position} is not UTF-8.") from error


def _line_error(path: Path, number: int, reason: str, problem: str) -> UserError:
    """The error for a line that cannot be used."""
    remedy = "Check the file, or split the line." if reason == LONG else encoding_remedy(path)
    return UserError(f"{path}, line {number}: {problem} {remedy}")


def _check_controls(path: Path, number: int, odd: int) -> None:
    """Raise UserError if too many of the first lines, `odd` of `number`, have control characters."""
    if odd > _ACCIDENTS and odd > _MOST_ODD * number:
        raise UserError(
            f"{path}: {odd:,} of the first {number:,} lines have control characters (U+0080 to U+009F). "
            "Probably text in Windows' encoding was read as Latin-1. Convert the original "
            "with iconv -f CP1252 -t utf-8, or this file: "
            + pipe_command(path, "iconv -f utf-8 -t latin1", "iconv -f CP1252 -t utf-8")
        )


def _opened(path: Path) -> Any:
    """A stream of the unpacked bytes of a file."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix != ".zst":
        return open(path, "rb")
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError as error:
        remedy = "Install it (pip install zstandard), or unpack the file with zstd -d"
        raise UserError(
            f"{path} is a zstandard file, but the package zstandard is not installed. {remedy}."
        ) from error
    # Some data sets are packed with a window of up to 2 GB.
    opened = zstandard.open(path, "rb", dctx=zstandard.ZstdDecompressor(max_window_size=2**31))
    return io.BufferedReader(opened)  # zstandard's own stream cannot read lines


def read_documents(path: Path) -> Iterator[str]:
    """The texts of a file with a JSON object per line, such as C4 and peS2o; empty texts are skipped.

    Args:
        path: the file, plain, .gz or .zst.

    Raises:
        UserError: for a line that is not an object with a "text", or whose text cannot be written as UTF-8;
            see also `read_lines`.
    """
    for number, line in enumerate(read_lines(path, most=MAX_DOCUMENT_BYTES), 1):
        if not line.strip():
            continue
        try:
            text = _text_of(line)
        except (ValueError, RecursionError) as error:  # also endless numbers and brackets
            remedy = "Correct or remove the line, or copy the file again if it is cut off."
            raise UserError(
                f'{path}, line {number:,}: not a JSON object with a "text" ({error}). {remedy}'
            ) from error
        if text:
            yield text + DOCUMENT_END


def _text_of(line: str) -> str:
    """The "text" of a JSON object. Raises ValueError if there is none that can be written as UTF-8."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg}, column {error.colno}") from error
    if not isinstance(row, dict):
        raise ValueError(f"it is {_JSON_KINDS[type(row)]}")
    if "text" not in row:
        raise ValueError("that is missing")
    text = row["text"]
    if not isinstance(text, str):
        raise ValueError(f"that is {_JSON_KINDS[type(text)]}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"that holds {half!a}, half of a surrogate pair") from error
    return text


_SEGMENT = re.compile(r'<seg id="[0-9]*">\s*|\s*</seg>\s*')
_TED_HEADERS = ("<url>", "<talkid>", "<keywords>")
_TED_TAGS = re.compile("</?(?:title|description)>")
# How to get the lines of text from the files that the evaluation campaigns publish.
MARKUP: dict[str, Callable[[Iterator[str]], Iterator[str]]] = {
    "plain": iter,
    # Segments are `<seg id="1"> … </seg>`; all other lines are headers. Entities are not changed.
    "sgm": lambda lines: (_SEGMENT.sub("", line) for line in lines if "<seg id" in line),
    # WIT3's training files: headers of a talk are removed, its title and description lose their tags.
    "wit3": lambda lines: (
        _TED_TAGS.sub("", line) for line in lines if not any(tag in line for tag in _TED_HEADERS)
    ),
}


def refuse_symbols(text: str, path: Path, number: int, symbols: Sequence[str] = SYMBOLS) -> None:
    """Raise an error for text with a word that would become one of fairseq's symbols.

    Args:
        text: a line.
        path, number: the line's file and number, for the error.
        symbols: the forbidden words.

    Raises:
        UserError: if the line has such a word.
    """
    reserved = set(symbols).intersection(text.split())
    if reserved:
        word = min(reserved)
        escaped = word.replace("<", "&lt;").replace(">", "&gt;")
        raise UserError(
            f"{path}, line {number:,}: fairseq would take the word {word} for its own symbol of that name. "
            f"Write another word, such as {escaped}, which detokenising turns back; or tokenise raw "
            "text here (data.tokenize: true), which does so."
        )


def no_text(paths: Iterable[Path]) -> UserError:
    """The error for a split whose files have no word."""
    files = " and ".join(map(str, paths))
    return UserError(
        f"{files}: no line has text. Write the text of the split there; lines that are taken out of train "
        "will do for valid and test."
    )


class TextFile(NamedTuple):
    """One text file and how to read its lines.

    Args:
        path: the file, plain, .gz or .zst.
        markup: a key of MARKUP, or "documents".
    """

    path: Path
    markup: str = "plain"

    def lines(self, mark_bad: bool = False) -> Iterator[str]:
        """The lines of text, see `read_lines`; for "documents" their texts, see `read_documents`."""
        if self.markup == "documents":
            return read_documents(self.path)
        return MARKUP[self.markup](read_lines(self.path, mark_bad))


TextFilePair = tuple[TextFile, TextFile]


def read_pairs(files: Sequence[TextFilePair], mark_bad: bool = False) -> Iterator[tuple[str, str]]:
    """The aligned lines of pairs of files, one pair of files after the other.

    Args:
        files: the (source, target) pairs of files.
        mark_bad: see `read_lines`.

    Raises:
        UserError: if a pair of files is empty or its files differ in length. A file in UTF-16 also differs in
            length; its message is about the encoding.
    """
    for pair in files:
        count = bad = 0
        lines = [file.lines(mark_bad) for file in pair]
        for source, target in itertools.zip_longest(*lines):
            if source is None or target is None:
                # In UTF-16 most lines are bad, and the encoding is the real error
                raise _length_error(pair, mark_bad and bad <= count / 2)
            count += 1
            bad += source.startswith(BAD) or target.startswith(BAD)
            yield source, target
        if not count:
            raise no_text([file.path for file in pair])


def _length_error(pair: TextFilePair, mark_bad: bool) -> UserError:
    """The error for files of different lengths; without `mark_bad` a bad line raises its own."""
    counts = [(sum(1 for _ in file.lines(mark_bad)), file.path) for file in pair]
    (fewer, shorter), (more, longer) = sorted(counts)
    return UserError(
        f"{longer} has {more:,} lines and {shorter} has {fewer:,}, but parallel files have one translation "
        "per line. Find the first line that does not match."
    )


_END = r"[.!?。！？][\"'”»)]?$"
_GLUED = re.compile(rf"[^\W_]{_END}")
_APART = re.compile(rf"\s{_END}")


def is_raw(lines: Iterable[str]) -> bool:
    """True if the marks that end sentences are attached to words, which no tokeniser does."""
    ends = [line.rstrip()[-3:] for line in lines]
    glued = sum(bool(_GLUED.search(end)) for end in ends)
    apart = sum(bool(_APART.search(end)) for end in ends)
    return glued > max(apart, len(ends) / 10)


# How a text writes the hyphens of compounds: `a @-@ b` or `a-b`
SPLIT = "split"
WHOLE = "whole"
_COMPOUND = re.compile(r"[^\W_]-(?=[^\W_])")


def hyphens(lines: Iterable[str]) -> str:
    """How most compounds are written: SPLIT (`a @-@ b`, as `tokenizer.perl -a` does) or WHOLE (`a-b`).

    "" if there are no compounds, or equally many of both.
    """
    split = joined = 0
    for line in lines:
        split += f" {line} ".count(" @-@ ")
        joined += len(_COMPOUND.findall(line))
    if split == joined:
        return ""
    return SPLIT if split > joined else WHOLE


def find_file(folder: Path | None, name: str) -> Path | None:
    """A file in a folder, unpacked or as .gz; None if there is none.

    Args:
        folder: the folder, or None.
        name: a path below the folder; the last part of the path alone is also tried.
    """
    if folder is None:
        return None
    stem = name.removesuffix(".gz")
    plain = [folder / stem, folder / Path(stem).name]
    packed = [path.with_name(f"{path.name}.gz") for path in plain]
    return next(filter(Path.is_file, plain + packed), None)
