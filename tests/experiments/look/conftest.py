"""Pages of small models."""

import json
import re

import pytest

from moa_fairseq.cli import main


def contents(path):
    """What a page shows, as its program reads it."""
    text = path.read_text(encoding="utf-8")
    return json.loads(
        re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1]
    )


@pytest.fixture
def look(tmp_path):
    """look(*words) → what the page shows; the page is tmp_path / "page.html"."""

    return lambda *words: made(tmp_path / "page.html", *words)


def made(page, *words):
    assert main([*map(str, ("look", *words, "--cpu", "--output", page))]) == 0
    return contents(page)


@pytest.fixture(scope="session")
def whole(moa_run, toy_data, tmp_path_factory):
    """What the page of `moa_run` shows of the whole test set."""
    return made(tmp_path_factory.mktemp("whole") / "page.html", moa_run, "--data", toy_data)


@pytest.fixture(scope="session")
def moa_run(toy_checkpoint):
    """A folder of fairseq-train, whose last checkpoint is also its best."""
    return toy_checkpoint.parent


@pytest.fixture(scope="session")
def dense_run(save_model, toy_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    save_model(toy_data, folder / "checkpoint_best.pt", arch="transformer_tiny")
    return folder
