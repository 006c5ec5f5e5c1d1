"""Is the data that a run has found the data of the row that its recipe stands for?"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

from moa_fairseq.data_prep.catalogue import datasets
from moa_fairseq.data_prep.manifest import MANIFEST
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.corpus_size import sentence_sizes
from moa_fairseq.recipes.schema import Recipe

log = logging.getLogger(__name__)

# The user's own files, which have no name to be known by.
OWN = ("parallel", "binarised")


def on_the_rows_data(recipe: Recipe, folder: Path, lines: Mapping[str, int]) -> Recipe:
    """The recipe, without `reproduces` where the data is not that of the row; says which of both.

    folder: the binarised data; a manifest.json in it or beside it names the data set. lines: sentences of
    each split.
    """
    cell = recipe.reproduces
    if cell is None:
        return recipe
    row = f"{cell.paper}, table {cell.table}, {cell.row}, {cell.column}: {cell.value}"
    difference = _difference(recipe, folder, lines)
    if difference is None:
        log.info("stands for %s", row)
        return recipe
    log.warning("this run does not stand for %s. %s Its result says reproduces: null.", row, difference)
    return dataclasses.replace(recipe, reproduces=None)


def lines_of(recipe: Recipe, folder: Path) -> Dict[str, int]:
    """Sentences of each split that is in a binarised folder."""
    found = {}
    for split in recipe.splits:
        with contextlib.suppress(UserError):
            found[split] = len(sentence_sizes(recipe, folder, split)[0])
    return found


def _difference(recipe: Recipe, folder: Path, lines: Mapping[str, int]) -> Optional[str]:
    """A sentence that says how the data differs from the row's, or None."""
    name = recipe.reproduces.data
    if name is None or name in OWN:
        return None
    manifest = _manifest(folder)
    settings = manifest.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    found = settings.get("recipe", manifest.get("recipe"))
    if found not in (None, name, *OWN):
        return f"The data is {found} by its manifest.json, and the row's is {name}."
    merges, wanted = settings.get("bpe"), recipe.data.bpe
    if isinstance(merges, int) and wanted and merges != wanted:
        return f"The data has {merges:,} BPE merges by its manifest.json, and the row's {wanted:,}."
    counted = {split: lines[split] for split in lines if lines[split]}
    expected = _expected_lines(name, recipe.data.train_fraction or 1)
    for what, here, there in (
        ("lines", counted, expected),
        ("words", _words(manifest), datasets()[name].words if name in datasets() else {}),
    ):
        other = next((split for split in there if here.get(split, there[split]) != there[split]), None)
        if other:
            return f"Its {other} split has {here[other]:,} {what}, and that of {name} {there[other]:,}."
    if found is None and not counted.keys() & expected.keys():
        return f"Whether the data is {name} cannot be told: it has no manifest.json."
    return None


def _expected_lines(name: str, fraction: float) -> Dict[str, int]:
    dataset = datasets().get(name)
    expected = dict(dataset.expected) if dataset else {}
    if "train" in expected:
        expected["train"] = max(1, math.ceil(expected["train"] * fraction))
    return expected


def _manifest(folder: Path) -> Dict[str, Any]:
    """manifest.json of a binarised folder or of the stages around it; {} where there is none to go by."""
    for place in (folder, folder.parent) if folder.name == "binarised" else (folder,):
        try:
            manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(manifest, dict):
            return manifest
    return {}


def _words(manifest: Mapping[str, Any]) -> Dict[str, int]:
    """split → words, an end of line counting as one, where a manifest tells them."""
    splits = manifest.get("splits")
    facts = splits.items() if isinstance(splits, dict) else ()
    return {
        split: fact["words"] + fact["lines"]
        for split, fact in facts
        if isinstance(fact, dict) and all(isinstance(fact.get(key), int) for key in ("words", "lines"))
    }
