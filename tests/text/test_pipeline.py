"""Chains over whole files: same result with any number of processes, errors named."""

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.text import process_lines
from moa_fairseq.text.pipeline import apply_steps

STEPS = [("lowercase", {}), ("normalize_punctuation", {"lang": "de"}), ("tokenize", {"lang": "de"})]


def test_steps_run_in_order():
    assert apply_steps("„Ein MANN“, 5 %.", STEPS) == "&quot; ein mann &quot; , 5 % ."


@pytest.mark.parametrize("count", [0, 1, 12_345])  # none, one batch, batches that do not divide evenly
def test_processes_keep_order(count):
    lines = [f"Zeile {i}, z.B. {i % 7}." for i in range(count)]
    assert list(process_lines(lines, STEPS, workers=2)) == list(process_lines(lines, STEPS))


def test_unknown_step_is_named():
    with pytest.raises(KeyError, match="stem"):
        process_lines(["x"], [("stem", {})])


def test_error_of_a_worker_reaches_the_caller():
    with pytest.raises(UserError, match="not available"):
        list(process_lines(["x"], [("tokenize", {"lang": "fi"})], workers=2))
