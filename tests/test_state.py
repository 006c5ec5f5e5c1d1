"""docs/state.md names everything that the package holds between two calls."""

import re

import pytest
from state import PACKAGE, state

PAGE = PACKAGE.parent / "docs" / "state.md"


def documented():
    """The names of the page's table, as `state` writes them: FILE:NAME."""
    names = set()
    for row in PAGE.read_text(encoding="utf-8").splitlines():
        if not row.startswith("| "):
            continue
        for part in row.split(" | ")[-1].rstrip(" |").split("; "):
            file, *listed = re.findall(r"`([^`]+)`", part) or [""]
            if file.endswith(".py"):
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
