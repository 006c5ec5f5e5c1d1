"""Text → ids of GPT-2's byte-pair encoding, over several processes, part by part: nothing is done twice."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, NamedTuple, Tuple

from fairseq.data.encoders.gpt2_bpe_utils import Encoder, get_encoder
from tqdm import tqdm

from moa_fairseq.data_prep.gpt2_files import Gpt2Files
from moa_fairseq.data_prep.parallel_text import chunks, read_lines
from moa_fairseq.files import atomic_write

PART_LINES = 10_000
# Words of WikiText's tokenisation that are no words of the language; they are encoded like any other.
MARKS = {"unk": "<unk>", "hyphen": "@-@"}


class Part(NamedTuple):
    """Some successive lines of one split, and the file that will hold their ids."""

    path: Path
    lines: List[str]


def encode_line(line: str, encoder: Encoder) -> str:
    """One line as ids separated by spaces; white space at its ends is dropped, an empty line stays empty.

    RoBERTa's own preparation does so: the first word of a line is encoded without a space before it.
    """
    return " ".join(map(str, encoder.encode(line.strip())))


def encode_file(
    text: Path, output: Path, parts: Path, files: Gpt2Files, processes: int = 0, part_lines: int = PART_LINES
) -> Dict[str, int]:
    """Encode `text` into `output`, line by line.

    parts: a folder in which finished parts are kept until the whole is done, so that an interrupted run
    goes on; its name must change with the text and the encoding. processes: 0 for one per CPU, at most 8.
    Returns lines, words (white-space separated, without ends of lines), subwords, and unk and hyphen, the
    number of words `<unk>` and `@-@`.
    """
    parts.mkdir(parents=True, exist_ok=True)
    name = output.name
    batches = (
        Part(parts / f"{name}.{number:05d}", lines)
        for number, lines in enumerate(chunks(read_lines(text), part_lines))
    )
    work = functools.partial(_encode_part, encoder=str(files.encoder), vocab=str(files.vocab))
    total: Counter = Counter({"lines": 0, "words": 0, "subwords": 0, **dict.fromkeys(MARKS, 0)})
    with atomic_write(output) as stream:
        for part, counts in _in_order(work, batches, processes or min(8, os.cpu_count() or 1), name):
            with open(part, encoding="utf-8") as content:
                content.readline()
                shutil.copyfileobj(content, stream)
            total.update(counts)
    for part in parts.glob(f"{name}.*"):
        part.unlink()
    return dict(total)


def _encode_part(part: Part, encoder: str, vocab: str) -> Tuple[Path, Dict[str, int]]:
    """Write one part, unless an earlier run did: a line of JSON with its counts, then the lines of ids."""
    if part.path.is_file():
        with open(part.path, encoding="utf-8") as content:
            return part.path, json.loads(content.readline())
    bpe = _load_encoder(encoder, vocab)
    words = Counter(word for line in part.lines for word in line.split())
    encoded = [encode_line(line, bpe) for line in part.lines]
    counts = {
        "lines": len(encoded),
        "words": sum(words.values()),
        "subwords": sum(len(line.split()) for line in encoded),
        **{name: words[mark] for name, mark in MARKS.items()},
    }
    with atomic_write(part.path) as stream:
        stream.write(json.dumps(counts) + "\n")
        stream.writelines(line + "\n" for line in encoded)
    return part.path, counts


@functools.lru_cache(maxsize=1)
def _load_encoder(encoder: str, vocab: str) -> Encoder:
    return get_encoder(encoder, vocab)


def _in_order(
    work: functools.partial, batches: Iterator[Part], processes: int, label: str
) -> Iterator[Tuple[Path, Dict[str, int]]]:
    """Results of `work` in the order of `batches`, a few per process in memory, with a progress bar."""
    first = list(itertools.islice(batches, 2))
    batches = itertools.chain(first, batches)
    description = f"GPT-2 BPE, {label}"
    with (
        tqdm(unit=" lines", desc=description, disable=None, leave=False) as bar,
        contextlib.ExitStack() as stack,
    ):
        if len(first) < 2 or processes == 1:
            groups: Iterable[Iterable] = [map(work, batches)]
        else:
            # Fresh processes: forking one that has loaded torch and started threads can hang for ever.
            pool = stack.enter_context(
                ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _ignore_interrupt)
            )
            groups = (pool.map(work, group) for group in chunks(batches, 2 * processes))
        for path, counts in itertools.chain.from_iterable(groups):
            bar.update(counts["lines"])
            yield path, counts


def _ignore_interrupt() -> None:
    """Ctrl-C is the parent's to handle; the pool ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
