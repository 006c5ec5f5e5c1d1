"""One stage over sentence pairs: line functions, subwords, cleaning; several processes, resumable."""

from __future__ import annotations

import collections
import itertools
import logging
import re
from pathlib import Path
from typing import IO, Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from moa_fairseq.data_prep.bpe import load_codes
from moa_fairseq.data_prep.catalogue import HoldOut
from moa_fairseq.data_prep.cleaning import Cleaning, clean
from moa_fairseq.data_prep.parallel_text import BAD, BAD_LINES, PiecePair, read_pairs
from moa_fairseq.data_prep.resumable_files import resumable_files
from moa_fairseq.errors import UserError
from moa_fairseq.text.pipeline import Step, apply_steps
from moa_fairseq.text.workers import chunks, ordered_map

Pair = Tuple[str, str]
CHUNK = 2000
# Chunks between two commits: what an interruption costs.
COMMIT_EVERY = 25
# More unusable lines than this are no accident: the file has another encoding, or is no text.
MOST_BAD = 0.01
# fairseq parts tokens at any white space, BPE at blanks only. Blanks themselves stay as Moses prints them.
_NOT_BLANK = re.compile(r"[^\S ]")
log = logging.getLogger(__name__)


class Chain(NamedTuple):
    """What is done to a pair: steps per side, then BPE by the file `codes`, then cleaning."""

    steps: Tuple[Tuple[Step, ...], Tuple[Step, ...]] = ((), ())
    codes: str = ""
    cleaning: Optional[Cleaning] = None

    def apply(self, pair: Pair) -> Union[Pair, str]:
        """The finished pair, or the reason why it is dropped."""
        for text in pair:
            if text.startswith(BAD):
                return text[len(BAD) :]
        source, target = (
            _NOT_BLANK.sub(" ", apply_steps(text, steps)) for text, steps in zip(pair, self.steps)
        )
        if self.codes:
            source, target = (load_codes(self.codes).process_line(text) for text in (source, target))
        return clean(source, target, self.cleaning) if self.cleaning else (source, target)

    def apply_all(self, pairs: Sequence[Pair]) -> List[Union[Pair, str]]:
        """As `apply`, for many pairs."""
        return [self.apply(pair) for pair in pairs]


class Job(NamedTuple):
    """One split: its files and its chain. hold_out: lines that go to another split.

    lenient: lines that are no text are dropped and counted; else they are an error.
    """

    split: str
    files: Sequence[PiecePair]
    chain: Chain
    hold_out: Optional[HoldOut] = None
    lenient: bool = False

    @property
    def outputs(self) -> List[str]:
        """Names of the splits that it writes."""
        return [self.split, *([self.hold_out.split] if self.hold_out else [])]


def run_jobs(jobs: Sequence[Job], languages: Sequence[str], folder: Path, workers: int) -> Dict[str, Any]:
    """Write `<split>.<lang>` into `folder` for each job, going on where an interrupted call stopped.

    Returns split → {"lines", "tokens_<lang>", and for a job's own split "read" and "dropped": reason →
    pairs}. Raises UserError for files that are no aligned text or when nothing is left of a split.
    """
    names = [f"{split}.{language}" for job in jobs for split in job.outputs for language in languages]
    with resumable_files(folder, names) as (streams, state, commit):
        facts = state.setdefault("facts", {})
        for job in jobs:
            if facts.get(job.split, {}).get("done"):
                continue
            _run_job(job, languages, streams, facts, commit, workers)
            facts[job.split]["done"] = True
            commit()
            for split in job.outputs:
                fact = facts[split]
                tokens = ", ".join(f"{fact[f'tokens_{lang}']:,} {lang} tokens" for lang in languages)
                dropped = [f"; {count:,} dropped: {why}" for why, count in fact.get("dropped", {}).items()]
                log.info(f"{split}: {fact['lines']:,} pairs, {tokens}{''.join(dropped)}")
    for fact in facts.values():
        fact.pop("done", None)
    return facts


def _run_job(
    job: Job,
    languages: Sequence[str],
    streams: Mapping[str, IO[str]],
    facts: Dict[str, Any],
    commit: Callable[[], None],
    workers: int,
) -> None:
    for split in job.outputs:
        facts.setdefault(split, {"lines": 0, **{f"tokens_{language}": 0 for language in languages}})
    own = facts[job.split]
    own.setdefault("read", 0)
    dropped = collections.Counter(own.get("dropped", {}))
    pairs = itertools.islice(read_pairs(job.files, job.lenient), own["read"], None)
    results = ordered_map(job.chain.apply_all, chunks(pairs, CHUNK), workers, job.split, own["read"])
    for number, batch in enumerate(results, start=1):
        for result in batch:
            own["read"] += 1
            if isinstance(result, str):
                dropped[result] += 1
            else:
                split = job.split
                if job.hold_out:
                    kept = sum(facts[name]["lines"] for name in job.outputs) + 1
                    split = job.hold_out.split if kept % job.hold_out.every == 0 else job.split
                _write(result, split, languages, streams, facts[split])
        own["dropped"] = dict(sorted(dropped.items()))
        if number % COMMIT_EVERY == 0:
            commit()
    names = " and ".join(str(piece.path) for piece in job.files[0])
    bad = {why: count for why, count in own["dropped"].items() if why in BAD_LINES}
    if sum(bad.values()) > MOST_BAD * own["read"]:
        stories = ", ".join(f"{count:,} with {why}" for why, count in bad.items())
        raise UserError(
            f"{names}: of {own['read']:,} pairs of lines too many are no text ({stories}). Is the file "
            "whole, and UTF-8? Convert it, for example with iconv -f latin1 -t utf-8, or fetch it again."
        )
    if not own["lines"]:
        raise UserError(f"{names}: no pair with text on both sides is left of {own['read']:,}.")


def _write(
    pair: Pair, split: str, languages: Sequence[str], streams: Mapping[str, IO[str]], fact: Dict[str, int]
) -> None:
    fact["lines"] += 1
    for text, language in zip(pair, languages):
        streams[f"{split}.{language}"].write(text + "\n")
        fact[f"tokens_{language}"] += len(text.split())
