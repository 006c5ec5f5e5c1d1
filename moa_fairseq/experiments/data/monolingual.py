"""Text of language models: words, SentencePiece pieces or bytes, one split per file."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import Part
from moa_fairseq.experiments.data.parallel_text import SYMBOLS, TextFile, no_text, refuse_symbols
from moa_fairseq.experiments.data.pieces import processor
from moa_fairseq.experiments.records.json_files import Values, saved_json, selected, write_json
from moa_fairseq.files import atomic_write, checksum
from moa_fairseq.text.subwords import plain
from moa_fairseq.text.workers import chunks

Texts = Mapping[str, Sequence[TextFile]]
Facts = dict[str, dict[str, int]]
CHUNK = 5000  # lines that are encoded at once
BATCH = 200  # lines that are encoded at once if they may be whole documents
SAVED = 50_000_000  # bytes between two records of the progress
# SwitchHead's text has no mark at line ends, but fairseq ends each line with one. Lines of so many pieces
# make these marks rare.
ROW = 100_000
# Each byte as a decimal number. A line feed is not written: fairseq's end-of-line symbol represents it.
_BYTES = list(map("{} ".format, range(256)))
log = logging.getLogger(__name__)


def write_lines(texts: Texts, folder: Path) -> Facts:
    """Copy the lines of each split, checked, to `folder/<split>`.

    Args:
        texts: split → its files.
        folder: the output folder.

    Returns:
        Split → "lines", "longest" (bytes of the longest line), "tokens" (words between white space).

    Raises:
        UserError: for words that are fairseq's symbols, except the <unk> of WikiText, and for an empty
            split.
    """
    return {split: _write(folder / split, _words(files), files) for split, files in texts.items()}


def _words(files: Iterable[TextFile]) -> Iterator[str]:
    """The lines of files, in which WikiText's <unk> is an ordinary word."""
    symbols = [symbol for symbol in SYMBOLS if symbol != "<unk>"]
    for file in files:
        for number, line in enumerate(file.lines(), 1):
            refuse_symbols(line, file.path, number, symbols)
            yield line


def write_bytes(texts: Texts, sizes: Mapping[str, int], folder: Path) -> Facts:
    """Cut one file into splits of so many bytes and write each byte as a number: `folder/<split>`.

    Args:
        texts: "train" → the file.
        sizes: split → number of bytes, in the order of the file.
        folder: the output folder.

    Returns:
        Split → "lines" and "bytes".

    Raises:
        UserError: if the file's size is not the sum of all splits.
    """
    (file,) = texts["train"]
    total = sum(sizes.values())
    size = file.path.stat().st_size
    if size != total:
        raise UserError(f"{file.path} has {size:,} bytes instead of {total:,}. Fetch it again.")

    facts = {}
    with open(file.path, "rb") as stream:
        for split, size in sizes.items():
            fact = _write(folder / split, _numbers(stream, size), [file])
            facts[split] = {"lines": fact["lines"], "bytes": size}
    return facts


def _numbers(stream: BinaryIO, size: int) -> Iterator[str]:
    """The lines of the next `size` bytes, each byte as a number."""
    while size:
        line = stream.readline(size)
        size -= len(line)
        yield "".join([_BYTES[value] for value in line.removesuffix(b"\n")])


def write_pieces(texts: Texts, model: Path, folder: Path, workers: int) -> Facts:
    """Write the pieces of each split to `folder/<split>`, without line ends, ROW pieces per line.

    Args:
        texts: split → its files.
        model: the file of the SentencePiece model.
        folder: the output folder.
        workers: the number of threads.

    Returns:
        Split → "lines" (of the text), "longest" (bytes of the longest line), "tokens" (pieces).

    Raises:
        UserError: for a split without text.
    """
    facts = {}
    for split, files in texts.items():
        counts = {"lines": 0, "longest": 0}
        lines = _counted(itertools.chain.from_iterable(map(TextFile.lines, files)), counts)
        encoded = (row for _, row in _encoded(lines, model, workers, CHUNK))
        rows = chunks(itertools.chain.from_iterable(encoded), ROW)
        facts[split] = _write(folder / split, map(" ".join, rows), files) | counts
    return facts


def _encoded(
    lines: Iterable[str], model: Path, workers: int, batch_size: int
) -> Iterator[tuple[str, list[str]]]:
    """Each line and its pieces."""
    encoder = processor(str(model))
    for batch in chunks(lines, batch_size):
        encoded = encoder.encode(list(map(plain, batch)), num_threads=workers)
        for line, ids in zip(batch, encoded):
            # By number, so that a letter without a piece becomes <unk> instead of a separate word
            yield line, encoder.id_to_piece(ids)


def grow_pieces(
    parts: Sequence[Part],
    fetch: Callable[[Part], TextFile],
    digest: Callable[[Part], str | None],
    model: Path,
    path: Path,
    most: int,
    workers: int,
) -> Values:
    """Write the first `most` pieces of texts to a file; a later call resumes an interrupted one.

    A line has whole lines of the text, and ROW pieces or more; the last line of a part may have fewer.
    `path`.json records the progress after every SAVED bytes. Neither text nor pieces are kept in memory.

    Args:
        parts: the parts of the text, in order; parts after the last piece are not fetched.
        fetch: a function that returns the file of a part.
        digest: a function that returns the checksum of a part's file; None if the file no longer exists. If a
            file has changed since it was read, everything starts over.
        model: the file of the SentencePiece model.
        path: the output file, whose folder is created.
        most: the number of pieces to write.
        workers: the number of threads.

    Returns:
        "lines" (of the text), "longest" (bytes of the longest line), "tokens" (pieces), "parts" (number of
        parts that were read) and "files" (name of such a part → its checksum).

    Raises:
        UserError: if the text has fewer pieces.
    """
    progress_file = path.with_name(f"{path.name}.json")
    settings = {"model": checksum(model), "most": most, "parts": [part.name for part in parts]}
    progress = _saved_progress(path, settings, parts, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=most, initial=progress.tokens, unit=" pieces", disable=None, leave=False)
    with open(path, "ab") as stream, bar:
        stream.truncate(progress.bytes)  # what was written after the last record
        stream.seek(progress.bytes)
        for part in parts[progress.parts :]:
            if progress.tokens == most:
                break
            lines = itertools.islice(fetch(part).lines(), progress.in_part, None)
            progress.files[part.name] = digest(part)
            encoded = _encoded(lines, model, workers, BATCH)
            for texts, row in _rows(encoded, most - progress.tokens):
                if row:
                    stream.write(f"{' '.join(row)}\n".encode())
                bar.update(len(row))
                progress.add(texts, row)
                if stream.tell() - progress.bytes > SAVED:
                    progress.save(stream, progress_file)
            progress.parts += 1
            progress.in_part = 0
            progress.save(stream, progress_file)
            log.info(f"{part.name}: {progress.tokens:,} of {most:,} pieces")
    if progress.tokens < most:
        raise UserError(
            f"The text of {path.name} has {progress.tokens:,} pieces, but {most:,} are requested. Request "
            "fewer by --tokens N (data.tokens), or give more text."
        )
    return selected(vars(progress), ("lines", "longest", "tokens", "parts", "files"))


def _rows(
    encoded: Iterable[tuple[str, list[str]]], most: int
) -> Iterator[tuple[list[str], list[str]]]:
    """Lines that have ROW pieces together, or more, and their pieces; ends at `most` pieces."""
    texts = []
    row: list[str] = []
    for text, pieces in encoded:
        texts.append(text)
        row += pieces
        if len(row) >= min(ROW, most):
            yield texts, row[:most]
            most -= len(row)
            if most <= 0:
                return
            texts, row = [], []
    yield texts, row


@dataclasses.dataclass
class _Progress:
    """How much of a growing text is written.

    Args:
        of: the settings of the call, among them `most`, the number of pieces to write.
        files: name of each part that was begun → its checksum.
        parts: the number of parts that were read completely.
        in_part: the number of lines that were read of the next part.
        lines: the number of lines that were read of all parts.
        tokens: the number of pieces that were written.
        bytes: the size of the output file when this record was saved.
        longest: the number of bytes of the longest line.
    """

    of: Values
    files: dict[str, str | None] = dataclasses.field(default_factory=dict)
    parts: int = 0
    in_part: int = 0
    lines: int = 0
    tokens: int = 0
    bytes: int = 0
    longest: int = 0

    def add(self, texts: list[str], row: list[str]) -> None:
        """Count lines of the text and the pieces that were written of them."""
        self.in_part += len(texts)
        self.lines += len(texts)
        self.tokens += len(row)
        self.longest = max([self.longest, *(len(text.encode()) for text in texts)])

    def save(self, stream: BinaryIO, file: Path) -> None:
        """Record the progress, once all that was written is on the disk."""
        stream.flush()
        os.fsync(stream.fileno())
        self.bytes = stream.tell()
        write_json(file, vars(self))


def _saved_progress(
    path: Path,
    settings: Values,
    parts: Sequence[Part],
    digest: Callable[[Part], str | None],
) -> _Progress:
    """The progress of an interrupted call with the same settings on the same text, or a new record."""
    saved = saved_json(path.with_name(f"{path.name}.json"))
    if saved.get("of") != settings or not path.is_file() or path.stat().st_size < saved["bytes"]:
        return _Progress(settings)
    progress = _Progress(**saved)
    changed = []
    for part in parts:
        if part.name in progress.files and digest(part) not in (None, progress.files[part.name]):
            changed.append(part.name)
    if changed:
        log.warning(f"{', '.join(changed)} has changed since it was read: {path.name} starts over")
        return _Progress(settings)
    log.info(f"{path.name}: resuming after {progress.tokens:,} pieces")
    return progress


def _counted(lines: Iterable[str], counts: dict[str, int]) -> Iterator[str]:
    """Lines; they are counted in "lines", and the bytes of the longest in "longest"."""
    for line in lines:
        counts["lines"] += 1
        counts["longest"] = max(counts["longest"], len(line.encode()))
        yield line


def _write(path: Path, lines: Iterable[str], files: Iterable[TextFile]) -> dict[str, int]:
    """Write lines. Returns the facts of `write_lines`; raises UserError for text without a word."""
    facts = {"lines": 0, "tokens": 0, "longest": 0}
    with atomic_write(path) as stream:  # also creates the folder
        for line in _counted(lines, facts):
            stream.write(f"{line}\n")
            facts["tokens"] += len(line.split())
    if not facts["tokens"]:
        raise no_text([file.path for file in files])
    return facts
