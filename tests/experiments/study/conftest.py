"""A toy study, and the names of its pictures."""

import functools
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from played_study import COMMIT, RECIPE, STUDY, Player

from moa_fairseq.cli import main
from moa_fairseq.experiments.recipes.loading import load_recipe
from moa_fairseq.experiments.records import provenance
from moa_fairseq.experiments.study import command, design, pictures, running


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "Executor", Player)
    for module in (running, provenance):
        monkeypatch.setattr(module, "commit", lambda: COMMIT)
    # drawing takes longer than the rest of a test
    monkeypatch.setattr(command, "draw", lambda study, content: {})
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
def picture_names(study, monkeypatch):
    """picture_names() → the names of the pictures that a report leaves."""
    monkeypatch.setattr(command, "draw", pictures.draw)
    folder = Path("results/studies/toy")
    return lambda: {path.stem for path in folder.glob("*.png") if path.stat().st_size > 1000}
