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

# What leaves an evaluation the same.
_FREE = ("max_tokens", "headline")
# The user's own files: their name does not tell which data set they hold.
_OWN = ("parallel", "binarised")
_TEXT = ("source", "target", "bpe", "joined_dictionary", "lowercase")


def settings(recipe: Recipe) -> Dict[str, Any]:
    """What a finished run of the recipe has done, whatever carried it out."""
    return {
        **_training({**train_inputs(recipe), "goal": dataclasses.asdict(recipe.train)}),
        "averaged": recipe.average.count if recipe.average else 1,
        "evaluation": _evaluation(dataclasses.asdict(recipe)[("generate" if recipe.generate else "score")]),
    }


def settings_made(folder: Path, recipe: Recipe) -> Dict[str, Any]:
    """The same, of the finished steps in a run folder that follow from each other."""
    try:
        return _settings_made(folder, recipe)
    except (AttributeError, KeyError, IndexError, TypeError):
        return {"averaged": None, "evaluation": {}, "state.json": "damaged"}


def _settings_made(folder: Path, recipe: Recipe) -> Dict[str, Any]:
    made = marks(folder)
    train, average = made.get("train", {}), made.get("average", {})
    evaluated = made.get(f"{'generate' if recipe.generate else 'score'}-{recipe.subsets[0]}", {})
    said = evaluated.get("inputs", {})
    origin = said.get("made") or [None]
    averaged = origin[0] is not None and origin[0] == average.get("fingerprint")
    done = average.get("inputs", {}).get("train", [None])[0] if averaged else origin[0]
    trained = (
        {**train.get("inputs", {}), "goal": train.get("goal", {})} if recipe.finetune != "noft" else None
    )
    if trained is None:  # nothing is: the pretrained model is evaluated
        return {**settings(recipe), "evaluation": _evaluation(said.get("settings"))}
    return {
        **(_training(trained) if done and done == train.get("fingerprint") else {"train": "not finished"}),
        "averaged": average["inputs"].get("count") if averaged else 1,
        "evaluation": _evaluation(said.get("settings")),
    }


def _training(said: Mapping[str, Any]) -> Dict[str, Any]:
    train = {key: value for key, value in said.get("train", {}).items() if key != "seed"}
    goal = {key: said["goal"].get(key) for key in ("max_epoch", "max_update")}
    return {"model": said.get("model"), "train": {**train, **goal}}


def _evaluation(said: Any) -> Dict[str, Any]:
    return {key: value for key, value in (said or {}).items() if key not in _FREE}


def data_differences(published: Recipe, folder: Path, lines: Mapping[str, int]) -> Dict[str, str]:
    """How binarised data, of so many lines, differs from that of the row; both only where they are known."""
    manifest: Mapping[str, Any] = {}
    for place in (folder, folder.parent) if folder.name == "binarised" else (folder,):
        with contextlib.suppress(OSError, UserError):
            manifest = manifest or _mapping(read_manifest(place))
    said, name = _mapping(manifest.get("settings")), published.data.recipe
    found: Dict[str, Any] = {key: said.get(key) for key in _TEXT}
    found["recipe"] = said.get("recipe", manifest.get("recipe"))
    row = {key: getattr(published.data, key) for key in (*_TEXT, "recipe")}
    if found["recipe"] in (None, *_OWN):
        del found["recipe"]
    dataset, part = datasets().get(name), published.data.train_fraction or 1
    for split, number in (dataset.expected if dataset else {}).items():
        row[f"lines of {split}"] = max(1, math.ceil(number * part)) if split == "train" else number
    row.update({f"words of {split}": number for split, number in (dataset.words if dataset else {}).items()})
    found.update({f"lines of {split}": number for split, number in lines.items()})
    for split, fact in _mapping(manifest.get("splits")).items():
        if all(isinstance(_mapping(fact).get(key), int) for key in ("words", "lines")):
            found[f"words of {split}"] = fact["words"] + fact["lines"]  # an end of line counts as one
    known = [key for key in row if row[key] is not None and found.get(key) is not None]
    if dataset and name not in _OWN and not set(known) - {*_TEXT}:
        return {"data.recipe": f"{name} → cannot be told: there is no manifest.json"}
    return changes({key: row[key] for key in known}, {key: found[key] for key in known}, "data.")


def differences(published: Recipe, done: Mapping[str, Any], data: Mapping[str, str]) -> List[str]:
    """'key: row → run' for each difference; none where the run stands for the row."""
    return [f"{key}: {what}" for key, what in {**data, **changes(settings(published), done)}.items()]


def _mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is a mapping: a damaged manifest is no proof."""
    return value if isinstance(value, dict) else {}
