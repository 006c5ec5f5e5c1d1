"""A short run of tests/fuzz.py over every parser, and proof that it can fail."""

import sys
import time
from pathlib import Path

import pytest

from moa_fairseq.errors import UserError

# About a minute for all of them; `python tests/fuzz.py` runs 20,000 cases of each.
CASES = {"recipe-yaml": 1000, "state": 1500}


sys.path.insert(0, str(Path(__file__).parent))  # where `python tests/fuzz.py` looks for its other half
import fuzz  # noqa: E402
import fuzz_parsers  # noqa: E402

PARSERS = fuzz.all_parsers()


def test_every_parser_is_there():
    assert set(PARSERS) == {
        *("generation-log", "german", "bpe-codes", "archives", "recipe-yaml", "train-log"),
        *("perplexity", "state", "scores", "result"),
    }


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_nothing_but_user_errors_comes_out_in_time(name):
    with fuzz.folder_in_memory() as folder:
        assert fuzz.fuzz(PARSERS[name], CASES.get(name, 3000), 0, Path(folder)) is None


def spin():
    while time.process_time() > 0:
        pass


@pytest.mark.parametrize(
    "fault, problem",
    [
        (lambda: int("x"), "ValueError: invalid literal"),
        (lambda: exit(1), "SystemExit: 1"),
        (spin, "took too long"),
        (lambda: (_ for _ in ()).throw(UserError("")), "an error of 0 letters"),
        (lambda: next(iter(())), "StopIteration"),
    ],
)
def test_a_fault_is_found_and_named(tmp_path, fault, problem):
    def parse(place):
        if b"!" in (place / "input").read_bytes():
            try:
                fault()
            except Exception as error:  # what a parser itself may swallow
                raise error

    def make(rng):
        return rng.choice((b"fine", b"odd!"))

    parser = fuzz.Parser("german", b"valid", make, parse, seconds=0.2)
    failure = fuzz.fuzz(parser, 50, 3, tmp_path)
    assert failure.problem.startswith(problem) and failure.input == b"odd!"
    assert f"--only german --seed 3 --case {failure.case}" in str(failure)
    assert fuzz.case_input(parser, 3, failure.case) == b"odd!"
    assert not list(tmp_path.iterdir())


def test_a_parser_that_refuses_everything_fails(tmp_path):
    def parse(place):
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        fuzz.fuzz(fuzz.Parser("x", b"valid", lambda rng: b"", parse), 5, 1, tmp_path)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_cases_are_different_and_repeatable(name):
    cases = [fuzz.case_input(PARSERS[name], 5, number) for number in range(60)]
    assert cases == [fuzz.case_input(PARSERS[name], 5, number) for number in range(60)]
    assert len(set(cases)) > 40 and cases != [fuzz.case_input(PARSERS[name], 6, n) for n in range(60)]


def test_no_case_changes_what_the_next_is_made_of():
    """A value is put into a tree that a further exchange may reach into: a shared one would hold itself."""
    values = repr(fuzz_parsers.VALUES)
    for name in ("state", "result", "recipe-yaml"):
        for number in range(1500):
            fuzz.case_input(PARSERS[name], 2, number)
    assert repr(fuzz_parsers.VALUES) == values
