"""Reading line-aligned text, plain or gzip: checked as it streams, before hours are spent on it."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import re
import reprlib
import zlib
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, NamedTuple, Optional, Sequence, Tuple

from charset_normalizer import from_bytes

from moa_fairseq.errors import UserError

# Longer lines are not sentences; they come from broken files and make tokenizers crawl.
MAX_LINE_BYTES = 1_000_000
# Begins what read_lines gives for a line that cannot be used; no good line holds a NUL.
BAD = "\0"
BAD_LINES = LONG, NUL, FOREIGN = ("line of a million bytes", "NUL byte", "not UTF-8")
# Words that fairseq's dictionary takes for its own symbols: padding, unknown words, ends of sentences.
SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
_SEGMENT = re.compile(r'<seg id="[0-9]*">\s*|\s*</seg>\s*')
_GLUED, _APART = (rf"{before}[.!?。！？][\"'”»)]?$" for before in (r"[^\W_]", r"\s"))
SPLIT, WHOLE = "split", "whole"  # hyphens
_COMPOUND = re.compile(r"[^\W_]-(?=[^\W_])")
_SAMPLE = 60_000  # bytes that an encoding is guessed by
# What no text holds, but the line end of some old computers: Windows' quotes and € when taken for Latin-1.
_CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")
_LOOKED_AT, _ACCIDENTS, _MOST_ODD = 1000, 2, 0.02  # lines
# The page that Windows uses for a language: a guess by bytes alone confuses them.
_WINDOWS_PAGES = {
    "cp1252": "en de fr es it pt nl da sv no nb nn fi is ga ca eu gl",
    "cp1250": "pl cs sk hu sl hr bs ro sq",
}
_MANY_BYTES = ("utf", "gb", "big5", "euc", "shift", "cp93", "cp94", "johab", "iso2022")  # of a letter
_ICONV = {
    **{"euc_jis_2004": "EUC-JP", "shift_jis_2004": "SHIFT_JIS", "mac_roman": "MACINTOSH"},
    **{f"utf_{bits}_{end}": f"UTF-{bits}{end.upper()}" for bits in (16, 32) for end in ("le", "be")},
}
_TED_HEADERS = ("<url>", "<talkid>", "<keywords>")
_TED_TAGS = re.compile("</?(?:title|description)>")


def read_lines(path: Path, mark_bad: bool = False) -> Iterator[str]:
    """The lines of a UTF-8 file (gzip when named .gz) without line ends.

    A leading BOM and the carriage returns of DOS files are taken away. Only a line feed ends a line:
    other Unicode separators stay inside the text. Raises UserError with the line number for undecodable
    bytes, NULs and absurdly long lines, for a truncated gzip, and where many of the first lines hold the
    control characters that Windows' text becomes when it is taken for Latin-1. mark_bad: a line of the first
    three kinds is given as BAD and its reason (one of BAD_LINES) instead, to be dropped and counted.
    """
    number = odd = 0

    def check() -> None:
        if odd > _ACCIDENTS and odd > _MOST_ODD * number:
            raise UserError(
                f"{path}: {odd:,} of the first {number:,} lines hold control characters (U+0080 to U+009F). "
                "Text in Windows' encoding becomes so when it is taken for Latin-1: convert the original "
                "with iconv -f CP1252 -t utf-8, or this file with iconv -f utf-8 -t latin1 | iconv -f CP1252 "
                "-t utf-8."
            )

    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
            for number, raw in enumerate(stream, start=1):
                if len(raw) > MAX_LINE_BYTES:
                    reason, story = LONG, f"{len(raw):,} bytes long; that is not a sentence."
                elif b"\0" in raw:
                    reason, story = NUL, "holds a NUL byte; this is not a UTF-8 text file."
                else:
                    try:
                        line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                        odd += number <= _LOOKED_AT and bool(_CONTROLS.search(line))
                        if number == _LOOKED_AT:
                            check()
                        yield line
                        continue
                    except UnicodeDecodeError as error:
                        place = f"byte {error.start + 1} of the line (0x{raw[error.start]:02x})"
                        reason, story = FOREIGN, f"{place} is not UTF-8."
                if not mark_bad:
                    remedy = "Check the file." if reason == LONG else encoding_remedy(path)
                    raise UserError(f"{path}, line {number}: {story} {remedy}")
                yield BAD + reason
            if number < _LOOKED_AT:
                check()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is a damaged gzip file ({error}): fetch it again.") from error


def encoding_remedy(path: Path) -> str:
    """How a file that is not UTF-8 becomes it, by what its bytes suggest; for the end of an error."""
    foreign, mixed = b"", False
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
        for line in stream:
            if b"\0" in line:  # UTF-16 or UTF-32, whose lines end otherwise
                stream.seek(0)
                foreign, mixed = stream.read(_SAMPLE), False
                if foreign.count(b"\0") < len(foreign) / 10:
                    return f"Take it out: tr -d '\\000' < {path} > NEW."
                break
            try:
                mixed = mixed or not line.decode("utf-8-sig").isascii()
            except UnicodeDecodeError:
                foreign += line
            if len(foreign) > _SAMPLE:
                break
    if mixed:
        return "Other lines are UTF-8: mend or remove those that are not; iconv would spoil the others."
    language = path.name.removesuffix(".gz").rpartition(".")[2]
    page = next((page for page, some in _WINDOWS_PAGES.items() if language in some.split()), "")
    found = from_bytes(foreign).best()
    name = found.encoding if found else ""
    if page and not name.startswith(_MANY_BYTES):
        name = page
    with contextlib.suppress(LookupError, UnicodeDecodeError):
        text = foreign.decode(name) if name else ""
        shown = next((line.strip() for line in text.splitlines() if not line.isascii()), text.strip())
        if text and not _CONTROLS.search(text):
            iconv = _ICONV.get(name, name.upper().replace("_", "-"))
            likely = f"Its bytes look like {iconv}, by which it reads {reprlib.repr(shown)}. If that is right"
            return f"{likely}: iconv -f {iconv} -t utf-8 {path} > NEW"
    return "Its encoding cannot be told from its bytes: find out how it was written, or fetch it again."


# What takes the lines of text out of the files that the evaluation campaigns publish.
MARKUP: Dict[str, Callable[[Iterator[str]], Iterator[str]]] = {
    "plain": iter,
    # `<seg id="1"> … </seg>`; everything else is header. Entities stay as they are.
    "sgm": lambda lines: (_SEGMENT.sub("", line) for line in lines if "<seg id" in line),
    # WIT3's training files: headers of a talk go, its title and description lose their tags.
    "wit3": lambda lines: (
        _TED_TAGS.sub("", line) for line in lines if not any(tag in line for tag in _TED_HEADERS)
    ),
}


def refuse_symbols(text: str, path: Path, number: int, symbols: Sequence[str] = SYMBOLS) -> None:
    """Raise UserError, naming the line, where a word of the text would become a symbol of fairseq's."""
    found = set(symbols).intersection(text.split())
    if found:
        word = min(found)
        escaped = word.replace("<", "&lt;").replace(">", "&gt;")
        raise UserError(
            f"{path}, line {number:,}: the word {word} would become fairseq's symbol of that name, which is "
            f"no text. Write another word, such as {escaped}, which detokenising turns back; or tokenise raw "
            "text here (data.tokenize: true), which does so."
        )


class Piece(NamedTuple):
    """One file of text and how its lines are taken out of it (a key of MARKUP)."""

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
    for one, other in files:
        count, lines = 0, (one.lines(mark_bad), other.lines(mark_bad))
        for source, target in itertools.zip_longest(*lines):
            if source is None or target is None:
                rest = count + 1 + sum(1 for _ in itertools.chain(*lines))
                shorter, longer = (one, other) if source is None else (other, one)
                problem = f"{longer.path} has {rest:,} lines and {shorter.path} has {count:,}"
                raise UserError(
                    f"{problem}: parallel files have one translation a line. Find the line where they part."
                )
            count += 1
            yield source, target
        if not count:
            raise UserError(f"{one.path} and {other.path} hold no line of text.")


def is_raw(lines: Iterable[str]) -> bool:
    """True where the marks that end sentences hang on words, as no tokeniser leaves them."""
    ends = [line.rstrip()[-3:] for line in lines]
    glued, apart = (sum(bool(re.search(mark, end)) for end in ends) for mark in (_GLUED, _APART))
    return glued > max(apart, len(ends) / 10)


def hyphens(lines: Iterable[str]) -> str:
    """How compounds are written: SPLIT (`a @-@ b`, as `tokenizer.perl -a` does), WHOLE (`a-b`), or ""."""
    split, whole = 0, 0
    for line in lines:
        split += f" {line} ".count(" @-@ ")
        whole += len(_COMPOUND.findall(line))
    return "" if split == whole else SPLIT if split > whole else WHOLE


def find_file(folder: Optional[Path], name: str) -> Optional[Path]:
    """The file of that name in a folder (or of the last part of its name), as it stands, plain or .gz."""
    places = [folder / name, folder / Path(name).name] if folder else []
    plain = [place.with_name(place.name.removesuffix(".gz")) for place in places]
    packed = [place.with_name(f"{place.name}.gz") for place in plain]
    return next((path for path in (*plain, *packed) if path.is_file()), None)
