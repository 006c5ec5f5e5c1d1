"""Text of language models: words, SentencePiece pieces or bytes, one split per file."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tqdm import tqdm

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import Part
from moa_fairseq.experiments.data.parallel_text import SYMBOLS, TextFile, no_text, refuse_symbols
from moa_fairseq.experiments.data.pieces import plain, processor
from moa_fairseq.experiments.records.json_files import Values, saved_json, selected, write_json
from moa_fairseq.files import atomic_write, checksum
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
    symbols = list(SYMBOLS)
    symbols.remove("<unk>")

    def lines(files: Iterable[TextFile], longest: _Longest) -> Iterator[str]:
        for file in files:
            for number, line in enumerate(longest.of(file.lines()), 1):
                refuse_symbols(line, file.path, number, symbols)
                yield line

    facts = {}
    for split, files in texts.items():
        longest = _Longest()
        facts[split] = _write(folder / split, lines(files, longest), files)
        facts[split]["longest"] = longest.bytes
    return facts


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

    def lines(stream: BinaryIO, budget: int) -> Iterator[str]:
        while budget:
            line = stream.readline(budget)
            budget -= len(line)
            yield "".join([_BYTES[value] for value in line.removesuffix(b"\n")])

    facts = {}
    with open(file.path, "rb") as stream:
        for split, size in sizes.items():
            fact = _write(folder / split, lines(stream, size), [file])
            facts[split] = {"lines": fact["lines"], "bytes": size}
    return facts


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
    encoder = processor(str(model))
    facts = {}
    for split, files in texts.items():
        longest = _Longest()
        read = longest.of(itertools.chain.from_iterable(map(TextFile.lines, files)))
        encode = functools.partial(encoder.encode, num_threads=workers)
        batches = map(encode, chunks(map(plain, read), CHUNK))
        # By number, so that a letter without a piece becomes <unk> instead of a separate word.
        rows = map(encoder.id_to_piece, itertools.chain.from_iterable(batches))
        tokens = itertools.chain.from_iterable(rows)
        facts[split] = _write(folder / split, map(" ".join, chunks(tokens, ROW)), files)
        facts[split].update(lines=longest.lines, longest=longest.bytes)
    return facts


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
    encoder = processor(str(model))
    progress_file = path.with_name(f"{path.name}.json")
    settings = {"model": checksum(model), "most": most, "parts": [part.name for part in parts]}
    progress = _saved_progress(path, settings, parts, digest)
    longest = _Longest(progress.longest)
    path.parent.mkdir(parents=True, exist_ok=True)
    mode: Literal["r+b", "wb"] = "r+b" if progress.bytes else "wb"
    encode = functools.partial(encoder.encode, num_threads=workers)
    bar = tqdm(total=most, initial=progress.tokens, unit=" pieces", disable=None, leave=False)
    with open(path, mode) as stream, bar:
        stream.truncate(progress.bytes)
        stream.seek(progress.bytes)
        for part in parts[progress.parts :]:
            if not progress.missing:
                break
            lines = itertools.islice(fetch(part).lines(), progress.in_part, None)
            progress.files[part.name] = digest(part)
            batches = map(encode, chunks(map(plain, longest.of(lines)), BATCH))
            row: list[int] = []
            for ids in itertools.chain.from_iterable(batches):
                row += ids
                progress.in_part += 1
                progress.lines += 1
                if len(row) < min(ROW, progress.missing):
                    continue
                bar.update(progress.write(row, encoder, stream))
                row = []
                if not progress.missing:
                    break
                if stream.tell() - progress.bytes > SAVED:
                    progress.save(longest, stream, progress_file)
            progress.parts += 1
            progress.in_part = 0
            bar.update(progress.write(row, encoder, stream))
            progress.save(longest, stream, progress_file)
            log.info("%s: %s of %s pieces", part.name, f"{progress.tokens:,}", f"{most:,}")
    if progress.missing:
        count = f"{progress.tokens:,} pieces"
        problem = f"The text of {path.name} has {count}, but {most:,} are requested"
        raise UserError(f"{problem}. Request fewer by --tokens N (data.tokens), or give more text.")
    return selected(vars(progress), ("lines", "longest", "tokens", "parts", "files"))


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

    @property
    def missing(self) -> int:
        """Number of pieces that are not written yet."""
        missing: int = self.of["most"] - self.tokens
        return missing

    def write(self, row: list[int], encoder: Any, stream: BinaryIO) -> int:
        """Write a line of the row's pieces, at most as many as are missing. Returns their number."""
        row = row[: self.missing]
        if row:
            # By number, so that a letter without a piece becomes <unk> instead of a separate word.
            stream.write((" ".join(encoder.id_to_piece(row)) + "\n").encode())
        self.tokens += len(row)
        return len(row)

    def save(self, longest: _Longest, stream: BinaryIO, file: Path) -> None:
        """Record the progress, once all that was written is on the disk."""
        stream.flush()
        os.fsync(stream.fileno())
        self.bytes = stream.tell()
        self.longest = longest.bytes
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
        checksum_then = progress.files.get(part.name)
        if part.name in progress.files and digest(part) not in (None, checksum_then):
            changed.append(part.name)
    if changed:
        log.warning(
            "%s has changed since it was read: %s starts over", ", ".join(changed), path.name
        )
        return _Progress(settings)
    log.info("%s: resuming after %s pieces", path.name, f"{progress.tokens:,}")
    return progress


class _Longest:
    """Counts lines while they are read: `lines`, and the `bytes` of the longest."""

    def __init__(self, length: int = 0) -> None:
        self.lines = 0
        self.bytes = length

    def of(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            self.lines += 1
            if len(line) * 4 > self.bytes:
                self.bytes = max(self.bytes, len(line.encode()))
            yield line


def _write(path: Path, lines: Iterable[str], files: Iterable[TextFile]) -> dict[str, int]:
    """Write lines, and count them and their words. Raise UserError for text without a word."""
    facts = {"lines": 0, "tokens": 0}
    with atomic_write(path) as stream:  # also creates the folder
        for line in lines:
            stream.write(f"{line}\n")
            facts["lines"] += 1
            facts["tokens"] += len(line.split())
    if not facts["tokens"]:
        raise no_text([file.path for file in files])
    return facts
