"""Does a run stand for its row of a paper? What the recipe file says, and what was done: two dicts."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any, Dict, List, Mapping

from moa_fairseq.data_prep.catalogue import datasets
from moa_fairseq.data_prep.manifest import read_manifest
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.recipes.steps import train_inputs
from moa_fairseq.running.state import changes, marks

# What leaves the experiment the same; the user's own files, whose name does not tell what they hold.
_FREE, _OWN = ("max_tokens", "headline", "seed"), ("parallel", "binarised")
_TEXT = ("source", "target", "bpe", "joined_dictionary", "lowercase")


def settings(recipe: Recipe) -> Dict[str, Any]:
    """What a finished run of the recipe has done, whatever carried it out."""
    section, count = recipe.generate or recipe.score, recipe.average.count if recipe.average else 1
    goal = {"max_epoch": recipe.train.max_epoch, "max_update": recipe.train.max_update}
    return _done(train_inputs(recipe), goal, count, dataclasses.asdict(section) if section else {})


def settings_made(folder: Path, recipe: Recipe) -> Dict[str, Any]:
    """The same, of the finished steps in a run folder that follow from each other."""
    made, kind = marks(folder), "generate" if recipe.generate else "score"
    train, average = made.get("train", {}), made.get("average", {})
    with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError):  # a damaged state.json
        said = made[f"{kind}-{recipe.subsets[0]}"]["inputs"]
        if recipe.finetune == "noft":  # nothing is trained
            return {**settings(recipe), "evaluation": _kept(said["settings"])}
        averaged = said["made"][0] == average.get("fingerprint") is not None
        origin = average["inputs"]["train"][0] if averaged else said["made"][0]
        finished = origin is not None and origin == train.get("fingerprint")
        count = average["inputs"]["count"] if averaged else 1
        return _done(train["inputs"] if finished else {}, train.get("goal", {}), count, said["settings"])
    return {"averaged": None, "evaluation": {}, "state.json": "damaged"}


def _done(said: Mapping[str, Any], goal: Mapping[str, Any], count: int, section: Any) -> Dict[str, Any]:
    done = {"averaged": count, "evaluation": _kept(section)}
    return {"model": said["model"], "train": {**_kept(said["train"]), **goal}, **done} if said else done


def _kept(values: Mapping[str, Any]) -> Dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _FREE}


def data_differences(published: Recipe, folder: Path, lines: Mapping[str, int]) -> Dict[str, str]:
    """How binarised data, of so many lines, differs from that of the row, where both are known."""
    manifest: Dict[str, Any] = {}
    for place in (folder, folder.parent) if folder.name == "binarised" else (folder,):
        with contextlib.suppress(OSError, UserError, TypeError, ValueError):
            manifest = manifest or dict(read_manifest(place))
    name, said = published.data.recipe, manifest.get("settings")
    said, dataset = said if isinstance(said, dict) else {}, datasets().get(name)
    made_by = said.get("recipe", manifest.get("recipe"))
    found = {**{key: said.get(key) for key in _TEXT}, "recipe": None if made_by in _OWN else made_by}
    row = {key: getattr(published.data, key) for key in (*_TEXT, "recipe")}
    for split, number in dataset.expected.items() if dataset else ():
        part = (published.data.train_fraction or 1) if split == "train" else 1
        row[f"lines of {split}"] = max(1, math.ceil(number * part))
    row.update({f"words of {split}": number for split, number in (dataset.words if dataset else {}).items()})
    found.update({f"lines of {split}": number for split, number in lines.items()})
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # a damaged manifest is no proof
        for split, fact in manifest.get("splits", {}).items():
            found[f"words of {split}"] = fact["words"] + fact["lines"]  # an end of line counts as one
    known = {key for key in row if row[key] is not None and found.get(key) is not None}
    if dataset and name not in _OWN and not known - {*_TEXT}:
        return {"data.recipe": f"{name} → cannot be told: there is no manifest.json"}
    return changes({key: row[key] for key in known}, {key: found[key] for key in known}, "data.")


def differences(published: Recipe, done: Mapping[str, Any], data: Mapping[str, str]) -> List[str]:
    """'key: row → run' of each; none where the run stands for the row."""
    return [f"{key}: {what}" for key, what in {**data, **changes(settings(published), done)}.items()]
