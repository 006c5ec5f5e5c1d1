"""A toy study, its pictures, and the commit of the source tree."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from played_study import (
    COMMIT,
    RECIPE,
    STUDY,
    Player,
)

from moa_fairseq.cli import main
from moa_fairseq.experiments.recipes.loading import load_recipe
from moa_fairseq.experiments.records import provenance
from moa_fairseq.experiments.study import command, design, running
from moa_fairseq.experiments.study import pictures as picture_module


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "Executor", Player)
    for module in (running, provenance):
        monkeypatch.setattr(module, "commit", lambda: COMMIT)
    monkeypatch.setattr(
        command, "draw", lambda study, content: {}
    )  # it takes longer than all else
    monkeypatch.chdir(tmp_path)
    Player.ran = []
    Player.end = None
    Player.diverges = ()
    Player.data = None
    Player.conditions = {}
    folder = tmp_path / "configs" / "studies"
    folder.mkdir(parents=True)
    (folder.parent / "tiny.yaml").write_text(RECIPE)
    monkeypatch.setattr(
        design, "load_recipe", lambda file, overrides: once(file, tuple(overrides))
    )
    once = functools.cache(load_recipe)  # each run's recipe is read several times

    def call(*flags, name="toy", **changes):
        once.cache_clear()
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps({**STUDY, "study": name, **changes}))
        status = main(["study", str(path), *flags])
        records = tmp_path / "results" / "studies" / name
        return status, records

    return call


@pytest.fixture
def pictures(study, monkeypatch):
    """The names of those that a report leaves."""
    monkeypatch.setattr(command, "draw", picture_module.draw)
    folder = Path("results/studies/toy")
    return lambda: {path.stem for path in folder.glob("*.png") if path.stat().st_size > 1000}


@pytest.fixture
def tree(monkeypatch):
    """The source tree: its commit can change."""
    found = SimpleNamespace(commit=COMMIT)
    for module in (running, provenance):
        monkeypatch.setattr(module, "commit", lambda: found.commit)
    return found
