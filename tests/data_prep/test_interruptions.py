"""Killed at any moment of any stage: the next run goes on, and ends with the very same files."""

import errno
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from moa_fairseq.data_prep import archives, bpe, monolingual, text_stages
from moa_fairseq.data_prep.catalogue import datasets
from moa_fairseq.data_prep.prepare import Preparation
from moa_fairseq.errors import UserError
from moa_fairseq.running import make

# (what is interrupted, its name, at which calls)
POINTS = [
    (archives, "atomic_write", (1, 2)),
    (text_stages, "_treat", (1, 77, 120, 232)),
    (bpe, "get_vocabulary", (1,)),
    (bpe, "learn_bpe", (1,)),
    (make, "replace", (1, 4, 6, 7, 8)),
    (make, "put_mark", (1, 5, 12, 16)),
]
PAIR = {"source": "en", "target": "de", "bpe": 15, "lowercase": False, "joined_dictionary": True, "flags": {}}


@pytest.fixture
def prepare(tables, preprocess, tmp_path):
    tables()

    def run(name, archives, folder, **settings):
        values = {"recipe": name, **(PAIR if datasets()[name].languages else {}), **settings}
        subsets = ["train", "valid", "test"] if datasets()[name].languages else []
        root = tmp_path / folder
        folders = (archives, root, preprocess, root / "downloads")
        return Preparation(values, subsets, *folders, offline=True, workers=1).run()

    return run


def bomb(monkeypatch, place, name, when, problem):
    """Let the `when`-th call of place.name raise; returns the list of calls."""
    real, calls = getattr(place, name), []

    def wrapped(*arguments, **options):
        calls.append(name)
        if len(calls) == when:
            raise problem
        return real(*arguments, **options)

    monkeypatch.setattr(place, name, wrapped)
    return calls


@pytest.mark.parametrize(
    "problem", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], ids=["ctrl-c", "full"]
)
def test_translation(prepare, miniature, made, monkeypatch, tmp_path, problem):
    archive_folder = miniature("wmt14_en_de")
    prepare("wmt14_en_de", archive_folder, "calm")
    for place, name, moments in POINTS:
        for when in moments:
            folder = f"{name}{when}"
            with monkeypatch.context() as patch:
                calls = bomb(patch, place, name, when, problem)
                with pytest.raises((KeyboardInterrupt, UserError)) as raised:
                    prepare("wmt14_en_de", archive_folder, folder, lowercase=when == 77)
                assert len(calls) >= when
            if isinstance(problem, OSError):
                assert "disk is full" in str(raised.value), (name, when)
            prepare("wmt14_en_de", archive_folder, folder)
            assert made.tree(tmp_path / folder) == made.tree(tmp_path / "calm"), (name, when)


@pytest.mark.parametrize(
    ("name", "place", "function"),
    [
        ("wikitext103_sp8k", monolingual, "atomic_write"),
        ("wikitext103_sp8k", make, "replace"),
        ("wikitext103_word", monolingual, "_write"),
        ("enwik8", make, "replace"),
    ],
)
def test_language_modeling(prepare, miniature, made, monkeypatch, tmp_path, name, place, function):
    archive_folder = miniature(name)
    prepare(name, archive_folder, "calm")
    for when in (1, 2):
        with monkeypatch.context() as patch:
            bomb(patch, place, function, when, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                prepare(name, archive_folder, f"{when}")
        prepare(name, archive_folder, f"{when}")
        assert made.tree(tmp_path / f"{when}") == made.tree(tmp_path / "calm")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_real_processes_killed_at_random(made, tmp_path, number):
    """listops: its sentences are drawn by several processes and binarised by fairseq's own program."""
    chance, line = random.Random(int(number)), [sys.executable, "-m", "moa_fairseq.cli", "prepare", "listops"]
    line += ["--sizes", "1000", "50", "50", "--workers", "2"]
    subprocess.run([*line, str(tmp_path / "calm")], check=True, capture_output=True)
    for _ in range(4):
        running = subprocess.Popen([*line, str(tmp_path / "killed")], stdout=subprocess.DEVNULL)
        time.sleep(chance.uniform(1, 8))
        running.send_signal(number)
        running.wait()
    subprocess.run([*line, str(tmp_path / "killed")], check=True, capture_output=True)
    assert made.tree(tmp_path / "killed") == made.tree(tmp_path / "calm")
