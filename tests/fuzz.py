"""Odd input for every parser of the package: only a UserError may come out, and soon.

  python tests/fuzz.py                                       every parser, 20,000 cases each
  python tests/fuzz.py --only archives --seed 7 --cases 500  one parser, other cases
  python tests/fuzz.py --only archives --seed 7 --case 123   one case again, with its traceback

A case depends on the seed, the parser and its number alone. The first failure of a parser ends its run: its
input is kept and named. Each parser first has to accept a valid input, so none passes by refusing everything.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Callable, Dict, NamedTuple, Optional, Sequence

from moa_fairseq.errors import UserError

LONG_INPUT = 60_000  # bytes; what a quadratic pattern shows itself with


class Parser(NamedTuple):
    """valid: an input to be accepted. make: an odd one. parse: reads the file `input` in an empty folder.

    seconds, seconds_per_byte: the processor time that a case may take.
    """

    name: str
    valid: bytes
    make: Callable[[random.Random], bytes]
    parse: Callable[[Path], None]
    seconds: float = 2.0
    seconds_per_byte: float = 4e-6


class Failure(NamedTuple):
    """A case that came to something else than an end or a UserError."""

    parser: str
    seed: int
    case: int
    problem: str
    input: bytes

    def __str__(self) -> str:
        """What to read, and how to see it again."""
        shown = repr(self.input[:200]) + (f"... ({len(self.input):,} bytes)" if len(self.input) > 200 else "")
        return (
            f"{self.parser}: case {self.case} of seed {self.seed}: {self.problem}\n  input: {shown}\n"
            f"  again: python tests/fuzz.py --only {self.parser} --seed {self.seed} --case {self.case}"
        )


class TooSlow(BaseException):
    """A case went past its time; no `except Exception` of a parser catches it."""


def case_input(parser: Parser, seed: int, number: int) -> bytes:
    """The input of one case."""
    return parser.make(random.Random(f"{seed} {parser.name} {number}"))


def fuzz(parser: Parser, cases: int, seed: int, folder: Path) -> Optional[Failure]:
    """Run `cases` cases below `folder`; the first failure, or None.

    Raises UserError where the parser refuses its valid input.
    """
    with _alarm():
        run_case(parser, parser.valid, folder, limit=60.0)  # imports what it needs, too
        for number in range(cases):
            data = case_input(parser, seed, number)
            try:
                run_case(parser, data, folder)
            except UserError as error:
                if not str(error).strip() or len(str(error)) > 2000:
                    return Failure(parser.name, seed, number, f"an error of {len(str(error))} letters", data)
            except TooSlow:
                return Failure(parser.name, seed, number, "took too long", data)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                return Failure(parser.name, seed, number, f"{type(error).__name__}: {error}"[:300], data)
    return None


def run_case(parser: Parser, data: bytes, folder: Path, limit: Optional[float] = None) -> None:
    """Parse one input in an empty folder, in processor time that grows with its size at most linearly."""
    place = folder / "case"
    place.mkdir()
    try:
        (place / "input").write_bytes(data)
        signal.setitimer(signal.ITIMER_PROF, limit or parser.seconds + parser.seconds_per_byte * len(data))
        try:
            parser.parse(place)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        shutil.rmtree(place)


class _alarm:
    """While it holds, the processor-time alarm raises TooSlow."""

    def __enter__(self) -> None:
        def ring(number: int, frame: object) -> None:
            raise TooSlow

        self.before = signal.signal(signal.SIGPROF, ring)

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGPROF, self.before)


def mutated(rng: random.Random, data: bytes, fragments: Sequence[bytes]) -> bytes:
    """`data` with a few ranges cut, doubled, overwritten or filled with fragments; now and then at length."""
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        start = rng.randint(0, len(data))
        end = min(len(data), start + int(rng.expovariate(1 / 8)))
        piece = rng.choice(
            (
                b"",
                data[start:end] * rng.randint(2, 5),
                bytes(rng.randrange(256) for _ in range(rng.randint(1, 4))),
                rng.choice(fragments),
                rng.choice(fragments),
            )
        )
        if rng.random() < 0.02:
            piece = rng.choice((*fragments, data[start:end] or b"x"))
            piece *= LONG_INPUT // len(piece)
        if rng.random() < 0.05:
            end = len(data)
        data = data[:start] + piece + data[end:]
    return data


def all_parsers() -> Dict[str, Parser]:
    """The parsers by name, from fuzz_parsers.py beside this file."""
    from fuzz_parsers import PARSERS

    return {parser.name: parser for parser in PARSERS}


def folder_in_memory() -> tempfile.TemporaryDirectory:
    """A temporary folder, in memory where the system has such a place: every case writes a file."""
    shared = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Fuzz; 0 when nothing failed."""
    parsers = all_parsers()
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--only", action="append", choices=sorted(parsers), help="this parser")
    command.add_argument("--cases", type=int, default=20_000, help="of each parser (%(default)s)")
    command.add_argument("--seed", type=int, default=1, help="%(default)s")
    command.add_argument("--case", type=int, help="this case alone, with its traceback")
    args = command.parse_args(argv)
    chosen = [parsers[name] for name in args.only or parsers]
    failures = []
    with folder_in_memory() as folder:
        for parser in chosen:
            if args.case is not None:
                return _again(parser, args.seed, args.case, Path(folder))
            start = time.process_time()
            failure = fuzz(parser, args.cases, args.seed, Path(folder))
            print(f"{parser.name:<16} {args.cases:,} cases, {time.process_time() - start:.0f} s", flush=True)
            if failure:
                kept = Path(tempfile.gettempdir()) / f"fuzz-{parser.name}-{args.seed}-{failure.case}"
                kept.write_bytes(failure.input)
                print(f"FAILED {failure}\n  kept as {kept}", flush=True)
                failures.append(failure)
    return 1 if failures else 0


def _again(parser: Parser, seed: int, number: int, folder: Path) -> int:
    with _alarm():
        try:
            run_case(parser, case_input(parser, seed, number), folder)
        except UserError as error:
            print(f"UserError: {error}")
        except BaseException:
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
