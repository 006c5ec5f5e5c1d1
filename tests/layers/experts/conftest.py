"""Lets the tests of this folder, and those that run in processes of their own, share `projection_cases`.

MOA_FAIRSEQ_COMPILE=I/N takes every N-th test, from the I-th on, and has it compile every configuration that
tuning may time: on a GPU, N processes do so side by side before one of them measures anything.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
SHARE = os.environ.get("MOA_FAIRSEQ_COMPILE", "")


def pytest_collection_modifyitems(items):
    if SHARE:
        first, step = map(int, SHARE.split("/"))
        items[:] = items[first::step]


@pytest.fixture(autouse=bool(SHARE))
def compile_ahead():
    from moa_fairseq.layers.experts.triton import table

    with table.compiling():
        yield
