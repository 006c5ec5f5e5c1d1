"""Byte pair encoding by subword-nmt: learning merges on several files together, loading them once."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
import reprlib
import sys
from pathlib import Path
from typing import Sequence

from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import get_vocabulary, learn_bpe

from moa_fairseq.data_prep.parallel_text import read_lines
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write

# Words whose segmentation is remembered; with more, subword-nmt's memory, which has no end, starts anew.
REMEMBERED = 1_000_000
_VERSION = re.compile(r"#version: +0\.[12] *")
_REMEDY = "Give the file that subword-nmt learn-bpe or the prepare stage wrote, or delete a damaged one."


def load_codes(path: str) -> BPE:
    """The codes of a file, read once per process unless the file changes.

    Raises UserError, naming the line, for a file that is none of subword-nmt's.
    """
    stat = os.stat(path)
    codes = _load(path, stat.st_size, stat.st_mtime_ns)
    if len(codes.cache) > REMEMBERED:
        codes.cache.clear()
    return codes


@functools.lru_cache(maxsize=1)
def _load(path: str, size: int, time: int) -> BPE:
    # Checked here, as subword-nmt ends the whole program where it cannot read a line.
    lines = list(read_lines(Path(path)))
    while lines and not lines[-1]:
        lines.pop()
    header = 1 if lines and lines[0].startswith("#version:") else 0
    if header and not _VERSION.fullmatch(lines[0]):
        raise UserError(f"{path}, line 1: {reprlib.repr(lines[0])} is not '#version: 0.2' or 0.1. {_REMEDY}")
    if len(lines) == header:
        raise UserError(f"{path} holds no merges. {_REMEDY}")
    for number, line in enumerate(lines[header:], header + 1):
        if len(line.strip("\r ").split(" ")) != 2:
            raise UserError(
                f"{path}, line {number}: {reprlib.repr(line)} is no merge, which is two subwords with one "
                f"space between them. {_REMEDY}"
            )
    return BPE(io.StringIO("\n".join(lines) + "\n"))


def learn_codes(text_files: Sequence[Path], merges: int, codes: Path) -> None:
    """Learn `merges` joint BPE operations on all the files together; fewer where the text gives no more.

    The same codes as `subword-nmt learn-bpe -s MERGES` on the files one after the other. Raises
    UserError for text without a single pair of letters.
    """
    words = get_vocabulary(itertools.chain.from_iterable(map(read_lines, text_files)))
    if not any(len(word) > 1 for word in words):
        names = ", ".join(str(path) for path in text_files)
        raise UserError(f"{names}: there is no word of two letters to learn BPE from.")
    # subword-nmt draws its own progress bar, which is only noise in a log file.
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with atomic_write(codes) as stream, quiet:
        learn_bpe([f"{word} {count}" for word, count in words.items()], stream, merges, is_dict=True)
