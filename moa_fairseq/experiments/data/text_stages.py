"""Sentence pairs: line functions, BPE by subword-nmt, and cleaning, in several processes."""

import collections
import contextlib
import functools
import io
import itertools
import logging
import os
import re
import reprlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import get_vocabulary, learn_bpe

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import pieces
from moa_fairseq.experiments.data.catalogue import Cleaning, HoldOut
from moa_fairseq.experiments.data.parallel_text import (
    BAD,
    BAD_LINES,
    TextFilePair,
    no_text,
    read_lines,
    read_pairs,
    refuse_symbols,
)
from moa_fairseq.experiments.records.json_files import Values
from moa_fairseq.files import atomic_write
from moa_fairseq.text.codecs import MergeCodec
from moa_fairseq.text.steps import Step, words_of
from moa_fairseq.text.workers import chunks, ordered_map

Pair = tuple[str, str]
CHUNK = 2000  # pairs that a process treats at once
# The largest share of unusable lines: a file with more has another encoding, or is not text.
MOST_BAD = 0.01
# Perl's \s for Unicode text, as Moses uses it; Python's \s also matches the separators U+001C to U+001F.
_SPACES = re.compile("[\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
_VERSION = re.compile(r"#version: +0\.[12] *")
_REMEDY = (
    "Give the file that subword-nmt learn-bpe or the prepare stage wrote, or delete a damaged one."
)
log = logging.getLogger(__name__)


class Treatment(NamedTuple):
    """The processing of a pair.

    Args:
        steps: the line functions of each side, applied first.
        codes: the file of the merges, or the two sides' SentencePiece models, applied next; "" for neither.
        cleaning: the filter of pairs, applied last.
    """

    steps: tuple[tuple[Step, ...], tuple[Step, ...]] = ((), ())
    codes: str | tuple[str, str] = ""
    cleaning: Cleaning | None = None


class Split(NamedTuple):
    """One split: its files and their processing.

    Args:
        name: the name of the split.
        files: pairs of files, read one after the other.
        treatment: the processing of each pair of lines.
        hold_out: the lines that go to another split.
        lenient: True if lines that are not text are dropped and counted; otherwise they are an error.
        own: True for the user's own text, in which a word that is one of fairseq's symbols is an error.
    """

    name: str
    files: Sequence[TextFilePair]
    treatment: Treatment
    hold_out: HoldOut | None = None
    lenient: bool = False
    own: bool = False


def preprocess_pairs(pairs: Sequence[Pair], treatment: Treatment) -> list[Pair | str]:
    """Process pairs of lines. Returns each processed pair, or the reason for dropping it."""
    return [_preprocess(pair, treatment) for pair in pairs]


def _preprocess(pair: Pair, treatment: Treatment) -> Pair | str:
    """The processed pair, or the reason for dropping it."""
    for line in pair:
        if line.startswith(BAD):
            return line.removeprefix(BAD)
    source, target = map(words_of, pair, treatment.steps)
    if isinstance(treatment.codes, tuple):
        source, target = map(pieces.encode, treatment.codes, (source, target))
    elif treatment.codes:
        merges = MergeCodec(load_codes(treatment.codes))
        source, target = merges.encode(source), merges.encode(target)
    if treatment.cleaning:
        return clean(source, target, treatment.cleaning)
    return source, target


def write_splits(
    splits: Sequence[Split], languages: Sequence[str], folder: Path, workers: int
) -> dict[str, Values]:
    """Write `<split>.<language>` into a folder for each split, and for held-out splits.

    Args:
        splits: the splits to read.
        languages: the languages of the two sides.
        folder: the output folder.
        workers: the number of processes.

    Returns:
        Split → "lines" and "tokens_<language>"; for a split that was read also "read" (number of pairs) and
        "dropped" (reason → number of pairs).

    Raises:
        UserError: for files that are not aligned text, or if a split has no pair left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Values] = {}
    for split in splits:
        facts.update(_write_split(split, languages, folder, workers))
    return facts


class _Output:
    """The files `<split>.<language>` of a split, while they are written.

    Args:
        folder: the output folder.
        name: the name of the split.
        languages: the languages of the two sides.
        stack: closes the files.
    """

    def __init__(
        self, folder: Path, name: str, languages: Sequence[str], stack: contextlib.ExitStack
    ) -> None:
        self.name = name
        self.lines = 0
        self.drops: collections.Counter[str] = collections.Counter()  # reason → pairs left out
        self.tokens = dict.fromkeys(languages, 0)
        self.streams = {}
        for language in languages:
            path = folder / f"{name}.{language}"
            self.streams[language] = stack.enter_context(
                open(path, "w", encoding="utf-8", newline="\n")  # noqa: SIM115 (the stack closes it)
            )

    def write(self, pair: Pair) -> None:
        """Write a line to each file, and count it."""
        self.lines += 1
        for language, text in zip(self.tokens, pair):
            self.streams[language].write(f"{text}\n")
            self.tokens[language] += len(text.split())

    def facts(self) -> Values:
        """The numbers of lines and of tokens per language, for state.json and manifest.json."""
        tokens = {f"tokens_{language}": number for language, number in self.tokens.items()}
        return {"lines": self.lines} | tokens

    def describe(self) -> str:
        """The numbers of pairs, tokens and dropped pairs, for the log."""
        tokens = [f"{number:,} {language} tokens" for language, number in self.tokens.items()]
        drops = [f"; {number:,} dropped: {reason}" for reason, number in sorted(self.drops.items())]
        return f"{self.name}: {self.lines:,} pairs, {', '.join(tokens)}{''.join(drops)}"


def _write_split(
    split: Split, languages: Sequence[str], folder: Path, workers: int
) -> dict[str, Values]:
    """Write a split and the split that it holds out; the facts of both as in `write_splits`."""
    with contextlib.ExitStack() as stack:
        main = _Output(folder, split.name, languages, stack)
        outputs = [main]
        if split.hold_out:
            outputs.append(_Output(folder, split.hold_out.split, languages, stack))
        for number, pair in enumerate(_retained_pairs(split, workers, main.drops), 1):
            is_held_out = split.hold_out and number % split.hold_out.every == 0
            outputs[-1 if is_held_out else 0].write(pair)
    read = sum(output.lines for output in outputs) + main.drops.total()
    _check_split(split, main, read)
    facts = {}
    for output in outputs:
        log.info(output.describe())
        facts[output.name] = output.facts()
    facts[split.name].update(read=read, dropped=dict(sorted(main.drops.items())))
    return facts


def _retained_pairs(split: Split, workers: int, drops: collections.Counter[str]) -> Iterator[Pair]:
    """The processed pairs of a split, in order; `drops` counts the others by reason."""
    work = functools.partial(preprocess_pairs, treatment=split.treatment)
    batches = chunks(read_pairs(split.files, split.lenient), CHUNK)
    results = itertools.chain.from_iterable(ordered_map(work, batches, workers, split.name))
    for number, result in enumerate(results, 1):
        if isinstance(result, str):
            drops[result] += 1
            continue
        if split.own:
            for file, text in zip(split.files[0], result):
                refuse_symbols(text, file.path, number)
        yield result


def _check_split(split: Split, output: _Output, read: int) -> None:
    """Raise UserError for a split with too many bad lines, or without text on one side."""
    files = " and ".join(str(file.path) for file in split.files[0])
    bad = {reason: count for reason, count in output.drops.items() if reason in BAD_LINES}
    if sum(bad.values()) > MOST_BAD * read:
        reasons = ", ".join(f"{count:,} with {reason}" for reason, count in bad.items())
        raise UserError(
            f"{files}: too many of {read:,} pairs of lines are not text ({reasons}). "
            f"{_first_bad_line(split)}"
        )
    if not output.lines:
        raise UserError(
            f"{files}: none of the {read:,} pairs has text on both sides. Check both files."
        )
    for file, tokens in zip(split.files[0], output.tokens.values()):
        if not tokens:
            raise no_text([file.path])


def _first_bad_line(split: Split) -> str:
    """The first unusable line of a split's files as an error: file, number, problem and remedy."""
    try:
        for file in itertools.chain.from_iterable(split.files):
            for _ in read_lines(file.path):
                pass
    except UserError as error:  # it names the line
        return str(error)
    return ""


def clean(source: str, target: str, rules: Cleaning) -> Pair | str:
    """The cleaned pair, or the reason for dropping it.

    As `clean-corpus-n.perl -ratio R corpus l1 l2 out MIN MAX`: vertical bars are removed (Moses keeps them if
    the very first line of a corpus has one; tokenised text has none), white space becomes single spaces,
    then the limits apply.

    Args:
        source, target: the two sides, tokens separated by white space.
        rules: the limits; without `max`, pairs with an empty side are dropped and others stay unchanged.
    """
    if rules.max is None:
        if source.strip() and target.strip():
            return source, target
        return "empty side"
    source = _SPACES.sub(" ", source.replace("|", "")).strip(" ")
    target = _SPACES.sub(" ", target.replace("|", "")).strip(" ")
    if not source or not target:
        return "empty side"
    short, long = sorted((source.count(" ") + 1, target.count(" ") + 1))
    if long > rules.max:
        return f"longer than {rules.max} tokens"
    if short < rules.min:
        return f"shorter than {rules.min} tokens"
    if long / short > rules.ratio:
        return f"length ratio above {rules.ratio:g}"
    if max(map(len, f"{source} {target}".split(" "))) > rules.word:
        return f"token of more than {rules.word} characters"
    return source, target


def load_codes(path: str) -> BPE:
    """The codes of a file, read once per process unless the file changes.

    Raises:
        UserError: for a file that subword-nmt did not write; the message names the line.
    """
    stat = os.stat(path)
    return _read_codes(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read_codes(path: str, size: int, time: int) -> BPE:
    """The checked codes of a file; its size and time are keys of the cache."""
    # Checked here, because subword-nmt ends the whole program if it cannot read a line.
    lines = list(read_lines(Path(path)))
    while lines and not lines[-1]:
        lines.pop()
    header = 1 if lines and lines[0].startswith("#version:") else 0
    if header and not _VERSION.fullmatch(lines[0]):
        raise UserError(
            f"{path}, line 1: {reprlib.repr(lines[0])} is not '#version: 0.2' or 0.1. {_REMEDY}"
        )
    if len(lines) == header:
        raise UserError(f"{path} has no merges. {_REMEDY}")
    for number, line in enumerate(lines[header:], header + 1):
        if len(line.strip("\r ").split(" ")) != 2:
            problem = f"{reprlib.repr(line)} is not a merge (two subwords, one space between them)"
            raise UserError(f"{path}, line {number}: {problem}. {_REMEDY}")
    return BPE(io.StringIO("\n".join(lines) + "\n"))


def learn_codes(text_files: Sequence[Path], merges: int, codes: Path) -> None:
    """Learn joint BPE operations on all the files together.

    The result equals `subword-nmt learn-bpe -s MERGES` on the concatenated files.

    Args:
        text_files: the files of tokenised text.
        merges: the number of operations; a text with fewer gives fewer.
        codes: the file to write.

    Raises:
        UserError: for text without a single pair of letters.
    """
    words = get_vocabulary(itertools.chain.from_iterable(map(read_lines, text_files)))
    if max(map(len, words), default=0) < 2:
        names = ", ".join(map(str, text_files))
        raise UserError(
            f"{names} has no word of two letters to learn BPE from. Give more text, or --bpe 0."
        )
    vocabulary = [f"{word} {count}" for word, count in words.items()]
    # subword-nmt draws its own progress bar, which is only noise in a log file.
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(atomic_write(codes))
        if not sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        learn_bpe(vocabulary, stream, merges, is_dict=True)
