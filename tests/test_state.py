"""state.yaml names everything that the package holds between two calls."""

from pathlib import Path

import pytest
import yaml
from state import state

LIST = Path(__file__).with_name("state.yaml")


def documented():
    """The listed names, as `state` writes them: FILE:NAME."""
    names = set()
    for entry in yaml.safe_load(LIST.read_text(encoding="utf-8")):
        for file, listed in entry["where"].items():
            names |= {f"{file}:{name}" for name in listed}
    return names


@pytest.fixture(scope="module")
def held():
    return state()


def test_everything_that_is_held_between_two_calls_has_a_line(held):
    assert len(documented()) > 50
    assert held - documented() == set()


def test_every_line_stands_for_something_that_is_there(held):
    assert documented() - held == set()
