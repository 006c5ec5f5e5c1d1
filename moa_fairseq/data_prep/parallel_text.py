"""Reading line-aligned text, plain or gzip: checked as it streams, before hours are spent on it."""

from __future__ import annotations

import gzip
import itertools
import zlib
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from moa_fairseq.errors import UserError

# Longer lines are no sentences; they come from broken files and make tokenizers crawl.
MAX_LINE_BYTES = 1_000_000


class SplitFiles(NamedTuple):
    """The two files of one split, e.g. train.en.gz and train.de.gz."""

    source: Path
    target: Path


def find_splits(
    folder: Path, names: Dict[str, str], languages: Tuple[str, str], required: Sequence[str], hint: str
) -> Dict[str, SplitFiles]:
    """Find `<name>.<lang>` or `<name>.<lang>.gz` for each split.

    names: split → file stem. required: splits that must be there; others are taken when both of
    their files exist. hint: what the folder should hold, added to the UserError that lists all
    missing files.
    """
    if not folder.is_dir():
        raise UserError(f"There is no data folder {folder}. {hint}")
    unknown = [split for split in required if split not in names]
    if unknown:
        known = ", ".join(f"{split} = {stem}" for split, stem in names.items())
        raise UserError(f"The data has no subset {', '.join(unknown)} (generate.subsets); it has {known}.")
    found, missing = {}, []
    for split, stem in names.items():
        files = [_find(folder, f"{stem}.{language}") for language in languages]
        if all(files):
            found[split] = SplitFiles(*files)
        elif split in required or any(files):
            pairs = zip(languages, files)
            missing += [f"{stem}.{language}[.gz]" for language, file in pairs if file is None]
    if missing:
        state = "is empty" if not any(folder.iterdir()) else f"lacks {', '.join(missing)}"
        raise UserError(f"The data folder {folder} {state}. {hint}")
    return found


def _find(folder: Path, name: str) -> Optional[Path]:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file (gzip when named .gz) without line ends.

    A leading BOM and the carriage returns of DOS files are taken away. Only a line feed ends a line:
    other Unicode separators stay inside the text. Raises UserError with the line number for undecodable
    bytes, NULs and absurdly long lines, and for a truncated gzip.
    """
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
            for number, raw in enumerate(stream, start=1):
                yield _decode(raw, path, number)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path} is a damaged gzip file (after line {number}: {error}): fetch it again."
        ) from error


def _decode(raw: bytes, path: Path, number: int) -> str:
    if len(raw) > MAX_LINE_BYTES:
        raise UserError(
            f"{path}, line {number}: {len(raw):,} bytes long; that is no sentence. Check the file."
        )
    if b"\0" in raw:
        raise UserError(f"{path}, line {number}: holds a NUL byte; this is no UTF-8 text file.")
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, line {number}: byte {error.start + 1} of the line (0x{raw[error.start]:02x}) is not "
            f"UTF-8. Convert the file, for example with iconv -f latin1 -t utf-8."
        ) from error
    return text.rstrip("\r\n")


def read_pairs(files: SplitFiles) -> Iterator[Tuple[str, str]]:
    """The aligned lines of two files. Raises UserError when one is empty or they differ in length."""
    missing = object()
    lines = (read_lines(files.source), read_lines(files.target))
    count = 0
    for source, target in itertools.zip_longest(*lines, fillvalue=missing):
        if source is missing or target is missing:
            rest = 1 + sum(1 for _ in itertools.chain(*lines))
            longer, shorter = files if target is missing else reversed(files)
            raise UserError(
                f"{longer} has {count + rest:,} lines and {shorter} has {count:,}: parallel files must have "
                f"one translation per line. One of them is cut off or belongs to another edition."
            )
        count += 1
        yield source, target
    if not count:
        raise UserError(f"{files.source} and {files.target} are empty.")


def chunks(items: Iterable, size: int) -> Iterator[List]:
    """Lists of `size` items, the last one shorter."""
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
