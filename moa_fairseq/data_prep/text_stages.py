"""Sentence pairs through line functions, subwords and cleaning, over several processes."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import re
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from moa_fairseq.data_prep.bpe import load_codes
from moa_fairseq.data_prep.catalogue import HoldOut
from moa_fairseq.data_prep.cleaning import Cleaning, clean
from moa_fairseq.data_prep.parallel_text import BAD, BAD_LINES, PiecePair, read_pairs
from moa_fairseq.errors import UserError
from moa_fairseq.text.pipeline import Step, apply_steps
from moa_fairseq.text.workers import chunks, ordered_map

Pair = Tuple[str, str]
CHUNK = 2000
# More unusable lines than this are no accident: the file has another encoding, or is no text.
MOST_BAD = 0.01
# fairseq parts tokens at any white space, BPE at blanks only. Blanks themselves stay as Moses prints them.
_NOT_BLANK = re.compile(r"[^\S ]")
log = logging.getLogger(__name__)


class Treatment(NamedTuple):
    """What is done to a pair: line functions of each side, then BPE by the file `codes`, then cleaning."""

    steps: Tuple[Tuple[Step, ...], Tuple[Step, ...]] = ((), ())
    codes: str = ""
    cleaning: Optional[Cleaning] = None


class Split(NamedTuple):
    """One split: its files and their treatment. hold_out: lines that go to another split.

    lenient: lines that are no text are dropped and counted; else they are an error.
    """

    name: str
    files: Sequence[PiecePair]
    treatment: Treatment
    hold_out: Optional[HoldOut] = None
    lenient: bool = False


def treat(pairs: Sequence[Pair], treatment: Treatment) -> List[Union[Pair, str]]:
    """The finished pairs; in place of one that is dropped, the reason."""
    return [_treat(pair, treatment) for pair in pairs]


def _treat(pair: Pair, treatment: Treatment) -> Union[Pair, str]:
    for text in pair:
        if text.startswith(BAD):
            return text[len(BAD) :]
    source, target = (
        _NOT_BLANK.sub(" ", apply_steps(text, steps)) for text, steps in zip(pair, treatment.steps)
    )
    if treatment.codes:
        codes = load_codes(treatment.codes)
        source, target = codes.process_line(source), codes.process_line(target)
    return clean(source, target, treatment.cleaning) if treatment.cleaning else (source, target)


def write_splits(
    splits: Sequence[Split], languages: Sequence[str], folder: Path, workers: int
) -> Dict[str, Dict[str, Any]]:
    """Write `<split>.<language>` into `folder` for each split, and for those that are held out.

    Returns split → {"lines", "tokens_<language>", and of a split that was read "read" and "dropped": reason →
    pairs}. Raises UserError for files that are no aligned text, or when nothing is left of a split.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts: Dict[str, Dict[str, Any]] = {}
    for split in splits:
        made = _write_split(split, languages, folder, workers)
        for name, fact in made.items():
            tokens = ", ".join(f"{fact[f'tokens_{language}']:,} {language} tokens" for language in languages)
            dropped = [f"; {count:,} dropped: {why}" for why, count in fact.get("dropped", {}).items()]
            log.info("%s: %s pairs, %s%s", name, f"{fact['lines']:,}", tokens, "".join(dropped))
        facts.update(made)
    return facts


def _write_split(
    split: Split, languages: Sequence[str], folder: Path, workers: int
) -> Dict[str, Dict[str, Any]]:
    names = [split.name, *([split.hold_out.split] if split.hold_out else [])]
    facts: Dict[str, Dict[str, Any]] = {
        name: {"lines": 0, **{f"tokens_{language}": 0 for language in languages}} for name in names
    }
    dropped: collections.Counter[str] = collections.Counter()
    read = kept = 0
    pairs = read_pairs(split.files, split.lenient)
    work = functools.partial(treat, treatment=split.treatment)
    with contextlib.ExitStack() as stack:
        streams = {
            (name, language): stack.enter_context(
                open(folder / f"{name}.{language}", "w", encoding="utf-8", newline="\n")
            )
            for name in names
            for language in languages
        }
        for batch in ordered_map(work, chunks(pairs, CHUNK), workers, split.name):
            for result in batch:
                read += 1
                if isinstance(result, str):
                    dropped[result] += 1
                    continue
                kept += 1
                held_out = split.hold_out and kept % split.hold_out.every == 0
                name = names[1 if held_out else 0]
                facts[name]["lines"] += 1
                for text, language in zip(result, languages):
                    streams[name, language].write(text + "\n")
                    facts[name][f"tokens_{language}"] += len(text.split())
    facts[split.name].update(read=read, dropped=dict(sorted(dropped.items())))
    files = " and ".join(str(piece.path) for piece in split.files[0])
    bad = {why: count for why, count in dropped.items() if why in BAD_LINES}
    if sum(bad.values()) > MOST_BAD * read:
        stories = ", ".join(f"{count:,} with {why}" for why, count in bad.items())
        raise UserError(
            f"{files}: of {read:,} pairs of lines too many are no text ({stories}). Is the file whole, and "
            "UTF-8? Convert it, for example with iconv -f latin1 -t utf-8, or fetch it again."
        )
    if not facts[split.name]["lines"]:
        raise UserError(f"{files}: no pair with text on both sides is left of {read:,}.")
    return facts
