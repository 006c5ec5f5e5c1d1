"""Whether a run has the data set of the paper's row that its recipe stands for."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from pathlib import Path
from typing import Any, Mapping, Optional

from moa_fairseq.data_prep.catalogue import datasets
from moa_fairseq.data_prep.manifest import read_manifest
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.corpus_size import sentence_sizes
from moa_fairseq.recipes.schema import Recipe

log = logging.getLogger(__name__)

# The user's own files: their name does not tell which data set they hold.
OWN = ("parallel", "binarised")


def on_the_rows_data(recipe: Recipe, folder: Path, lines: Optional[Mapping[str, int]] = None) -> Recipe:
    """The recipe, without `reproduces` where the data is not that of its row; logs which of the two it is.

    A recipe that stands for no row only gets a warning about data of another name.

    folder: the binarised data; a manifest.json in it or beside it names the data set. lines: sentences of
    each split; counted in the folder where they are not given.
    """
    cell = recipe.reproduces
    if cell is None:
        found = _name(_manifest(folder))
        if found not in (None, recipe.data.recipe, *OWN):
            log.warning(
                "%s is for data of %s, and %s is %s by its manifest.json.",
                *(recipe.experiment, recipe.data.recipe, folder, found),
            )
        return recipe
    counted = dict(lines or {})
    for split in recipe.splits if lines is None else ():
        with contextlib.suppress(UserError):
            counted[split] = len(sentence_sizes(recipe, folder, split)[0])
    row = f"{cell.paper}, table {cell.table}, {cell.row}, {cell.column}: {cell.value}"
    difference = _difference(recipe, folder, counted, cell.data)
    if difference is None:
        log.info("stands for %s", row)
        return recipe
    log.warning("this run does not stand for %s. %s Its result says reproduces: null.", row, difference)
    return dataclasses.replace(recipe, reproduces=None)


def _difference(recipe: Recipe, folder: Path, lines: Mapping[str, int], name: Optional[str]) -> Optional[str]:
    """A sentence that says how the data differs from the row's, which is called `name`; or None."""
    if name is None or name in OWN:
        return None
    manifest = _manifest(folder)
    settings, found = _mapping(manifest.get("settings")), _name(manifest)
    if found not in (None, name, *OWN):
        return f"The data is {found} by its manifest.json, and the row's is {name}."
    merges, wanted = settings.get("bpe"), recipe.data.bpe
    if isinstance(merges, int) and wanted and merges != wanted:
        return f"The data has {merges:,} BPE merges by its manifest.json, and the row's {wanted:,}."
    dataset = datasets().get(name)
    expected = dict(dataset.expected) if dataset else {}
    if "train" in expected:
        expected["train"] = max(1, math.ceil(expected["train"] * (recipe.data.train_fraction or 1)))
    counted = {split: lines[split] for split in lines if lines[split]}
    words = {  # an end of line counts as one
        split: fact["words"] + fact["lines"]
        for split, fact in _mapping(manifest.get("splits")).items()
        if all(isinstance(_mapping(fact).get(key), int) for key in ("words", "lines"))
    }
    for what, here, there in (
        ("lines", counted, expected),
        ("words", words, dataset.words if dataset else {}),
    ):
        for split, number in there.items():
            if here.get(split, number) != number:
                return f"Its {split} split has {here[split]:,} {what}, and that of {name} {number:,}."
    if found is None and not counted.keys() & expected.keys():
        return f"Whether the data is {name} cannot be told: it has no manifest.json."
    return None


def _manifest(folder: Path) -> Mapping[str, Any]:
    """manifest.json of a binarised folder or of the stages around it; {} where there is none to go by."""
    for place in (folder, folder.parent) if folder.name == "binarised" else (folder,):
        with contextlib.suppress(OSError, UserError):
            if manifest := _mapping(read_manifest(place)):
                return manifest
    return {}


def _name(manifest: Mapping[str, Any]) -> Any:
    """What data recipe made the data; None where that is not known."""
    return _mapping(manifest.get("settings")).get("recipe", manifest.get("recipe"))


def _mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is a mapping: a damaged manifest is no proof."""
    return value if isinstance(value, dict) else {}
