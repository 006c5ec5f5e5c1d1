"""The text stages: raw lines → normalised and tokenised lines → subwords, over several processes."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Tuple

from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe
from tqdm import tqdm

from moa_fairseq.data_prep.parallel_text import SplitFiles, chunks, read_lines, read_pairs
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write
from moa_fairseq.text import normalize_punctuation, tokenize

Pair = Tuple[str, str]
CHUNK = 2000


class TextSteps(NamedTuple):
    """What is done to each raw line.

    moses: edition of Moses' scripts for punctuation and tokens ("current", "2016"), or "" for text
    that is tokenised already. lowercase comes first, as in Multi30k's own preparation.
    """

    lowercase: bool
    moses: str


def process_line(line: str, language: str, steps: TextSteps) -> str:
    """One raw line → its tokens, separated by single spaces."""
    text = line.lower() if steps.lowercase else line
    if steps.moses:
        text = normalize_punctuation(text, language, edition=steps.moses)
        text = tokenize(text, language, edition=steps.moses)
    return " ".join(text.split())


def tokenise_splits(
    splits: Dict[str, SplitFiles], languages: Pair, steps: TextSteps, folder: Path, say: Callable[[str], None]
) -> Dict[str, Dict[str, int]]:
    """Write `<split>.<lang>` into `folder` for each split.

    Training pairs with an empty side are left out and counted; other splits keep every line.
    Returns split → {"lines", "dropped", "tokens_<lang>"}.
    """
    work = functools.partial(_process_pairs, languages=languages, steps=steps)
    facts = {}
    for split, files in splits.items():
        facts[split] = _write_split(
            split,
            _parallel_map(work, chunks(read_pairs(files), CHUNK), split),
            languages,
            folder,
            drop_empty=split == "train",
        )
        numbers = ", ".join(
            f"{facts[split][f'tokens_{language}']:,} {language} tokens" for language in languages
        )
        dropped = facts[split]["dropped"]
        say(
            f"{split}: {facts[split]['lines']:,} pairs, {numbers}"
            + (f"; {dropped:,} pairs with an empty side left out" if dropped else "")
        )
        if not facts[split]["lines"]:
            raise UserError(f"{files.source} and {files.target}: no pair with text on both sides.")
    return facts


def learn_codes(text_files: Iterable[Path], merges: int, codes: Path) -> None:
    """Learn `merges` joint BPE operations on all the files together; fewer where the text gives no more."""
    lines = itertools.chain.from_iterable(read_lines(path) for path in text_files)
    # subword-nmt draws its own progress bar, which is only noise in a log file.
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with atomic_write(codes) as stream, quiet:
        learn_bpe(lines, stream, merges)


def segment_files(files: Dict[Path, Path], codes: Path) -> None:
    """Apply BPE codes: each file of the mapping is read and its subwords are written to the mapped file."""
    work = functools.partial(_segment_lines, codes=str(codes))
    for source, destination in files.items():
        with atomic_write(destination) as stream:
            for lines in _parallel_map(work, chunks(read_lines(source), CHUNK), f"BPE {source.name}"):
                stream.writelines(line + "\n" for line in lines)


def _process_pairs(pairs: List[Pair], languages: Pair, steps: TextSteps) -> List[Pair]:
    return [
        (process_line(source, languages[0], steps), process_line(target, languages[1], steps))
        for source, target in pairs
    ]


def _segment_lines(lines: List[str], codes: str) -> List[str]:
    bpe = _load_codes(codes)
    return [bpe.segment(line) for line in lines]


@functools.lru_cache(maxsize=1)
def _load_codes(codes: str) -> BPE:
    with open(codes, encoding="utf-8") as stream:
        return BPE(stream)


def _write_split(
    split: str, results: Iterable[List[Pair]], languages: Pair, folder: Path, drop_empty: bool
) -> Dict[str, int]:
    facts = {"lines": 0, "dropped": 0, **{f"tokens_{language}": 0 for language in languages}}
    with (
        atomic_write(folder / f"{split}.{languages[0]}") as source,
        atomic_write(folder / f"{split}.{languages[1]}") as target,
    ):
        for pair in itertools.chain.from_iterable(results):
            if drop_empty and not all(pair):
                facts["dropped"] += 1
                continue
            facts["lines"] += 1
            for text, stream, language in zip(pair, (source, target), languages):
                stream.write(text + "\n")
                facts[f"tokens_{language}"] += len(text.split())
    return facts


def _parallel_map(work: Callable, batches: Iterator[List], label: str) -> Iterator[List]:
    """`map` over batches in order, in several processes once there is enough to do, with a progress bar.

    A group of batches is in memory at a time, so files of any length pass through.
    """
    processes = min(8, os.cpu_count() or 1)
    first = list(itertools.islice(batches, 3))
    with tqdm(unit=" lines", desc=label, disable=None, leave=False) as bar, contextlib.ExitStack() as stack:
        if len(first) < 3 or processes == 1:
            groups: Iterable[Iterable[List]] = [map(work, itertools.chain(first, batches))]
        else:
            # Fresh processes: forking one that has loaded torch and started threads can hang for ever.
            pool = stack.enter_context(
                ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _ignore_interrupt)
            )
            groups = (
                pool.map(work, group) for group in chunks(itertools.chain(first, batches), 8 * processes)
            )
        for result in itertools.chain.from_iterable(groups):
            bar.update(len(result))
            yield result


def _ignore_interrupt() -> None:
    """Ctrl-C is the parent's to handle; the pool ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
